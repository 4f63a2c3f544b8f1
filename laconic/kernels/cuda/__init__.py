"""PowerSGD on CUDA: Triton kernels (`triton_*.py`) and their host side."""
