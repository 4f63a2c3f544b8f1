"""`attach` on bare modules, and what must hold whatever wraps the model."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from tests.session.models import assert_equal_bits, batch, mlp, weights
from tests.workers import run_workers

PLANS = [
    "ddp()",
    "power_sgd(rank=2)",
    "power_sgd(rank=1, bits=None)",
    "post_local_sgd(start=3, period=3)",
]


class Odd(nn.Module):
    """Parameters of every odd kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(1.5))  # 0-d
        self.empty = nn.Parameter(torch.empty(0, 7))
        self.conv = nn.Conv2d(3, 16, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(16)
        self.turned = nn.Parameter(torch.randn(16, 24).t())  # not contiguous
        self.tied = nn.Linear(24, 24, bias=False)
        self.tied_again = nn.Linear(24, 24, bias=False)
        self.tied_again.weight = self.tied.weight
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.table = nn.Parameter(torch.arange(4), requires_grad=False)  # integers
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x)).mean((2, 3)) @ self.turned.t() * self.scale + self.empty.sum()
        result: Tensor = self.head(torch.tanh(self.frozen(self.tied_again(torch.tanh(self.tied(h))))))
        return result


def _odd(worker: int, texts: list[str], wrapped: bool) -> list[tuple[Tensor, Tensor]]:
    results = []
    for text in texts:
        module = Odd()
        torch.manual_seed(worker)
        model = DDP(module, bucket_cap_mb=0.003) if wrapped else module
        before = {name: (p.data_ptr(), p.stride()) for name, p in module.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        laconic.attach(laconic.plan(text), model, optimizer)
        for step in range(8):
            generator = torch.Generator().manual_seed(100 * step + worker)
            x = torch.randn(8, 3, 5, 5, generator=generator)
            F.cross_entropy(model(x), torch.randint(0, 4, (8,), generator=generator)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert before == {name: (p.data_ptr(), p.stride()) for name, p in module.named_parameters()}
        statistics = module.norm.running_mean
        assert statistics is not None
        results.append((weights(module), statistics.clone()))
    return results


@pytest.mark.parametrize("wrapped", [True, False], ids=["ddp", "bare"])
def test_parameters_of_every_odd_kind(wrapped):
    texts = [*PLANS, "Plan(schedule=Every(4), codec=ErrorFeedback(LowRank(2, min_compression=0)))"]
    per_worker = run_workers(_odd, 3, (texts, wrapped))
    for index, text in enumerate(texts):
        assert_equal_bits([result[index][0] for result in per_worker])
        assert per_worker[0][index][0].isfinite().all()
        if "post_local" in text or "Every" in text:  # buffers come together with the weights
            assert_equal_bits([result[index][1] for result in per_worker])


def _train(worker: int, text: str, wrapped: bool) -> Tensor:
    module = mlp()
    model = DDP(module) if wrapped else module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    laconic.attach(laconic.plan(text), model, optimizer)
    for step in range(9):
        x, y = batch(worker, step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


def test_a_bare_module_learns_what_a_ddp_model_learns():
    for text in PLANS:
        bare = run_workers(_train, 2, (text, False))[0]
        torch.testing.assert_close(bare, run_workers(_train, 2, (text, True))[0], rtol=1e-4, atol=1e-6)


def _different_start(worker: int) -> Tensor:
    module = mlp(seed=worker)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
    laconic.attach(laconic.post_local_sgd(period=100), module, optimizer)
    return weights(module)


def test_workers_that_start_apart_start_from_the_first_workers_weights():
    results = run_workers(_different_start, 3)
    assert_equal_bits([*results, weights(mlp(seed=0))])


def _equal_replicas(worker: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    module = nn.Linear(101, 37).to(dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    laconic.attach(laconic.post_local_sgd(period=1), module, optimizer)
    before = weights(module)
    module(torch.ones(1, 101, dtype=dtype)).sum().backward()
    optimizer.step()
    return before, weights(module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("workers", [2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 5))])
def test_equal_replicas_stay_bit_equal_when_averaged(workers, dtype):
    for before, after in run_workers(_equal_replicas, workers, (dtype,)):
        assert torch.equal(before, after)


def _clip_after_averaging(worker: int) -> tuple[float, float]:
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    session = laconic.attach(laconic.ddp(), module, optimizer)
    x, y = batch(worker, 0)
    F.cross_entropy(module(x), y).backward()
    session.average_gradients()
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
    collectives = session.ledger.collectives
    optimizer.step()
    assert session.ledger.collectives == collectives, "gradients travelled twice"
    return float(norm), float(sum(p.grad.norm() ** 2 for p in module.parameters() if p.grad is not None) ** 0.5)


def test_gradients_can_be_averaged_before_clipping():
    results = run_workers(_clip_after_averaging, 2)
    assert results[0] == results[1]
    assert results[0][1] == pytest.approx(1e-3, rel=1e-3)


def _scaled(worker: int, text: str, wrapped: bool, unscale: bool) -> tuple[list[Tensor], int, int]:
    """Worker 1 overflows at step 3. Returns the weights after each step."""
    module = mlp()
    model = DDP(module) if wrapped else module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=1000)
    session = laconic.attach(laconic.plan(text), model, optimizer, scaler=scaler)
    seen, skipped = [], 0
    for step in range(8):
        x, y = batch(worker, step)
        loss = F.cross_entropy(model(x), y) * (float("inf") if worker == 1 and step == 3 else 1.0)
        scaler.scale(loss).backward()
        before = weights(module)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped += int(torch.equal(before, weights(module)))
        seen.append(weights(module))
    return seen, session.step, skipped


@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("wrapped", [True, False], ids=["ddp", "bare"])
@pytest.mark.parametrize("text", ["power_sgd(rank=2)", "post_local_sgd(period=4)"])
def test_a_step_that_gradscaler_skips_on_one_worker(text, wrapped, unscale):
    results = run_workers(_scaled, 2, (text, wrapped, unscale))
    assert [steps for _, steps, _ in results] == [8, 8]
    assert_equal_bits([seen[-1] for seen, _, _ in results])
    assert results[0][0][-1].isfinite().all()
    # Averaged gradients overflow for all; local ones only for the worker whose they are.
    local = text.startswith("post_local")
    assert [skipped for _, _, skipped in results] == ([0, 0] if local else [1, 1])


def _clipped_overflow(worker: int, text: str) -> list[Tensor]:
    """Worker 1 overflows at step 3, and all clip what they have averaged."""
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=1000)
    session = laconic.attach(laconic.plan(text), module, optimizer)
    seen = [weights(module)]
    for step in range(6):
        x, y = batch(worker, step)
        loss = F.cross_entropy(module(x), y) * (float("inf") if worker == 1 and step == 3 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        session.average_gradients()
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(weights(module))
    return seen


@pytest.mark.parametrize("text", ["ddp()", "power_sgd(rank=2)"])
def test_an_overflow_on_one_worker_before_clipping_skips_the_step_on_all(text):
    results = run_workers(_clipped_overflow, 2, (text,))
    for seen in results:
        assert all(each.isfinite().all() for each in seen)
        assert [torch.equal(a, b) for a, b in pairwise(seen)] == [False] * 3 + [True] + [False] * 2
    assert_equal_bits([seen[-1] for seen in results])


def _feedback_with_unused(worker: int) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], dict[str, Tensor]]:
    """Branches that all, one or none of the workers use. Returns true gradients, means delivered, and residuals."""
    torch.manual_seed(0)
    module = nn.ModuleDict({name: nn.Linear(6, 5, bias=False) for name in ("all", "one", "some")})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    plan = laconic.plan("Plan(codec=ErrorFeedback(LowRank(1, min_compression=0)))")
    session = laconic.attach(plan, module, optimizer)
    true, delivered = [], []
    for step in range(9):
        used = ["all", *(["one"] if worker == step % 2 else []), *(["some"] if step % 3 == 0 else [])]
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + worker))
        torch.stack([module[name](x).square().mean() for name in used]).sum().backward()
        true.append({n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None})
        optimizer.step()
        delivered.append({n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None})
        assert ("some.weight" in delivered[-1]) == (step % 3 == 0)
        optimizer.zero_grad()
    return true, delivered, session.state_dict()["state"]["gradient"]["codec"]["residual"]


