"""Model averaging: weights brought together every so often. The twin of torch's package."""
