"""The model as it is now: rebound tensors, parameters and modules that come later, weights loaded after attach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import laconic
from tests.session.models import assert_equal_bits, batch, mlp, weights
from tests.workers import WorkerError, run_workers

LOCAL = "Plan(schedule=Every(2))"
PLANS = [
    "ddp()",
    "diloco(period=2)",
    pytest.param("power_sgd(rank=2)", marks=pytest.mark.slow),
    pytest.param(LOCAL, marks=pytest.mark.slow),
]


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, worker: int, steps: range) -> None:
    for step in steps:
        x, y = batch(worker, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def _sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


class _WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("ema", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


def _rebound(worker: int, text: str) -> tuple[Tensor, Tensor]:
    model = _WithBuffer()
    optimizer = _sgd(model)
    laconic.attach(laconic.plan(text), model, optimizer, verify_every=1)
    _train(model, optimizer, worker, range(2))
    vector_to_parameters(parameters_to_vector(model.parameters()).detach().clone(), model.parameters())
    model.ema = torch.full((3,), float(worker))
    _train(model, optimizer, worker, range(2, 6))
    return weights(model), model.ema


@pytest.mark.parametrize("text", PLANS)
def test_rebound_parameters_and_buffers_are_averaged(text):
    (one, ema), (other, other_ema) = run_workers(_rebound, 2, (text,))
    assert_equal_bits([one, other])
    if text in (LOCAL, "diloco(period=2)"):
        assert ema.tolist() == other_ema.tolist() == [0.5] * 3


def _grows(worker: int, text: str, how: str) -> tuple[Tensor, bool]:
    model = mlp()
    if how == "unfrozen":
        model[0].requires_grad_(False)
    optimizer = _sgd(model)
    session = laconic.attach(laconic.plan(text), model, optimizer, verify_every=1)
    _train(model, optimizer, worker, range(3))
    before = weights(model[0])
    if how == "unfrozen":
        model[0].requires_grad_(True)
    elif how == "replaced":
        torch.manual_seed(worker)
        model[0] = nn.Linear(32, 32)
        optimizer.add_param_group({"params": list(model[0].parameters())})
    else:
        torch.manual_seed(worker)
        model.append(nn.Linear(4, 4))
        optimizer.add_param_group({"params": list(model[-1].parameters())})
    _train(model, optimizer, worker, range(3, 8))
    session.average_weights()
    return weights(model), not torch.equal(before, weights(model[0]))


@pytest.mark.parametrize("how", ["unfrozen", "added", pytest.param("replaced", marks=pytest.mark.slow)])
@pytest.mark.parametrize("text", PLANS)
def test_parameters_that_come_later_are_averaged(text, how):
    found = run_workers(_grows, 2, (text, how))
    assert_equal_bits([each for each, _ in found])
    assert all(trained for _, trained in found)


def _unfrozen_in_ddp(worker: int) -> str:
    model = mlp()
    model[0].requires_grad_(False)
    ddp, optimizer = DDP(model), _sgd(model)
    laconic.attach(laconic.ddp(), ddp, optimizer)
    _train(ddp, optimizer, worker, range(2))
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"0\.weight is trained, and DistributedDataParallel does not average") as e:
        _train(ddp, optimizer, worker, range(2, 4))
    return str(e.value)


def test_parameters_that_ddp_does_not_know_are_refused():
    assert all("Make the DDP model" in text for text in run_workers(_unfrozen_in_ddp, 2))


def _frozen_in_a_round(worker: int) -> Tensor:
    model = mlp()
    optimizer = _sgd(model)
    laconic.attach(laconic.plan("Plan(schedule=Every(4))"), model, optimizer)
    _train(model, optimizer, worker, range(2))
    model[0].requires_grad_(False)
    _train(model, optimizer, worker, range(2, 4))
    return weights(model)


def test_parameters_frozen_between_rounds_are_averaged():
    assert_equal_bits(run_workers(_frozen_in_a_round, 2))


def _only_one_unfreezes(worker: int, text: str) -> str:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = _sgd(model)
    laconic.attach(laconic.plan(text), model, optimizer)
    model[0].requires_grad_(worker == 1)
    with pytest.raises(laconic.DisagreementError, match="disagree about what they train") as error:
        _train(model, optimizer, worker, range(4))
    return str(error.value)


@pytest.mark.parametrize("text", ["ddp()", LOCAL])
def test_parameters_that_only_one_worker_trains_are_refused_on_all(text):
    one, other = run_workers(_only_one_unfreezes, 2, (text,))
    assert one == other


class _Colliding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32)
        self.module = nn.ModuleDict({"fc": nn.Linear(32, 4)})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module["fc"](self.fc(x))
        return out


def _collides(worker: int, text: str, ddp: bool) -> Tensor:
    torch.manual_seed(0)
    model = _Colliding()
    wrapped = DDP(model) if ddp else model
    optimizer = _sgd(model)
    session = laconic.attach(laconic.plan(text), wrapped, optimizer)
    assert list(session.parameters) == ["fc.weight", "fc.bias", "module.fc.weight", "module.fc.bias"]
    _train(wrapped, optimizer, worker, range(4))
    return weights(model)


@pytest.mark.parametrize("ddp", [False, True])
@pytest.mark.parametrize("text", ["power_sgd(rank=2)", pytest.param(LOCAL, marks=pytest.mark.slow)])
def test_names_keep_their_prefixes(text, ddp):
    assert_equal_bits(run_workers(_collides, 2, (text, ddp)))


def _differ_at_start(worker: int) -> tuple[Tensor, int, Tensor]:
    body, norm = mlp(seed=worker), nn.BatchNorm1d(4)
    model = nn.Sequential(body, norm)
    body[0].requires_grad_(False)
    assert norm.running_mean is not None
    norm.running_mean.fill_(worker)
    session = laconic.attach(laconic.ddp(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    return weights(model), session.ledger.payload_bytes, norm.running_mean


def test_frozen_parameters_are_equal_from_the_start():
    (one, sent, mean), (other, _, other_mean) = run_workers(_differ_at_start, 2)
    assert torch.equal(one, other) and torch.equal(mean, other_mean) and mean.sum() == 0
    assert sent > one.numel()  # what attach sends is in the ledger


def _load_after_attach(worker: int, moment: str) -> Tensor:
    model = nn.Linear(3, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = _sgd(model, lr=0.0)
    laconic.attach(laconic.diloco(period=2), model, optimizer)
    if moment == "after a round":
        for _ in range(2):
            model.weight.grad = torch.ones(1, 3)
            optimizer.step()
    model.load_state_dict({"weight": torch.full((1, 3), 10.0)})
    for _ in range(4):
        model.weight.grad = torch.ones(1, 3)
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("moment", ["at once", "after a round"])
def test_weights_loaded_after_attach_are_where_deltas_start(moment):
    for result in run_workers(_load_after_attach, 2, (moment,)):
        assert result.tolist() == [10.0] * 3


SLOWER = [
    pytest.param(text, marks=pytest.mark.slow) for text in ("ddp()", "Plan(schedule=Every(2), codec=Cast('bf16'))")
]


def _complex(worker: int, text: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Module()
    model.w = nn.Parameter(torch.randn(24, 16, dtype=torch.complex64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    laconic.attach(laconic.plan(text), model, optimizer, verify_every=1)
    truth = model.w.detach().clone()
    for step in range(6):
        grads = [
            torch.randn(24, 16, dtype=torch.complex64, generator=torch.Generator().manual_seed(10 * step + w))
            for w in (0, 1)
        ]
        model.w.grad = grads[worker]
        truth -= 0.1 * (grads[0] + grads[1]) / 2
        optimizer.step()
    return torch.view_as_real(model.w.detach()), torch.view_as_real(truth)


@pytest.mark.parametrize("text", ["power_sgd(rank=2)", LOCAL, *SLOWER])
def test_complex_parameters(text):
    (one, truth), (other, _) = run_workers(_complex, 2, (text,))
    assert_equal_bits([one, other])
    if text in ("ddp()", LOCAL):
        torch.testing.assert_close(one, truth)
    else:
        assert (one[..., 1] - truth[..., 1]).norm() < 0.5 * (truth[..., 1]).norm()


def _complex_in_ddp(worker: int) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(32, 16, dtype=torch.complex64)
    ddp, optimizer = DDP(model), _sgd(model)
    laconic.attach(laconic.power_sgd(rank=2, bits=None), ddp, optimizer, verify_every=1)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(4, 32, dtype=torch.complex64, generator=torch.Generator().manual_seed(10 * step + worker))
        ddp(x).abs().square().sum().backward()
        optimizer.step()
    return torch.view_as_real(model.weight.detach())


def test_complex_parameters_in_ddp():
    torch.manual_seed(0)
    start = nn.Linear(32, 16, dtype=torch.complex64).weight.detach()
    one, other = run_workers(_complex_in_ddp, 2)
    assert torch.equal(one, other)
    assert (one - torch.view_as_real(start)).abs().min() > 0


def _moments_after_change(worker: int, steps: int) -> Tensor:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    session = laconic.attach(laconic.plan("Plan(schedule=Every(4))"), model, optimizer, verify_every=1)
    _train(model, optimizer, worker, range(steps))
    session.change(laconic.ddp())
    _train(model, optimizer, worker, range(steps, 8))
    return weights(model)


@pytest.mark.parametrize("steps", [4, 6])
def test_moments_are_equal_when_gradients_are_averaged_after_local_steps(steps):
    assert_equal_bits(run_workers(_moments_after_change, 2, (steps,)))


# What is refused.


def _attach_twice(worker: int) -> None:
    model = mlp()
    optimizer = _sgd(model)
    first = laconic.attach(laconic.diloco(), model, optimizer)
    with pytest.raises(RuntimeError, match=r"has a session already.*Call session\.detach\(\)"):
        laconic.attach(laconic.diloco(), model, optimizer)
    first.detach()
    laconic.attach(laconic.diloco(), model, optimizer).detach()


def _attach_inside_ddp(worker: int) -> None:
    model = mlp()
    ddp, optimizer = DDP(model), _sgd(model)
    for bare in (ddp.module, nn.Sequential(ddp)):
        with pytest.raises(ValueError, match=r"DistributedDataParallel.*averages.*Attach to"):
            laconic.attach(laconic.diloco(), bare, optimizer)
    laconic.attach(laconic.diloco(), ddp, optimizer).detach()


def _attach_before_ddp(worker: int) -> None:
    model = mlp()
    optimizer = _sgd(model)
    laconic.attach(laconic.diloco(), model, optimizer)
    ddp = DDP(model)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"holds the parameters of this .*Attach to the DDP model itself"):
            _train(ddp, optimizer, worker, range(1))


def _disagree(worker: int, option: str) -> str:
    options = {"nonfinite": "raise" if worker else "skip", "verify_every": worker, "commit": "atomic"}
    model = mlp()
    kind = torch.optim.Adam if worker and option == "class" else torch.optim.SGD
    params = list(model.parameters())
    optimizer = kind(params[::-1] if worker and option == "order" else params, lr=0.1)
    keywords: Any = {option: options[option]} if option in options else {}
    with pytest.raises(laconic.DisagreementError) as error:
        laconic.attach(laconic.ddp(), model, optimizer, **keywords)
    before = weights(model)
    _train(model, optimizer, worker, range(1))  # nothing of the session is left
    assert not torch.equal(before, weights(model))
    assert not any("laconic" in name for name in vars(optimizer))
    return str(error.value)


def _without_hooks(worker: int) -> None:
    model = mlp(seed=worker)
    optimizer = _sgd(model)
    with pytest.raises(laconic.DisagreementError, match="differ from those of the others"):
        laconic.attach(laconic.ddp(), model, optimizer, sync_initial=False)
    _train(model, optimizer, worker, range(1))
    laconic.attach(laconic.ddp(), model, optimizer)
    _train(model, optimizer, worker, range(1))


class Scaled(Tensor):
    """A weight of integers and scales, as quantisation makes them: it can be detached, and nothing else."""

    whole: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, whole: Tensor, scale: Tensor) -> Scaled:
        made: Scaled = Tensor._make_wrapper_subclass(cls, whole.shape, dtype=torch.float32)
        made.whole, made.scale = whole, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is not torch.ops.aten.detach.default:
            raise NotImplementedError(func)
        return Scaled(args[0].whole, args[0].scale)


def _frozen_subclass(worker: int) -> None:
    for odd in ("whole", "scale"):
        parts = {"whole": torch.arange(12, dtype=torch.int8).view(3, 4), "scale": torch.ones(3, 1)}
        parts[odd] += worker
        model = mlp()
        model.base = nn.Parameter(Scaled(**parts), requires_grad=False)
        with pytest.raises(laconic.DisagreementError, match=rf"first in base\.{odd}\. Seed"):
            laconic.attach(laconic.ddp(), model, _sgd(model), sync_initial=False)
        session = laconic.attach(laconic.ddp(), model, optimizer := _sgd(model), sync_initial=True, verify_every=1)
        first = {"whole": torch.arange(12, dtype=torch.int8).view(3, 4), "scale": torch.ones(3, 1)}
        assert all(torch.equal(parts[name], first[name]) for name in parts), "that of worker 0, in place"
        assert session.ledger.totals(by="op")["broadcast"].payload_bytes == parts[odd].nbytes
        _train(model, optimizer, worker, range(2))


def test_a_frozen_tensor_subclass_is_compared_part_by_part():
    run_workers(_frozen_subclass, 2)


@pytest.mark.parametrize("job", [_attach_twice, _attach_inside_ddp, _attach_before_ddp, _without_hooks])
def test_refusals(job: Callable[[int], None]):
    run_workers(job, 2)


@pytest.mark.parametrize(
    "option",
    ["nonfinite", "order", *(pytest.param(each, marks=pytest.mark.slow) for each in ("verify_every", "class"))],
)
def test_what_changes_the_exchange_must_be_the_same_on_all_workers(option):
    one, other = run_workers(_disagree, 2, (option,))
    assert one == other
    shown = {"class": "Adam of", "order": "SGD of", "nonfinite": "nonfinite: raise", "verify_every": "verify_every: 1"}
    assert shown[option] in one


def _alone_among_others(worker: int) -> None:
    model = mlp()
    optimizer = _sgd(model)
    laconic.attach(laconic.ddp(), model, optimizer)
    _train(model, optimizer, worker, range(1))


def test_a_worker_without_a_process_group_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"one of 2 and was attached alone.*init_process_group\(\) before attach"):
        _alone_among_others(0)


def test_wrong_arguments_are_named():
    model = mlp()
    optimizer, plan = _sgd(model), laconic.ddp()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(TypeError, match=r"attach\(Sequential, \.\.\.\): the first argument is a Plan"):
        laconic.attach(model, plan, optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"attach\(plan, SGD, \.\.\.\): the second argument is the model"):
        laconic.attach(plan, optimizer, model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"not StepLR\. Schedulers are not attached"):
        laconic.attach(plan, model, scheduler)  # type: ignore[arg-type]


def test_worker_errors_are_raised_here():
    with pytest.raises(WorkerError, match="has a session already"):
        run_workers(_attach_twice_unguarded, 1, group=False)


def _attach_twice_unguarded(worker: int) -> None:
    model = mlp()
    optimizer = _sgd(model)
    keep = [laconic.attach(laconic.ddp(), model, optimizer)]
    keep.append(laconic.attach(laconic.ddp(), model, optimizer))
