"""The lab: small models on embedded data, trained by an ordinary script, `python -m laconic.compare.lab.script`."""
