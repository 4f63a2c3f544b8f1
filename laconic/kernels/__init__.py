"""Fast paths, each beside the plain code that it must equal.

`fused.py` is `ByShape(ErrorFeedback(LowRank))` in one piece, for buckets whose memory it may overwrite: Triton kernels
on CUDA (`triton_*.py`). Elsewhere `dense.py` does it with in-place matrix products.
"""
