"""Plans: values that say when workers synchronise, what they send, what they do with the mean, and with whom."""
