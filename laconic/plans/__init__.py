"""Plans: when workers synchronise and what, how it is encoded, what is done with the mean, and with whom."""
