"""Periodic averaging of weights. The twin of torch's package."""
