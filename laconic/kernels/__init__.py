"""Fused paths of the codecs, each tested against the plain code.

`choose.py` decides which one serves a bucket whose memory may be overwritten: `cuda/` (Triton kernels) or `cpu.py`
(in-place matrix products).
"""
