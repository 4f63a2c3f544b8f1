"""Other people's frameworks under laconic, each in a module that is imported by itself."""
