"""The outer step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from laconic.plans.outer import Nesterov, Optim

PLAIN = Nesterov(lr=1, momentum=0)
"""Plain averaging."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_plain_averaging_subtracts_the_mean_delta_in_place(dtype: torch.dtype) -> None:
    weights = [torch.tensor([1.0, 4.0], dtype=dtype), torch.tensor([3.0, 0.0], dtype=dtype)]
    anchor = {"w": torch.tensor([8.0, 8.0], dtype=dtype), "other": torch.ones(1)}
    held = anchor["w"]
    delta = torch.stack([held - w for w in weights]).mean(0)
    PLAIN.step(anchor, {"w": delta}, {})
    assert anchor["w"] is held
    assert torch.equal(held, torch.tensor([2.0, 2.0], dtype=dtype))
    assert torch.equal(anchor["other"], torch.ones(1))


def test_the_anchor_keeps_its_dtype() -> None:
    anchor = {"w": torch.ones(2)}
    PLAIN.step(anchor, {"w": torch.full((2,), 0.5, dtype=torch.bfloat16)}, {})
    assert anchor["w"].dtype == torch.float32
    assert anchor["w"].tolist() == [0.5, 0.5]


def test_plain_averaging_keeps_no_state() -> None:
    state: dict[str, object] = {}
    PLAIN.step({"w": torch.ones(2)}, {"w": torch.ones(2)}, state)
    assert state == {}
    assert PLAIN.adopts


def _two(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"w": torch.randn(3, 4, dtype=dtype), "b": torch.randn(5, dtype=dtype)}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_nesterov_equals_torch_sgd_with_nesterov(momentum: float) -> None:
    ours, theirs = _two(), {name: t.clone() for name, t in _two().items()}
    state: dict[str, object] = {}
    optimizer = torch.optim.SGD(theirs.values(), lr=0.7, momentum=momentum, nesterov=momentum > 0)
    for round_ in range(4):
        delta = {name: torch.full_like(t, 0.1 * round_ - 0.2) * t for name, t in _two().items()}
        Nesterov(lr=0.7, momentum=momentum).step(ours, delta, state)
        for name, t in theirs.items():
            t.grad = delta[name]
        optimizer.step()
    for name, t in theirs.items():
        torch.testing.assert_close(ours[name], t, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad", "RMSprop"])
def test_stepping_parts_one_by_one_equals_the_torch_optimizer(name: str) -> None:
    """Buckets and fragments step one after the other; the optimizer's state is kept by name between them."""
    ours, theirs = _two(), {key: t.clone() for key, t in _two().items()}
    state: dict[str, object] = {}
    optimizer = getattr(torch.optim, name)(theirs.values(), lr=0.1)
    for round_ in range(1, 4):
        for key in ours:
            Optim(name, {"lr": 0.1}).step({key: ours[key]}, {key: ours[key] * 0.1 * round_}, state)
        for t in theirs.values():
            t.grad = t * 0.1 * round_
        optimizer.step()
    for key, t in theirs.items():
        torch.testing.assert_close(ours[key], t, rtol=1e-12, atol=1e-12)
        assert ours[key].grad is None


def test_outer_values() -> None:
    assert Optim(torch.optim.AdamW, {"lr": 0.1}) == Optim("AdamW", {"lr": 0.1})
    assert len({Nesterov(), Nesterov(0.7, 0.9), Optim("SGD", {"lr": 1.0}), Optim("SGD", {"lr": 1.0})}) == 2
    assert repr(Nesterov()) == "Nesterov()"
    assert (Nesterov(1.0, 0.0).adopts, Nesterov().adopts, Optim("SGD", {"lr": 1.0}).adopts) == (True, False, False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Nesterov(lr=-1), "lr must be a number from 0 up"),
        (lambda: Nesterov(momentum=1.0), "momentum must be a number from 0 to below 1"),
        (
            lambda: Optim("SparseAdam"),
            "takes only sparse gradients, and mean deltas are dense. Choose another, such as",
        ),
        (lambda: Optim("AdamX"), "there is no such optimizer in torch.optim"),
        (lambda: Optim("Optimizer"), "there is no such optimizer in torch.optim"),
        (lambda: Optim("SGD", {"lrr": 1.0}), "torch.optim.SGD refuses these options"),
        (lambda: Optim("SGD", [1.0]), "options are the optimizer's keywords"),  # type: ignore[arg-type]
    ],
)
def test_invalid_outer_steps_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_an_optimizer_whose_step_needs_a_closure_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Optim\('LBFGS'\): its step needs closure, .* such as \"SGD\""):
        Optim("LBFGS")
