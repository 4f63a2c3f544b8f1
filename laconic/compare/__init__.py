"""What `laconic train` and `laconic compare` run: small models, embedded data, workers on one machine.

The lab is a training program like any user's own. It knows of laconic only what the README shows: one call
of `laconic.session.session`, and the ledger that it returns.
"""
