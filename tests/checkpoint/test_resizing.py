"""When the number of workers changes, residuals are neither lost nor duplicated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic import checkpoint
from tests.checkpoint.trees import same
from tests.workers import run_workers


def states_of(workers: int, scale: float = 1.0) -> list[dict[str, Any]]:
    """As `session.state_dict()` returns them: factors that all workers share, and residuals that differ."""
    generator = torch.Generator().manual_seed(workers)
    shared = torch.randn(6, 2, generator=generator)

    def codec() -> dict[str, Any]:
        residual = {name: scale * torch.randn(6, 5, generator=generator) for name in ("a.weight", "residual")}
        return {"codec": {"residual": residual, "inner": {"q": {"residual": shared}, "turn": {"a.weight": 3}}}}

    return [
        {
            "plan": "power_sgd(rank=2)",
            "step": 12,
            "state": {"gradient": codec(), "weights": codec(), "outer": {"velocity": {"residual": shared}}},
            "anchor": {"a.weight": shared},
            "layout": [["a.weight", "residual"]],
        }
        for _ in range(workers)
    ]


def residual(state: dict[str, Any], kind: str = "gradient", name: str = "a.weight") -> Tensor:
    found: Tensor = state["state"][kind]["codec"]["residual"][name]
    return found


def total(states: Sequence[dict[str, Any]], kind: str = "gradient", name: str = "a.weight") -> Tensor:
    return torch.stack([residual(state, kind, name).double() for state in states]).sum(0)


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= 1e-6 * b.norm())


def test_counts_and_kept_states_and_what_is_in_flight_stay_with_their_workers():
    old = states_of(3)
    for worker, state in enumerate(old):
        state |= {"counted": {"now": [4, 32 * worker]}, "kept": {"reader": {"at": worker}}}
        state["in_flight"] = [{"names": ["a.weight"], "due": 13, "sent": {"a.weight": worker}, "means": []}]
    for workers in (2, 3, 5):
        new = checkpoint.resize(old, workers)
        owners = [worker if worker < 3 else 0 for worker in range(workers)]
        assert [state["kept"]["reader"]["at"] for state in new] == owners
        assert [state["in_flight"][0]["sent"]["a.weight"] for state in new] == owners
        assert [state["counted"]["now"][1] for state in new] == [32 * owner for owner in owners]


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_the_sum_is_conserved_from_4_to_3_to_5_to_1(scale):
    old = states = states_of(4, scale)
    for workers in (3, 5, 1, 2):
        states = checkpoint.resize(states, workers)
        assert len(states) == workers
        for kind in ("gradient", "weights"):
            for name in ("a.weight", "residual"):
                assert close(total(states, kind, name), total(old, kind, name))


def test_the_mean_is_conserved_on_request():
    old = states = states_of(4)
    for workers in (3, 5, 1):
        states = checkpoint.resize(states, workers, conserve="mean")
        assert close(total(states) / workers, total(old) / 4)


def test_workers_that_stay_keep_their_residuals_and_workers_that_join_have_none():
    old = states_of(2)
    new = checkpoint.resize(old, 4)
    assert all(same(residual(a), residual(b)) for a, b in zip(old, new[:2], strict=True))
    assert all(not residual(state).any() for state in new[2:])
    both = (residual(old[0]).double() + residual(old[1]).double()).float()
    assert same(residual(checkpoint.resize(old, 1)[0]), both)


def test_the_same_number_changes_nothing_and_shared_state_is_the_same_on_all():
    old = states_of(3)
    assert all(same(a, b) for a, b in zip(checkpoint.resize(old, 3), old, strict=True))
    for state in checkpoint.resize(old, 5):
        assert same({**state, "state": state["state"]["outer"]}, {**old[0], "state": old[0]["state"]["outer"]})
        assert same(state["state"]["gradient"]["codec"]["inner"], old[0]["state"]["gradient"]["codec"]["inner"])


def test_inputs_are_untouched_and_residuals_are_copies():
    old, again = states_of(4), states_of(4)
    for state in checkpoint.resize(old, 4):
        residual(state).fill_(7)
    assert all(same(a, b) for a, b in zip(old, again, strict=True))


def test_a_missing_residual_counts_as_zero():
    old = states_of(3)
    for state in (old[0], old[2]):
        del state["state"]["gradient"]["codec"]["residual"]["a.weight"]
    del old[1]["state"]["weights"]["codec"]["residual"]
    new = checkpoint.resize(old, 2)
    assert same(residual(new[1]), residual(old[1]))
    assert not residual(new[0]).any()
    assert close(total(new, "weights"), total([old[0], old[2]], "weights"))


def test_states_of_different_checkpoints_are_refused():
    old = states_of(2)
    old[1]["step"] = 13
    with pytest.raises(ValueError, match=r"worker 1 was saved with step 13 and worker 0 with 12\. Give the states"):
        checkpoint.resize(old, 3)
    with pytest.raises(ValueError, match=r"resize\(0 states, workers=3, .*: give each"):
        checkpoint.resize([], 3)
    with pytest.raises(ValueError, match=r"resize\(2 states, workers=0"):
        checkpoint.resize(states_of(2), 0)
    with pytest.raises(ValueError, match=r"conserve='all'\): .* conserve=\"sum\" or \"mean\""):
        checkpoint.resize(states_of(2), 1, conserve="all")  # type: ignore[arg-type]


Residuals = dict[str, Tensor]


def learn(worker: int, folder: str, workers_before: int) -> tuple[list[float], Residuals, Residuals]:
    """Learn a map, from what other workers saved if there were any; return losses, and residuals before and after."""
    torch.manual_seed(0)
    target = torch.randn(24, 12)
    model = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 12))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session = laconic.attach(laconic.power_sgd(rank=1), model, optimizer)

    def residuals() -> Residuals:
        found: Residuals = session.state_dict()["state"]["gradient"]["codec"]["residual"]
        return {name: each.double() for name, each in found.items()}

    if workers_before:
        old = [checkpoint.load(folder, worker=w) for w in range(workers_before)]
        own = old[worker if worker < len(old) else 0].state
        model.load_state_dict(own["model"])
        optimizer.load_state_dict(own["optimizer"])
        session.load_state_dict(checkpoint.resize([each.state["session"] for each in old], session.workers)[worker])
    before = residuals() if workers_before else {}
    held_out = torch.randn(256, 24, generator=torch.Generator().manual_seed(1))

    def loss(x: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(x), torch.tanh(x @ target / 5))

    losses = [loss(held_out).item()]
    for _ in range(40):
        optimizer.zero_grad()
        loss(torch.randn(16, 24, generator=torch.Generator().manual_seed(100 * session.step + worker))).backward()
        optimizer.step()
    losses.append(loss(held_out).item())
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "session": session.state_dict()}
    checkpoint.save(folder, state, step=session.step)
    return losses, before, residuals()


@pytest.mark.slow
def test_training_goes_on_from_4_to_3_to_5_workers_and_no_residual_is_lost(tmp_path):
    before, last, saved = 0, float("inf"), list[Residuals]()
    for workers in (4, 3, 5):
        results = run_workers(learn, workers, (str(tmp_path), before))
        assert all(losses == results[0][0] for losses, _, _ in results), "all have the same weights"
        (first, final), _, _ = results[0]
        assert final < 0.8 * first, "it goes on learning"
        if before:
            assert first == last, "from where the other workers were"
        for name in saved[0] if saved else ():
            loaded = torch.stack([at_first[name] for _, at_first, _ in results]).sum(0)
            old = torch.stack([each[name] for each in saved])
            assert old.sum(0).norm() > 0 and not torch.equal(old[0], old[1]), "each worker has its own residual"
            assert (loaded - old.sum(0)).norm() <= 1e-6 * old.norm()
        before, last, saved = workers, final, [at_last for _, _, at_last in results]
    assert [(each.step, each.workers) for each in checkpoint.verify(tmp_path)] == [(40, 4), (80, 3), (120, 5)]
