"""The loss scale as a tensor."""

from __future__ import annotations

import torch

from laconic.torch_private.grad_scaler import scale_of


def test_the_scale_is_a_tensor_that_update_changes_in_place():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    assert scale_of(scaler) is None
    p = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p])
    scaler.scale(p.sum()).backward()
    scale = scale_of(scaler)
    assert scale is not None and scale.dim() == 0 and scale.item() == 4.0
    scaler.step(optimizer)
    scaler.update()
    assert scale_of(scaler) is scale and scale.item() == scaler.get_scale() == 8.0
