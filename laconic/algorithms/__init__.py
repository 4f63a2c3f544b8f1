"""The drop-in twin of `torch.distributed.algorithms`: the same names, right where torch's are wrong.

    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook     # before
    from laconic.algorithms.ddp_comm_hooks import powerSGD_hook               # after

Module for module and signature for signature, on top of laconic's engine. What differs, and why, is said in each
docstring; `docs/twin.md` lists it all.
"""
