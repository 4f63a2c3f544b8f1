"""What steps of optimizers count as: subclasses, several optimizers, optimizers that `attach` was not given."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laconic
from tests.session.models import assert_equal_bits, batch, mlp, weights
from tests.workers import run_workers


class _Sub(torch.optim.SGD):
    """Calls `super().step()`, and fails when asked to."""

    fails = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        if self.fails:
            raise ArithmeticError


def _subclass(worker: int, text: str) -> tuple[int, Tensor, Tensor]:
    if worker == 0:
        torch.optim.SGD([nn.Parameter(torch.ones(1))])  # so that hooks fire inside super().step() here, and only here
    module = mlp()
    optimizer = _Sub(module.parameters(), lr=0.1)
    session = laconic.attach(laconic.plan(text), module, optimizer)
    for step in range(8):
        x, y = batch(worker, step)
        F.cross_entropy(module(x), y).backward()
        if step == 4:  # a step that raises did not happen; it is taken again with no gradient left of the first try
            before = [p.detach().clone() for p in module.parameters()]
            optimizer.fails = True
            with pytest.raises(ArithmeticError):
                optimizer.step()
            optimizer.fails = False
            with torch.no_grad():
                for p, old in zip(module.parameters(), before, strict=True):
                    p.copy_(old)
        optimizer.step()
        optimizer.zero_grad()
    return session.step, weights(module), _oracle(text.startswith("ddp"), dist_workers=2)


def _oracle(gradients: bool, dist_workers: int) -> Tensor:
    """The same training in one process: every step's mean gradient, or weights averaged after steps 4 and 8."""
    replicas = [mlp() for _ in range(dist_workers)]
    for step in range(8):
        for worker, module in enumerate(replicas):
            x, y = batch(worker, step)
            module.zero_grad()
            F.cross_entropy(module(x), y).backward()
        with torch.no_grad():
            for params in zip(*(module.parameters() for module in replicas), strict=True):
                mean = torch.stack([p.grad for p in params if p.grad is not None]).mean(0)
                for p in params:
                    assert p.grad is not None
                    p.sub_(mean if gradients else p.grad, alpha=0.1)
                if not gradients and step % 4 == 3:
                    average = torch.stack(params).mean(0)
                    for p in params:
                        p.copy_(average)
    return weights(replicas[0])


@pytest.mark.parametrize("text", ["ddp()", "post_local_sgd(period=4)"])
def test_a_step_that_calls_super_counts_once(text):
    results = run_workers(_subclass, 2, (text,))
    assert [steps for steps, _, _ in results] == [8, 8]
    assert_equal_bits([got for _, got, _ in results])
    torch.testing.assert_close(results[0][1], results[0][2], rtol=1e-5, atol=1e-6)


class _Game(nn.Module):
    """Two networks, each with an optimizer of its own: a GAN in small."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.critic, self.maker = nn.Linear(4, 1), nn.Linear(3, 4)
        self.idle = nn.Linear(2, 2)  # held by no optimizer


def _play(game: _Game, worker: int, step: int) -> tuple[Tensor, Tensor]:
    """Return the loss of the critic and that of the maker, which depends on what the critic has learned since."""
    generator = torch.Generator().manual_seed(100 * step + worker)
    noise, real = torch.randn(8, 3, generator=generator), torch.randn(8, 4, generator=generator)
    made = game.maker(noise)
    critic = F.softplus(game.critic(made.detach())).mean() + F.softplus(-game.critic(real)).mean()
    return critic, noise


def _optimizers(game: _Game) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return torch.optim.Adam(game.critic.parameters(), lr=0.02), torch.optim.SGD(game.maker.parameters(), lr=0.1)


def _game(worker: int, text: str, order: str, early: bool, given: str) -> tuple[Tensor, int, int]:
    game = _Game()
    for p in game.idle.parameters():
        p.grad = torch.full_like(p, float(worker))
    critic, maker = _optimizers(game)
    session = laconic.attach(laconic.plan(text), game, [critic, maker] if given == "cm" else [maker, critic])

    def turn(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        if early:
            session.average_gradients(optimizer)
            sent = session.ledger.collectives
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.05)
        optimizer.step()
        assert not early or session.ledger.collectives == sent, "gradients travelled twice"

    for step in range(6):
        for who in order:
            loss, noise = _play(game, worker, step)
            if who == "c":
                turn(critic, loss)
            else:
                turn(maker, F.softplus(-game.critic(game.maker(noise))).mean())
    assert all(bool((p.grad == worker).all()) for p in game.idle.parameters() if p.grad is not None)
    return weights(game), session.step, session.ledger.collectives


def _game_alone(order: str, workers: int, early: bool) -> Tensor:
    game = _Game()
    critic, maker = _optimizers(game)
    for step in range(6):
        for who in order:
            plays = [_play(game, worker, step) for worker in range(workers)]
            if who == "c":
                optimizer, losses = critic, [loss for loss, _ in plays]
            else:
                optimizer, losses = maker, [F.softplus(-game.critic(game.maker(noise))).mean() for _, noise in plays]
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            if early:
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.05)
            optimizer.step()
    return weights(game)


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("order", "given"),
    [("mc", "cm"), pytest.param("cm", "cm", marks=pytest.mark.slow), pytest.param("cm", "mc", marks=pytest.mark.slow)],
)
def test_each_optimizer_averages_what_it_holds_in_any_order(order, given, early):
    results = run_workers(_game, 2, ("ddp()", order, early, given))
    assert_equal_bits([got for got, _, _ in results])
    assert [steps for _, steps, _ in results] == [6, 6]
    torch.testing.assert_close(results[0][0], _game_alone(order, 2, early), rtol=1e-5, atol=1e-6)


def _twice(worker: int) -> str:
    game = _Game()
    critic, maker = _optimizers(game)
    session = laconic.attach(laconic.ddp(), game, [critic, maker])
    losses = [_play(game, worker, step)[0] for step in range(2)]
    losses[0].backward()
    critic.step()
    with pytest.raises(RuntimeError) as error:
        critic.step()
    session.skip()  # the maker's part
    assert session.step == 1
    critic.step()
    with pytest.raises(ValueError, match="attach was not given this optimizer"):
        session.average_gradients(torch.optim.SGD(game.idle.parameters()))
    return str(error.value)


def test_an_optimizer_that_steps_twice_before_the_others_is_refused():
    for text in run_workers(_twice, 2):
        assert "Adam steps twice, and SGD has not stepped yet" in text
        assert "attach(plan, model.part, optimizer)" in text


def _other_order(worker: int) -> str:
    game = _Game()
    critic, maker = _optimizers(game)
    laconic.attach(laconic.ddp(), game, [critic, maker])
    _play(game, worker, 0)[0].backward()
    with pytest.raises(laconic.DesyncError) as error:
        (critic if worker else maker).step()
    return str(error.value)


def test_workers_that_step_their_optimizers_in_different_orders_are_told():
    texts = run_workers(_other_order, 2)
    assert "with the gradients of optimizer 2" in texts[0] and "with the gradients of optimizer 1" in texts[1]


def _void(worker: int, fused: bool, sick: str) -> tuple[list[Tensor], int]:
    """One worker's gradients of one optimizer are NaN in step 1: later optimizers of that step change nothing."""
    game = _Game()
    critic, maker = _optimizers(game)
    if fused:
        critic = torch.optim.Adam(game.critic.parameters(), lr=0.02, fused=True)
        maker = torch.optim.SGD(game.maker.parameters(), lr=0.1, fused=True)
    session = laconic.attach(laconic.ddp(), game, [critic, maker])
    session._averager.check.late = fused
    seen = [weights(game)]
    for step in range(3):
        for who, optimizer in (("critic", critic), ("maker", maker)):
            loss, noise = _play(game, worker, step)
            optimizer.zero_grad()
            (loss if who == "critic" else F.softplus(-game.critic(game.maker(noise))).mean()).backward()
            if step == 1 and worker == 1 and who == sick:
                next(iter(optimizer.param_groups[0]["params"])).grad.mul_(torch.nan)
            optimizer.step()
            assert all(p.grad is not None for p in optimizer.param_groups[0]["params"])
            seen.append(weights(game))
    return seen, session.step


