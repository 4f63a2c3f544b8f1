"""One thread a process: the tests' matrices are small, and workers share the cores."""

import importlib.util

import torch

torch.set_num_threads(1)

_NEED = {
    "triton": ["laconic/kernels/cuda/*.py"],
    "libcst": ["laconic/tools/migrate.py"],
    "torchft": ["laconic/integrations/torchft.py"],
    "lightning": ["laconic/integrations/lightning.py", "tests/integrations/*lightning*", "tests/integrations/*fabric*"],
    "accelerate": ["laconic/integrations/accelerate.py", "tests/integrations/test_accelerate*"],
    "transformers": ["laconic/integrations/transformers.py", "tests/integrations/test_transformers*"],
    "ray": ["tests/integrations/test_ray.py", "tests/integrations/ray_plans.py"],
}
"""The files that need a package which may not be installed."""
collect_ignore_glob = [
    file for package, files in _NEED.items() if importlib.util.find_spec(package) is None for file in files
]