def test_what_feedback_owes_to_parameters_that_no_worker_used_stays_owed():
    results = run_workers(_feedback_with_unused, 2)
    for name in ("all.weight", "one.weight", "some.weight"):
        true = sum(each[name].double() for grads, _, _ in results for each in grads if name in each) / 2
        sent = sum(each[name].double() for each in results[0][1] if name in each)
        owed = sum(residual[name].double() for _, _, residual in results) / 2
        assert owed.norm() > 0.01 * true.norm()
        torch.testing.assert_close(sent + owed, true, rtol=1e-5, atol=1e-6)


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(12, 3, sparse=True)
        self.bags = nn.EmbeddingBag(9, 3, sparse=True, mode="sum")
        self.head = nn.Linear(3, 2)

    def loss(self, worker: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + worker)
        tokens = torch.randint(0, 12, (4, 3), generator=generator)
        h = self.words(tokens).mean(1)
        if worker == step % 2:  # the other worker has no gradient for it
            h = h + self.bags(tokens % 9)
        loss: Tensor = self.head(torch.tanh(h)).logsumexp(1).mean()
        return loss


def _sparse_optimizers(model: _Tagger) -> list[torch.optim.Optimizer]:
    lookups = [model.words.weight, model.bags.weight]
    return [torch.optim.SparseAdam(lookups, lr=0.05), torch.optim.SGD(model.head.parameters(), lr=0.1)]


