"""A drop-in replacement of `torch.distributed.algorithms`, the twin, without the defects of torch's modules.

    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook     # before
    from laconic.algorithms.ddp_comm_hooks import powerSGD_hook               # after

It has the same modules, names and signatures. Each docstring describes the differences, and `docs/twin.md` lists them.
"""
