"""Every use of what torch keeps private, tried on the versions in `TRIED` by running `tests/torch_private` there.

`tests/torch_private/test_only_place.py` looks for private names elsewhere.
"""

TRIED = ("2.11", "2.13", "2.15")
"""The oldest torch that is supported, the one in constraints.txt, and the newest."""