def _sparse(worker: int) -> Tensor:
    model = _Tagger()
    optimizers = _sparse_optimizers(model)
    session = laconic.attach(laconic.ddp(), model, optimizers)
    before = weights(model)
    for step in range(6):
        (model.loss(worker, step) * (torch.nan if worker == 1 and step == 0 else 1.0)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert (step == 0) == torch.equal(before, weights(model))
    assert session.step == 6
    return weights(model)


def test_sparse_gradients_are_sparse_again_after_averaging():
    results = run_workers(_sparse, 2)
    assert_equal_bits(results)
    model = _Tagger()
    optimizers = _sparse_optimizers(model)
    for step in range(1, 6):  # the first is skipped
        torch.stack([model.loss(worker, step) for worker in range(2)]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(results[0], weights(model), rtol=1e-5, atol=1e-6)


def _skips_by_hand(worker: int) -> tuple[Tensor, int]:
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
    session = laconic.attach(laconic.post_local_sgd(period=4), module, optimizer)
    for step in range(8):
        x, y = batch(worker, step)
        F.cross_entropy(module(x), y).backward()
        if worker == 1 and step in (3, 5):
            session.skip()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return weights(module), session.step


def test_a_step_skipped_by_hand():
    results = run_workers(_skips_by_hand, 2)
    assert_equal_bits([result for result, _ in results])
    assert [steps for _, steps in results] == [8, 8]


def test_a_world_of_one_without_torch_distributed_is_exact_and_silent():
    def train(text: str | None) -> Tensor:
        module = mlp()
        optimizer = torch.optim.AdamW(module.parameters())
        if text is not None:
            session = laconic.attach(laconic.plan(text), module, optimizer)
            assert session.workers == 1
        for step in range(5):
            x, y = batch(0, step)
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(module)

    for text in ("ddp()", "power_sgd(rank=1)", "post_local_sgd(period=2)"):
        assert torch.equal(train(text), train(None))


def test_bad_arguments_are_named():
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"attach\(Linear, ...\): the first argument is a Plan or its text"):
        laconic.attach(nn.Linear, module, optimizer)  # type: ignore[arg-type]
    with pytest.raises(laconic.PlanError, match="Did you mean power_sgd"):
        laconic.attach("powersgd(rank=4)", module, optimizer)
    with pytest.raises(TypeError, match="the second argument is the model"):
        laconic.attach(laconic.ddp(), optimizer, module)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a torch.optim.Optimizer, or several in a list, not an empty list"):
        laconic.attach(laconic.ddp(), module, [])
    with pytest.raises(
        TypeError, match=r"attach\(observers=Guard\(mode='warn'\)\): give a list of laconic.StepObserver"
    ):
        laconic.attach(laconic.ddp(), module, optimizer, observers=laconic.Guard("warn"))  # type: ignore[arg-type]
    other = torch.optim.SGD(copy.deepcopy(module).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="holds none of the model's parameters"):
        laconic.attach(laconic.ddp(), module, other)


def test_a_plan_may_be_given_as_text():
    module = mlp()
    with laconic.attach("power_sgd(rank=2)", module, torch.optim.SGD(module.parameters(), lr=0.1)) as session:
        assert session.plan == laconic.power_sgd(rank=2)


def test_detaching_leaves_the_optimizer_as_it_was():
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = set(vars(optimizer))
    laconic.attach(laconic.power_sgd(rank=1), module, optimizer).detach()
    assert set(vars(optimizer)) == before
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
