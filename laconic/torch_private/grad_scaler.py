"""GradScaler: the loss scale as a tensor."""

from __future__ import annotations

from torch import Tensor
from torch.amp.grad_scaler import GradScaler


def scale_of(scaler: GradScaler) -> Tensor | None:
    """Return the loss scale, 0-d on its device, which `update` changes in place; None before the first `scale`.

    `get_scale` would wait for the device.
    """
    scale: Tensor | None = scaler._scale
    return scale
