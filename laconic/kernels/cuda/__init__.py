"""Fused paths on CUDA, in Triton."""
