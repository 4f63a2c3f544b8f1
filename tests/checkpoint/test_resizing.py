"""When the world changes its size, what is owed is neither lost nor paid twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic import checkpoint
from tests.checkpoint.nests import same
from tests.workers import run_workers


def states_of(workers: int, scale: float = 1.0) -> list[dict[str, Any]]:
    """As `talk.state_dict()` has them: factors that all share, residuals that differ, in two codecs."""
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


def owed(states: Sequence[dict[str, Any]], kind: str, name: str) -> Tensor:
    return torch.stack([state["state"][kind]["codec"]["residual"][name].double() for state in states]).sum(0)


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= 1e-6 * b.norm())


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_the_sum_is_conserved_from_4_to_3_to_5_to_1(scale):
    old = states = states_of(4, scale)
    for workers in (3, 5, 1, 2):
        states = checkpoint.resize(states, workers)
        assert len(states) == workers
        for kind in ("gradient", "weights"):
            for name in ("a.weight", "residual"):
                assert close(owed(states, kind, name), owed(old, kind, name))


def test_the_mean_is_conserved_if_asked():
    old = states = states_of(4)
    for workers in (3, 5, 1):
        states = checkpoint.resize(states, workers, conserve="mean")
        assert close(owed(states, "gradient", "a.weight") / workers, owed(old, "gradient", "a.weight") / 4)


def residual(state: dict[str, Any]) -> Tensor:
    found: Tensor = state["state"]["gradient"]["codec"]["residual"]["a.weight"]
    return found


def test_those_who_stay_keep_theirs_and_those_who_join_owe_nothing():
    old = states_of(2)
    new = checkpoint.resize(old, 4)
    assert all(same(residual(a), residual(b)) for a, b in zip(old, new[:2], strict=True))
    assert all(not residual(state).any() for state in new[2:])
    share = residual(old[1]).double()
    assert same(residual(checkpoint.resize(old, 1)[0]), (residual(old[0]).double() + share).float())


def test_the_same_size_changes_nothing_and_shared_state_is_everyones():
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


def test_a_worker_without_a_residual_owes_nothing():
    old = states_of(3)
    for state in (old[0], old[2]):
        del state["state"]["gradient"]["codec"]["residual"]["a.weight"]
    del old[1]["state"]["weights"]["codec"]["residual"]
    new = checkpoint.resize(old, 2)
    assert same(residual(new[1]), residual(old[1]))
    assert not residual(new[0]).any()
    assert close(
        torch.stack([state["state"]["weights"]["codec"]["residual"]["a.weight"].double() for state in new]).sum(0),
        sum(old[w]["state"]["weights"]["codec"]["residual"]["a.weight"].double() for w in (0, 2)),
    )


def test_states_that_do_not_belong_together_are_refused():
    old = states_of(2)
    old[1]["step"] = 13
    with pytest.raises(
        ValueError, match=r"worker 1 was saved with step 13 and worker 0 with 12. Give the states of one"
    ):
        checkpoint.resize(old, 3)
    with pytest.raises(ValueError, match=r"resize\(0 states, workers=3\)"):
        checkpoint.resize([], 3)
    with pytest.raises(ValueError, match=r"resize\(2 states, workers=0\)"):
        checkpoint.resize(states_of(2), 0)
    with pytest.raises(ValueError, match=r"resize\(conserve='all'\): what is conserved"):
        checkpoint.resize(states_of(2), 1, conserve="all")  # type: ignore[arg-type]


def train(worker: int, folder: str, workers_before: int) -> float:
    """Train three steps, from what a world of another size saved if there was one; return the norm of what is owed."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    talk = laconic.attach(laconic.power_sgd(rank=1), model, optimizer)
    if workers_before:
        old = [checkpoint.load(folder, worker=w) for w in range(workers_before)]
        model.load_state_dict(old[min(worker, workers_before - 1)].state["model"])
        new = checkpoint.resize([each.state["talk"] for each in old], talk.workers)
        talk.load_state_dict(new[worker])
    for _ in range(3):
        optimizer.zero_grad()
        data = torch.Generator().manual_seed(10 * talk.step + worker)
        model(torch.randn(8, 16, generator=data)).square().mean().backward()
        optimizer.step()
    checkpoint.save(folder, {"model": model.state_dict(), "talk": talk.state_dict()}, step=talk.step)
    return float(talk.step)


def test_training_goes_on_in_a_world_of_another_size(tmp_path):
    folder = str(tmp_path)
    assert run_workers(train, workers=3, args=(folder, 0)) == [3.0] * 3
    assert run_workers(train, workers=2, args=(folder, 3)) == [6.0] * 2
    assert [generation.workers for generation in checkpoint.verify(tmp_path)] == [3, 2]


Owed = dict[str, Tensor]


def owed_by(talk: laconic.Talk) -> Owed:
    """What this worker's error feedback still owes, of each parameter."""
    found: Owed = talk.state_dict()["state"]["gradient"]["codec"]["residual"]
    return {name: residual.double() for name, residual in found.items()}


def learn(worker: int, folder: str, workers_before: int) -> tuple[list[float], Owed, Owed]:
    """Learn a fixed map, from what another world saved if there was one: losses, what was owed at first and at last."""
    torch.manual_seed(0)
    target = torch.randn(24, 12)
    model = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 12))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    talk = laconic.attach(laconic.power_sgd(rank=1), model, optimizer)
    if workers_before:
        old = [checkpoint.load(folder, worker=w) for w in range(workers_before)]
        model.load_state_dict(old[0].state["model"])
        optimizer.load_state_dict(old[0].state["optimizer"])
        talk.load_state_dict(checkpoint.resize([each.state["talk"] for each in old], talk.workers)[worker])
    at_first = owed_by(talk) if workers_before else {}
    held_out = torch.randn(256, 24, generator=torch.Generator().manual_seed(1))

    def loss(x: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(x), torch.tanh(x @ target / 5))

    losses = [loss(held_out).item()]
    for _ in range(60):
        optimizer.zero_grad()
        loss(torch.randn(16, 24, generator=torch.Generator().manual_seed(100 * talk.step + worker))).backward()
        optimizer.step()
    losses.append(loss(held_out).item())
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "talk": talk.state_dict()}
    checkpoint.save(folder, state, step=talk.step)
    return losses, at_first, owed_by(talk)


def test_from_4_to_3_to_5_workers_nothing_owed_is_lost_and_the_loss_goes_on_falling(tmp_path):
    before, last, saved = 0, float("inf"), list[Owed]()
    for workers in (4, 3, 5):
        results = run_workers(learn, workers, (str(tmp_path), before))
        assert all(losses == results[0][0] for losses, _, _ in results), "all hold the same weights"
        (first, final), _, _ = results[0]
        assert final < 0.8 * first, "it goes on learning"
        if before:
            assert first == last, "from where the other world was"
        for name in saved[0] if saved else ():
            loaded = torch.stack([at_first[name] for _, at_first, _ in results]).sum(0)
            owed = torch.stack([each[name] for each in saved])
            assert owed.sum(0).norm() > 0 and not torch.equal(owed[0], owed[1]), "each owes something of its own"
            assert (loaded - owed.sum(0)).norm() <= 1e-6 * owed.norm()
        before, last, saved = workers, final, [at_last for _, _, at_last in results]
    assert [(each.step, each.workers) for each in checkpoint.verify(tmp_path)] == [(60, 4), (120, 3), (180, 5)]
