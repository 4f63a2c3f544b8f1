"""`flatten` and `unflatten` copy row by row and return views, whatever the strides of the tensors."""

from __future__ import annotations

import torch

from laconic.torch_private.foreach import flatten, unflatten


def test_flatten_copies_in_row_major_order() -> None:
    tensors = [torch.arange(6.0).view(2, 3).T, torch.empty(0, 2), torch.tensor(7.0)]
    flat = flatten(tensors)
    assert flat.tolist() == [0, 3, 1, 4, 2, 5, 7]
    flat.zero_()
    assert tensors[0].any()


def test_unflatten_returns_views_with_the_given_shapes() -> None:
    flat = torch.arange(7.0)
    views = unflatten(flat, [torch.empty(3, 2), torch.empty(0, 2), torch.tensor(0.0)])
    assert [v.shape for v in views] == [(3, 2), (0, 2), ()]
    views[2].fill_(-1)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, -1]
