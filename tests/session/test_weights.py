"""WeightSync of weights: deltas, outer steps, fragments, commits, and what is averaged besides."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from laconic.exchange import Averaged, Exchange, Mean, Peers, State, Tensors
from laconic.packing import in_fragments
from tests.session.models import assert_equal_bits, batch, mlp, weights
from tests.workers import run_workers


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, worker: int, step: int) -> None:
    x, y = batch(worker, step)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


# The golden trace: 2 workers, 3 rounds of 2 steps, plain SGD with given gradients.

LR, OUTER_LR, MOMENTUM = 0.1, 0.7, 0.9


def _given(worker: int, step: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.random.default_rng(10 * step + worker).standard_normal(5)


def _golden() -> np.ndarray[Any, np.dtype[np.float64]]:
    """DiLoCo, Algorithm 1, by hand."""
    anchor, velocity = np.ones(5), np.zeros(5)
    trace = []
    for round_ in range(3):
        ends = [anchor - LR * (_given(w, 2 * round_ + 1) + _given(w, 2 * round_ + 2)) for w in (0, 1)]
        delta = np.mean([anchor - end for end in ends], axis=0)
        velocity = MOMENTUM * velocity + delta
        anchor = anchor - OUTER_LR * (delta + MOMENTUM * velocity)
        trace.append(anchor)
    return np.stack(trace)


def _diloco(worker: int, text: str) -> Tensor:
    model = nn.Linear(5, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    trace = []
    with laconic.attach(laconic.plan(text), model, optimizer):
        for step in range(1, 7):
            model.weight.grad = torch.from_numpy(_given(worker, step)).float()[None]
            optimizer.step()
            if step % 2 == 0:
                trace.append(model.weight.detach().clone())
    return torch.cat(trace)


@pytest.mark.parametrize(
    "text",
    [
        "diloco(period=2, lr=0.7, momentum=0.9, codec=Exact())",
        "Plan(schedule=Every(2), outer=Optim('SGD', {'lr': 0.7, 'momentum': 0.9, 'nesterov': True}))",
        "Plan(schedule=Streaming(period=2, fragments=1), outer=Nesterov())",
        "Plan(schedule=Quadratic(growth=0.14143, floor=1), outer=Nesterov())",  # (0.14143 / 0.1)² = 2
    ],
)
def test_diloco_follows_the_trace_computed_by_hand(text):
    for trace in run_workers(_diloco, 2, (text,)):
        torch.testing.assert_close(trace, torch.from_numpy(_golden()).float(), rtol=1e-6, atol=1e-6)


def test_with_full_length_and_no_momentum_diloco_is_averaging():
    adopted = run_workers(_diloco, 2, ("post_local_sgd(period=2)",))
    assert all(
        map(torch.equal, run_workers(_diloco, 2, ("diloco(period=2, lr=1.0, momentum=0.0, codec=Exact())",)), adopted)
    )
    through_an_anchor = run_workers(_diloco, 2, ("Plan(schedule=Every(2), outer=Optim('SGD', {'lr': 1.0}))",))
    torch.testing.assert_close(through_an_anchor, adopted, rtol=1e-6, atol=1e-7)


SCHEDULES = [
    "Every(period=3, start=2)",
    "Nested({1: 2, 3: 4})",
    "Streaming(period=3, fragments=2)",
    "Streaming(period=3, fragments=3, delay=1)",
    "Quadratic(growth=0.1, floor=3)",
]
CODECS = ["Exact()", "Cast('bf16')", "ErrorFeedback(LowRank(rank=1, rounds='alternating'))", "ByShape(LowRank(rank=2))"]
OUTERS = ["Nesterov(lr=1, momentum=0)", "Nesterov(lr=0.5, momentum=0.5)", "Optim('AdamW', {'lr': 0.01})"]
TOPOLOGIES = ["World()", "Groups(2)"]


def _combinations(worker: int, wrapped: bool, every: int) -> dict[str, tuple[Tensor, Tensor]]:
    results = {}
    chosen = list(itertools.product(SCHEDULES, CODECS, OUTERS, TOPOLOGIES))
    for schedule, codec, outer, topology in chosen[::every]:
        text = f"Plan(schedule={schedule}, codec={codec}, outer={outer}, topology={topology})"
        module = mlp(width=8, depth=1)
        places = [p.data_ptr() for p in module.parameters()]
        model = DDP(module) if wrapped else module
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with laconic.attach(laconic.plan(text), model, optimizer) as session:
            for step in range(1, 8):
                x, y = batch(worker, step, width=8)
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            before = weights(module)
            session.average_weights()
        assert places == [p.data_ptr() for p in module.parameters()]
        results[text] = before, weights(module)
    return results


@pytest.mark.parametrize(
    ("wrapped", "every"), [(True, 7), (False, 11), pytest.param(True, 1, marks=pytest.mark.nightly)]
)
@pytest.mark.slow
def test_every_schedule_with_every_codec_outer_and_topology(wrapped, every):
    results = run_workers(_combinations, 4, (wrapped, every), timeout_s=170)
    for text in results[0]:
        now = [result[text][1] for result in results]
        assert now[0].isfinite().all(), text
        assert_equal_bits(now)
        if "Groups" in text and "delay" not in text:  # a late fragment mixes with what the worker has by then
            assert_equal_bits([result[text][0] for result in results[:2]])


def _resumed(worker: int, text: str, stop: int) -> tuple[Tensor, Tensor]:
    def run(steps: range, saved: dict[str, Any] | None) -> tuple[nn.Module, dict[str, Any]]:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if saved is not None:
            model.load_state_dict(saved["model"])
        session = laconic.attach(laconic.plan(text), model, optimizer)
        if saved is not None:
            model.load_state_dict(saved["model"])  # attach has given all workers those of the first
            optimizer.load_state_dict(saved["optimizer"])
            session.load_state_dict(saved["session"])
        for step in steps:
            _step(model, optimizer, worker, step)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "session": session.state_dict()}
        state = {name: _cloned(part) for name, part in state.items()}
        session.detach()
        return model, state

    whole, _ = run(range(1, 15), None)
    _, saved = run(range(1, stop), None)
    again, _ = run(range(stop, 15), saved)
    return weights(whole), weights(again)


def _cloned(nest: Any) -> Any:
    if isinstance(nest, Mapping):
        return {key: _cloned(value) for key, value in nest.items()}
    if isinstance(nest, list):
        return [_cloned(value) for value in nest]
    return nest.clone() if isinstance(nest, Tensor) else nest


@pytest.mark.parametrize("stop", [pytest.param(4, marks=pytest.mark.slow), 9])
@pytest.mark.parametrize(
    "text",
    [
        "diloco(period=4, codec=ErrorFeedback(LowRank(rank=1)))",
        "frugal('60x', delay=1)",
        "streaming_diloco(period=6, fragments=3, delay=2)",  # residuals change while a fragment is in flight
        "hierarchical_sgd({2: 2, 4: 4}, start=3)",
        pytest.param("qsr(growth=0.02, floor=2)", marks=pytest.mark.slow),
        pytest.param("Plan(schedule=Every(3), outer=Optim('AdamW', {'lr': 0.01}))", marks=pytest.mark.slow),
    ],
)
def test_resume_is_bit_exact(text, stop):
    for whole, again in run_workers(_resumed, 4, (text, stop)):
        assert torch.equal(whole, again)


def _peak_bytes(worker: int, text: str) -> tuple[int, float]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(12)], nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(laconic.plan(text), model, optimizer) as session:
        for step in range(1, 33):
            x, y = batch(worker, step, width=16)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        session.average_weights()
        said = [e for e in session.ledger.entries if e.phase == "weights" and e.step <= 32]
        by_step = {s: sum(e.payload_bytes for e in said if e.step == s) for s in range(1, 33)}
    return max(by_step.values()), laconic.sent_bytes(session.plan, model)


@pytest.mark.parametrize("delay", [0, 3])
def test_fragments_spread_the_bytes_over_steps(delay):
    plain = run_workers(_peak_bytes, 2, ("diloco(period=16, codec=Exact())",))[0]
    streaming = run_workers(
        _peak_bytes, 2, (f"streaming_diloco(period=16, fragments=4, delay={delay}, codec=Exact())",)
    )[0]
    assert streaming[0] <= 1.2 / 4 * plain[0]
    assert streaming[1] == plain[1]  # as much in all


def test_fragments_are_about_equal_and_hold_every_name_once():
    tensors = {f"p{i}": torch.empty(n) for i, n in enumerate([1000, 10, 900, 400, 500, 3, 300, 200])}
    parts = in_fragments(tensors, 3)
    sizes = [sum(tensors[name].numel() for name in part) for part in parts]
    assert sorted(name for part in parts for name in part) == sorted(tensors)
    assert max(sizes) <= 1.1 * sum(sizes) / 3
    assert [len(part) for part in in_fragments(tensors, 9)] == [1] * 8 + [0]


def _few_tensors(worker: int, text: str) -> tuple[int, float, list[Tensor]]:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = laconic.plan(text)
    session = laconic.attach(plan, model, optimizer)
    schedule = session.plan.schedule
    assert isinstance(schedule, laconic.Streaming)
    steps = 3 * schedule.period
    for _ in range(steps + schedule.delay):  # the last fragment is late
        model(torch.full((1, 8), float(worker))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = session.ledger.totals(by="phase")["weights"].wire_bytes
    session.change(laconic.ddp())
    session.change(plan)
    assert session.given == plan
    session.detach()
    return sent, steps * laconic.sent_bytes(plan, model), [p.detach().clone() for p in model.parameters()]


FEW = ["frugal('120x')", "frugal('120x', delay=1)", "streaming_diloco(16, 8, codec=Exact())"]


@pytest.mark.parametrize("plan", FEW)
def test_fragments_beyond_the_tensors_of_a_model_are_empty(plan):
    assert laconic.plan(plan).schedule.fragments > 2
    (sent, planned, here), (_, _, there) = run_workers(_few_tensors, 2, (plan,))
    assert sent == pytest.approx(planned, rel=1e-12)  # the mean over a period, times its steps
    assert sent > 0
    assert all(map(torch.equal, here, there))


def _late(worker: int, mix: float | None) -> list[float]:
    """One weight, moved by −1 a step on worker 0 and −3 on worker 1; a fragment that is heard two steps late."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = laconic.plan(f"Plan(schedule=Streaming(period=4, fragments=1, delay=2, mix={mix}))")
    trace = []
    with laconic.attach(plan, model, optimizer):
        for _ in range(8):
            model.weight.grad = torch.full((1, 1), 1.0 + 2 * worker)
            optimizer.step()
            trace.append(float(model.weight.detach()))
    return trace