@pytest.mark.parametrize("fused", [False, True], ids=["host", "late"])
def test_nan_for_one_optimizer_stops_those_that_follow_in_the_step(fused):
    for sick, kept in (("critic", [True, True]), ("maker", [False, True])):
        results = run_workers(_void, 2, (fused, sick))
        for seen, steps in results:
            assert steps == 3 and all(each.isfinite().all() for each in seen)
            unchanged = [torch.equal(a, b) for a, b in pairwise(seen)]
            assert unchanged == [False, False, *kept, False, False]
        for ours, theirs in zip(results[0][0], results[1][0], strict=True):
            assert torch.equal(ours, theirs)


def _attached(plan: str = "ddp()") -> tuple[nn.Sequential, torch.optim.Optimizer, laconic.Session]:
    module = mlp(depth=1)
    given = torch.optim.SGD(module[0].parameters(), lr=0.1)
    session = laconic.attach(laconic.plan(plan), module, given)
    module(torch.ones(1, 32)).sum().backward()
    return module, given, session


def test_an_optimizer_that_attach_was_not_given_is_found_at_its_first_step():
    module, given, session = _attached()
    unrelated = torch.optim.SGD(mlp().parameters(), lr=0.1)
    other = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=0.1)
    for optimizer in (given, unrelated, other, unrelated):
        optimizer.step()
    other.add_param_group({"params": module[2].parameters()})
    way_out = r"attach was not given Adam, which has changed 2\.weight and 1 more.*attach\(plan, model, \[optimizer,"
    with pytest.raises(RuntimeError, match=way_out):
        other.step()
    module.zero_grad()
    other.step()  # without gradients nothing changes
    assert session.step == 1
    session.detach()
    module(torch.ones(1, 32)).sum().backward()
    other.step()


class _Wrapper(torch.optim.Optimizer):
    """Steps another optimizer, on some steps only."""

    def __init__(self, inner: torch.optim.Optimizer, shares: bool) -> None:
        params = [p for group in inner.param_groups for p in group["params"]]
        super().__init__(inner.param_groups if shares else params, {})
        self.inner, self.on = inner, True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.on:
            self.inner.step()


@pytest.mark.parametrize("shares", [False, True])
def test_wrappers_of_a_given_optimizer_and_optimizers_inside_one_may_step(shares):
    module, given, session = _attached()
    wrapper = _Wrapper(given, shares)
    wrapper.step()
    assert session.step == 1
    wrapper.on = False
    if shares:
        wrapper.step()
    session.detach()
    with laconic.attach(laconic.ddp(), module, wrapper) as session:  # now the one inside is the other
        wrapper.on = True
        wrapper.step()
        assert session.step == 1
        with pytest.raises(RuntimeError, match="attach was not given SGD"):
            torch.optim.SGD(module[0].parameters(), lr=0.1).step()


def test_the_hooks_for_all_optimizers_keep_nothing_alive():
    from torch.optim.optimizer import _global_optimizer_post_hooks as hooks

    module, given, session = _attached()
    assert len(hooks) == 1
    alive = weakref.ref(module)
    del module, given, session
    gc.collect()
    assert alive() is None and len(hooks) <= 1  # one for all sessions, removed by the next detach
