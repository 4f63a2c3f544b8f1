"""`laconic compare`: the same training once with each plan, also over slow links.

A training is a script that torchrun could start: the user's own, or `lab/`, which trains small models on embedded data.
The script attaches `laconic.plan_from_env()` and calls `session.report`; `reporter.py` writes its reports to files,
and `runs.py` reads them.
"""
