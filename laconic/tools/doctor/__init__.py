"""`laconic doctor`: checks before a run, a dry run of a training script, and fault injection.

Each check is a function that takes what it looks at as arguments and returns findings. Workers exchange JSON text
through torch's store; nothing is pickled.
"""
