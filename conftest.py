"""One thread a process: the tests' matrices are small, and workers share the cores."""

import importlib.util

import torch

torch.set_num_threads(1)

collect_ignore_glob = []
if importlib.util.find_spec("triton") is None:  # only these files need it
    collect_ignore_glob += ["laconic/kernels/cuda/*.py"]
if importlib.util.find_spec("libcst") is None:
    collect_ignore_glob += ["laconic/migrate.py"]
if importlib.util.find_spec("torchft") is None:
    collect_ignore_glob += ["laconic/integrations/torchft.py"]
