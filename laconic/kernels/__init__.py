"""Fast paths, each beside the plain code that it must equal.

`fused_feedback` is `ErrorFeedback(LowRank)` in one piece, for buckets whose memory it may overwrite: Triton kernels on
CUDA (`triton_low_rank.py`), in-place matrix products elsewhere (`dense_low_rank.py`).
"""
