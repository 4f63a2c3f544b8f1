"""The outer step."""

from __future__ import annotations

import pytest
import torch

from laconic.outer import Adopt


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_adopting_moves_the_anchor_in_place_by_the_mean_delta(dtype: torch.dtype) -> None:
    weights = [torch.tensor([1.0, 4.0], dtype=dtype), torch.tensor([3.0, 0.0], dtype=dtype)]
    anchor = {"w": torch.tensor([8.0, 8.0], dtype=dtype), "other": torch.ones(1)}
    held = anchor["w"]
    delta = torch.stack([held - w for w in weights]).mean(0)
    Adopt().step(anchor, {"w": delta}, {})
    assert anchor["w"] is held
    assert torch.equal(held, torch.tensor([2.0, 2.0], dtype=dtype))
    assert torch.equal(anchor["other"], torch.ones(1))


def test_the_anchor_keeps_its_dtype() -> None:
    anchor = {"w": torch.ones(2)}
    Adopt().step(anchor, {"w": torch.full((2,), 0.5, dtype=torch.bfloat16)}, {})
    assert anchor["w"].dtype == torch.float32
    assert anchor["w"].tolist() == [0.5, 0.5]


def test_adopting_remembers_nothing() -> None:
    state: dict[str, object] = {}
    Adopt().step({"w": torch.ones(2)}, {"w": torch.ones(2)}, state)
    assert state == {}
    assert Adopt().adopts


def test_is_a_value() -> None:
    assert Adopt() == Adopt()
    assert len({Adopt(), Adopt()}) == 1
    assert repr(Adopt()) == "Adopt()"
