"""The lab: small models on embedded data, trained by an ordinary script, `python -m laconic.tools.lab.script`."""
