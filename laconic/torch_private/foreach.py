"""Operations on lists of tensors, on CUDA one kernel for many, as torch's optimizers use them."""

from __future__ import annotations

import torch

copy_all = torch._foreach_copy_
divide_all = torch._foreach_div_
multiply_all = torch._foreach_mul_
norms = torch._foreach_norm
zero_all = torch._foreach_zero_
