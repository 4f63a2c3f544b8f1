"""What can be known about a set-up before a run: each check is a small function that returns findings.

Checks read the machine through arguments (files, resolvers, the environment), so that tests can show them any machine.
What workers tell each other travels as JSON text through torch's store or as tensors: never as pickled objects.
"""
