"""Plans on CUDA: two workers over gloo with their models on one GPU, beside the same on CPUs."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from laconic.checkpoint.loading import lowest_and_highest
from laconic.comm.queue import CollectiveQueue
from laconic.session.weights import Anchors
from laconic.torch_private.distributed import ordered_by_stream
from tests.session.models import assert_equal_bits, batch, mlp, weights
from tests.workers import listen, run_workers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

PLANS = [
    "ddp()",
    "power_sgd(rank=2, bits=None, rounds='alternating')",
    "power_sgd(rank=2, bits=None)",
    "post_local_sgd(period=4, start=5)",
    "diloco(period=4, lr=0.7, momentum=0.9, codec=Exact())",
    "streaming_diloco(period=4, fragments=2, lr=0.7, momentum=0.9, codec=Exact())",
    "Plan(schedule=Every(2), codec=ErrorFeedback(LowRank(2, min_compression=0)), outer=Nesterov())",
]


FEW_BITS = [
    *("quantized_ddp()", "power_sgd(rank=2)", "power_sgd(rank=2, bits=2)", "demo()"),
    *("diloco(period=4)", "sparse_loco()", "frugal('16x')", "frugal('120x', delay=1)"),
]


def _train(worker: int, plan: str, kind: str, device: str, anchors: Anchors) -> Tensor:
    model = mlp().to(device)
    trained = DDP(model, bucket_cap_mb=0.005) if kind == "ddp" else model
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if plan == "demo()":
        optimizer = laconic.optim.DeMo(model.parameters(), lr=0.01)
    with laconic.attach(laconic.plan(plan), trained, optimizer, anchors=anchors):
        for step in range(12):
            x, y = batch(worker, step)
            F.cross_entropy(trained(x.to(device)), y.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model).cpu()


@pytest.mark.parametrize("kind", ["bare", "ddp"])
@pytest.mark.parametrize("plan", PLANS)
def test_workers_on_a_gpu_agree_and_do_what_cpus_do(plan, kind):
    on_gpu = run_workers(_train, 2, (plan, kind, "cuda", "device"), timeout_s=120)
    on_cpu = run_workers(_train, 2, (plan, kind, "cpu", "device"))
    if "streaming" not in plan:  # whose workers agree only on the fragment that was last
        assert_equal_bits(on_gpu)
    for there, here in zip(on_gpu, on_cpu, strict=True):
        assert torch.allclose(there, here, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["bare", "ddp"])
@pytest.mark.parametrize("plan", FEW_BITS)
def test_workers_on_a_gpu_agree_under_few_bits(plan, kind):
    """Rounding parts the GPU's codes from the CPU's, so the weights are compared by their distance."""
    on_gpu = run_workers(_train, 2, (plan, kind, "cuda", "device"), timeout_s=120)
    on_cpu = run_workers(_train, 2, (plan, kind, "cpu", "device"))
    if "frugal" not in plan:  # whose workers agree only on the fragment that was last
        assert_equal_bits(on_gpu)
    start = weights(mlp())
    for there, here in zip(on_gpu, on_cpu, strict=True):
        assert (there - here).norm() < 0.3 * (here - start).norm()


def test_anchors_on_the_host_are_the_same_as_on_the_gpu():
    here = run_workers(
        _train, 2, ("diloco(period=4, lr=0.7, momentum=0.9, codec=Exact())", "bare", "cuda", "device"), timeout_s=120
    )
    there = run_workers(
        _train, 2, ("diloco(period=4, lr=0.7, momentum=0.9, codec=Exact())", "bare", "cuda", "cpu"), timeout_s=120
    )
    assert_equal_bits([*here, *there])


def _spoiled(worker: int, plan: str, kind: str, fused: bool) -> tuple[list[Tensor], str, list[str]]:
    """Train with the defaults; one worker's gradients are NaN in steps 3 and 5."""
    said = listen()
    model = mlp().to("cuda")
    trained = DDP(model, bucket_cap_mb=0.005) if kind == "ddp" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused, foreach=None if fused else True)
    trace = []
    with laconic.attach(laconic.plan(plan), trained, optimizer) as session:
        policy = session.nonfinite
        for step in range(1, 8):
            x, y = batch(worker, step)
            if worker == 1 and step in (3, 5):
                x[0, 0] = torch.nan
            F.cross_entropy(trained(x.to("cuda")), y.to("cuda")).backward()
            optimizer.step()
            optimizer.zero_grad()
            trace.append(weights(model).cpu())
    return trace, policy, said


@pytest.mark.parametrize("kind", ["bare", "ddp"])
@pytest.mark.parametrize("plan", ["ddp()", "power_sgd(rank=2, bits=None, rounds='alternating')"])
def test_fused_optimizers_leave_a_spoiled_step_out_by_themselves(plan, kind):
    for trace, policy, said in run_workers(_spoiled, 2, (plan, kind, True), timeout_s=120):
        assert policy == "skip"
        moved = [not torch.equal(*pair) for pair in itertools.pairwise(trace)]
        assert moved == [True, False, True, False, True, True] and trace[-1].isfinite().all()
        assert len(said) == 2
        assert "step 3: worker 1 had NaN or Inf, in one of those from " in said[0]
        assert "step 5: worker 1 had NaN or Inf, in 0.weight" in said[1]


def test_others_would_have_to_be_waited_for_on_a_gpu():
    for trace, policy, said in run_workers(_spoiled, 2, ("ddp()", "ddp", False), timeout_s=120):
        assert policy == "ignore" and not said
        assert trace[-1].isnan().any()


def _default_backends(worker: int, store: str, backend: str | None, plan: str, kind: str) -> tuple[Tensor, bool]:
    dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    queue = CollectiveQueue(dist.group.WORLD, laconic.Ledger(), device=torch.device("cuda"))
    got = _train(worker, plan, kind, "cuda", "device"), queue.group is dist.group.WORLD
    assert ordered_by_stream(dist.group.WORLD, torch.device("cuda"))
    if backend is not None:  # without a name there may be none for the CPU
        assert not ordered_by_stream(dist.group.WORLD, torch.device("cpu"))
    assert lowest_and_highest(7) == (7, 7)
    dist.destroy_process_group()
    return got


@pytest.mark.parametrize("backend", [None, "cpu:gloo,cuda:nccl"])
@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        ("power_sgd(rank=2, bits=None, rounds='alternating')", "ddp"),
        ("diloco(period=4, lr=0.7, momentum=0.9, codec=Exact())", "bare"),
    ],
)
def test_groups_with_a_backend_for_each_device_train(tmp_path, backend, plan, kind):
    arguments = (str(tmp_path / "store"), backend, plan, kind)
    ((got, own_group),) = run_workers(_default_backends, 1, arguments, timeout_s=120, group=False)
    assert own_group, "NCCL orders by stream: no second group is needed"
    assert got.isfinite().all()
