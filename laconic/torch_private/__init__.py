"""Every use of what torch keeps private, with the versions it was tried on: torch 2.11 to 2.13 (`fsdp.py`: 2.15, too).

A new version of torch is tried by running `tests/torch_private`.
"""
