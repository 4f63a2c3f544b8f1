"""One thread a process: the tests' matrices are small, and workers share the cores."""

import torch

torch.set_num_threads(1)