def test_a_late_fragment_mixes_with_what_the_worker_has_by_then():
    # After step 4 the mean is −8; at step 6 worker 0 stands at −6 and keeps a quarter of it: 0.75 · −8 + 0.25 · −6.
    first, second = run_workers(_late, 2, (0.25,))
    assert first[:6] == [-1, -2, -3, -4, -5, 0.75 * -8 + 0.25 * -6]
    assert second[:6] == [-3, -6, -9, -12, -15, 0.75 * -8 + 0.25 * -18]
    assert first[6:] == [first[5] - 1, first[5] - 2]


def test_a_late_fragment_keeps_the_steps_since_it_was_sent():
    # After step 4 the mean is −8; at step 6 worker 0 has moved by −2 since then, and worker 1 by −6.
    first, second = run_workers(_late, 2, (None,))
    assert first == [-1, -2, -3, -4, -5, -8 - 2, -11, -12]
    assert second == [-3, -6, -9, -12, -15, -8 - 6, -17, -20]


def _pair(worker: int, mix: str) -> list[list[float]]:
    """Two weights of 3, a fragment each, with gradient 2 on all workers; as they are before each synchronisation."""
    model = nn.ParameterList([torch.full((1, 1), 3.0), torch.full((1, 1), 3.0)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    traces: list[list[float]] = [[], []]

    def note(*_: object) -> None:  # registered before that of the session: runs before it
        for trace, p in zip(traces, model, strict=True):
            trace.append(float(p.detach()))

    optimizer.register_step_post_hook(note)
    plan = laconic.plan(f"Plan(Streaming(period=6, fragments=2, mix={mix}), outer=Nesterov(lr=2, momentum=0))")
    with laconic.attach(plan, model, optimizer):
        for _ in range(14):
            for p in model:
                p.grad = torch.full_like(p, 2.0)
            optimizer.step()
    return traces


def _pair_by_hand(mix: float, first: int) -> list[float]:
    trace, weight, anchor = [], 3.0, 3.0
    for step in range(1, 15):
        weight -= 2
        trace.append(weight)
        if step >= first and (step - first) % 6 == 0:
            anchor -= 2 * (anchor - weight)
            weight = mix * weight + (1 - mix) * anchor
    return trace


@pytest.mark.parametrize(
    ("mix", "golden"),
    [
        ("0", [1, -1, -3, -11, -13, -15, -17, -19, -21, -35]),
        ("0.5", [1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5]),
        ("None", [1, -1, -3, -11, -13, -15, -17, -19, -21, -35]),  # at once, no step is taken meanwhile
    ],
)
def test_fragments_follow_the_golden_values_of_torchft(mix, golden):
    """Those of its regression test of streaming DiLoCo, in which the other fragment synchronises at steps 6 and 12."""
    for first, second in run_workers(_pair, 2, (mix,)):
        assert second[:10] == golden
        share = 0.0 if mix == "None" else float(mix)
        assert (first, second) == (_pair_by_hand(share, 6), _pair_by_hand(share, 3))


def _mixed(worker: int) -> list[float]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with laconic.attach(laconic.plan("Plan(Streaming(period=2, fragments=1, mix=0.25))"), model, optimizer):
        trace = []
        for _ in range(4):
            model.weight.grad = torch.full((1, 1), 1.0 + 2 * worker)
            optimizer.step()
            trace.append(float(model.weight.detach()))
    return trace


def test_own_weights_are_kept_also_where_the_mean_is_adopted_at_once():
    # After step 2 the mean is −4, and the anchor; worker 0 stands at −2: 0.75 · −4 + 0.25 · −2 = −3.5. Two steps later
    # worker 0 stands at −5.5, and worker 1 at −4.5 − 6 = −10.5: the mean is −8.
    first, second = run_workers(_mixed, 2)
    assert first == [-1, -3.5, -4.5, 0.75 * -8 + 0.25 * -5.5]
    assert second == [-3, -4.5, -7.5, 0.75 * -8 + 0.25 * -10.5]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(x))
        return result


def _buffers(worker: int, policy: str) -> tuple[Tensor, Tensor, Tensor]:
    model, alone = Normed(), Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(laconic.post_local_sgd(period=2, buffers=policy), model, optimizer):  # type: ignore[arg-type]
        for step in (1, 2):
            x, y = batch(worker, step)
            alone(x)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    ours, own, count = model.norm.running_mean, alone.norm.running_mean, model.norm.num_batches_tracked
    assert ours is not None
    assert own is not None
    assert count is not None
    return ours.clone(), own.clone(), count.clone()


@pytest.mark.parametrize("policy", ["average", "leader", "keep"])
def test_buffers_follow_the_policy(policy):
    results = run_workers(_buffers, 3, (policy,))
    own = [o for _, o, _ in results]
    for worker, (ours, mine, count) in enumerate(results):
        expected = {"average": torch.stack(own).mean(0), "leader": own[0], "keep": mine}[policy]
        if policy == "average":
            torch.testing.assert_close(ours, expected)
        else:
            assert torch.equal(ours, expected), worker
        assert int(count) == 2


def _moments(worker: int, policy: str) -> tuple[Tensor, Tensor, Tensor | None]:
    model = nn.ParameterDict({"used": torch.zeros(3), "mine": torch.zeros(2)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    plan = laconic.post_local_sgd(period=1, optimizer_state=policy)  # type: ignore[arg-type]
    with laconic.attach(plan, model, optimizer):
        model["used"].grad = torch.full((3,), 1.0 + worker)
        if worker == 0:  # no other worker has moments of this one
            model["mine"].grad = torch.ones(2)
        optimizer.step()
    state = optimizer.state[model["used"]]
    own = optimizer.state[model["mine"]].get("exp_avg")
    return state.get("exp_avg", torch.zeros(3)).clone(), torch.tensor(len(state)), own


@pytest.mark.parametrize("policy", ["keep", "average", "reset"])
def test_optimizer_state_follows_the_policy(policy):
    (first, size, own), (second, _, none) = run_workers(_moments, 2, (policy,))
    expected = {"keep": (0.1, 0.2), "average": (0.15, 0.15), "reset": (0.0, 0.0)}[policy]
    torch.testing.assert_close(first, torch.full((3,), expected[0]))
    torch.testing.assert_close(second, torch.full((3,), expected[1]))
    assert (int(size) == 0) == (policy == "reset")
    assert none is None
    if policy != "reset":
        assert own is not None
        torch.testing.assert_close(own, torch.full((2,), 0.1))


@dataclass(frozen=True)
class Fails:
    """Averages exactly, but fails on every worker when it comes to the doubles of the second round."""

    def accepts(self, shape: torch.Size) -> bool:
        return True

    def average(self, tensors: Tensors, state: State, peers: Peers, *, reuse: bool = False) -> Exchange[Averaged]:
        name, t = next(iter(tensors.items()))
        state[name] = state.get(name, 0) + 1
        mean = {}
        for n, x in tensors.items():
            mean[n] = yield Mean(x.clone())
        if t.dtype == torch.float64 and state[name] == 2:
            raise RuntimeError("the line is dead")
        return Averaged(mean, lambda: dict(tensors), lambda: torch.tensor(True))


def _atomic(worker: int, commit: str) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
    model = nn.ParameterDict({"a": torch.zeros(4), "b": torch.zeros(3, dtype=torch.float64)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = laconic.Plan(laconic.Every(2), Fails())
    session = laconic.attach(plan, model, optimizer, commit=commit)  # type: ignore[arg-type]
    for step in range(1, 5):
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + worker + step)
        if step == 4:
            before = [p.detach() - p.grad for p in model.parameters() if p.grad is not None]
            with pytest.raises(RuntimeError, match="the line is dead"):
                optimizer.step()
        else:
            optimizer.step()
    return before, [p.detach().clone() for p in model.parameters()], session.state_dict()["state"]["weights"]


def test_an_atomic_round_that_fails_has_changed_nothing():
    for before, after, state in run_workers(_atomic, 2, ("atomic",)):
        assert all(map(torch.equal, before, after))
        assert state == {"a": 1, "b": 1}
    # The control: bucket by bucket, what came before the failure is written.
    for before, after, _ in run_workers(_atomic, 2, ("streaming",)):
        assert not all(map(torch.equal, before, after))


def _committed(worker: int, text: str) -> tuple[Tensor, Tensor]:
    results = []
    for commit in ("streaming", "atomic"):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with laconic.attach(laconic.plan(text), model, optimizer, commit=commit, anchors="cpu"):
            for step in range(1, 9):
                _step(model, optimizer, worker, step)
        results.append(weights(model))
    return results[0], results[1]


@pytest.mark.parametrize(
    "text",
    [
        "post_local_sgd(period=4)",
        "diloco(period=4)",
        "Plan(schedule=Every(4), codec=Cast('bf16'))",
    ],
)
def test_both_ways_to_commit_give_the_same_weights(text):
    for streaming, atomic in run_workers(_committed, 3, (text,)):
        assert torch.equal(streaming, atomic)


def _paced(worker: int) -> list[int]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    with laconic.attach(laconic.qsr(growth=0.2, floor=2), model, optimizer) as session:
        for _ in range(40):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            decay.step()
            optimizer.zero_grad()
        return sorted({e.step for e in session.ledger.entries if e.phase == "weights"})


def test_the_period_grows_as_the_learning_rate_falls():
    # By hand: a round that begins after step t has lr = 0.1 · 0.9^t, and lasts (0.2 / lr)² steps, rounded down.
    expected, step = [], 0
    while True:
        step += max(2, int((0.2 / (0.1 * 0.9**step)) ** 2))
        if step > 40:
            break
        expected.append(step)
    assert expected == [4, 13]
    assert run_workers(_paced, 2) == [expected] * 2


class _Paced:
    """A model under qsr in a world of one, with a schedule of learning rates; saves and loads as a whole."""

    def __init__(self, rate: Callable[[int], float], growth: float) -> None:
        model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)
        self.session = laconic.attach(laconic.qsr(growth=growth, floor=2), model, self.optimizer)

    def rounds(self, steps: int) -> list[int]:
        """Take steps; return those after which weights were averaged."""
        found = []
        for _ in range(steps):
            self.optimizer.step()
            self.schedule.step()
            found += [self.session.step] if self.session.synced else []
        return found


def _cosine(step: int) -> float:
    return 0.05 + 0.05 * math.cos(math.pi * step / 200)


@pytest.mark.parametrize("order", [("optimizer", "session"), ("session", "optimizer")], ids=" then ".join)
@pytest.mark.parametrize("stop", [40, 83])
def test_a_resumed_run_has_the_rounds_of_one_that_was_not_interrupted(stop, order):
    whole, first, second = (_Paced(_cosine, growth=0.2) for _ in range(3))
    expected = whole.rounds(190)
    assert 10 < len(expected) < 40
    before = first.rounds(stop)
    assert (before[-1] == stop) == (stop == 40)  # once right after a round, once in the middle of one
    for part in (*order, "schedule"):
        getattr(second, part).load_state_dict(copy.deepcopy(getattr(first, part).state_dict()))
    assert before + second.rounds(190 - stop) == expected


def test_a_warm_up_shortens_the_round_that_it_is_in():
    rounds = _Paced(lambda step: min(step, 10) * 0.01, growth=0.2).rounds(40)
    # By hand: in step s of the warm-up lr is 0.01·(s - 1), the period (20 / (s - 1))²: it is reached at s = 8 by 8.16.
    expected = next(s for s in range(2, 40) if s >= int((0.2 / (0.01 * min(s - 1, 10))) ** 2 + 1e-9))
    assert rounds[0] == expected == 8
    assert rounds[1:] == list(range(12, 41, 4))
    assert _Paced(lambda step: 0.0, growth=0.2).rounds(20) == []  # nothing moves: there is nothing to average


def _wrong(worker: int) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"attach\(commit='later'\)"):
        laconic.attach(laconic.diloco(), model, optimizer, commit="later")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"attach\(anchors='disk'\)"):
        laconic.attach(laconic.diloco(), model, optimizer, anchors="disk")  # type: ignore[arg-type]


def test_unknown_commits_and_anchors_are_refused():
    _wrong(0)
