"""Know before you train: measure a network (`probe`), predict plans on it (`plan`), simulate many workers."""
