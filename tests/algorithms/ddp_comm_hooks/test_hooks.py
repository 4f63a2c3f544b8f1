"""The hooks of one collective, by themselves, wrapped, and by their names in `DDPCommHookType`."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from laconic.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
from laconic.algorithms.ddp_comm_hooks import debugging_hooks as debugging
from laconic.algorithms.ddp_comm_hooks import default_hooks as default
from laconic.algorithms.ddp_comm_hooks import quantization_hooks as quantization
from laconic.algorithms.ddp_comm_hooks.post_localSGD_hook import post_localSGD_hook
from laconic.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from tests.algorithms.implementations import averaged, hooked, mean_of, module, relative_error, sgd, train
from tests.session.models import assert_equal_bits, mlp, weights
from tests.workers import WorkerError, run_workers

# The largest error, relative to the exact mean: half a unit in the last place of each dtype, and some for the sum.
BOUNDS = {
    "allreduce_hook": 1e-6,
    "fp16_compress_hook": 1e-3,
    "bf16_compress_hook": 8e-3,
    "fp16_compress_wrapper": 1e-3,
    "bf16_compress_wrapper": 8e-3,
}


def _gradients(worker: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(worker)
    return [torch.randn(40, 30, generator=generator), torch.randn(700, generator=generator)]


def _hook(name: str) -> Any:
    hook = getattr(default, name)
    return hook(default.allreduce_hook) if "wrapper" in name else hook


def _averages(worker: int) -> dict[str, tuple[float, Tensor]]:
    gradients = _gradients(worker)
    right = torch.cat([mean_of(g).reshape(-1) for g in gradients])
    results = {}
    for name in BOUNDS:
        found = averaged(None, _hook(name), [gradients] * 2)
        assert all(t.dtype == torch.float32 for t in found)
        flat = torch.cat([t.reshape(-1) for t in found])
        results[name] = (relative_error(flat, right), flat)
    return results


def test_default_hooks_on_cpu():
    per_worker = run_workers(_averages, 3)
    for name, bound in BOUNDS.items():
        assert_equal_bits([results[name][1] for results in per_worker])
        error = per_worker[0][name][0]
        assert error < bound, f"the relative error of {name} is {error:.2g}"
        assert name == "allreduce_hook" or error > 1e-5, f"{name} did not round"


def _torch_quantized(flat: Tensor, width: int | None) -> Tensor:
    """Quantize and dequantize with torch's own functions; its hooks do not run with gloo."""
    theirs = module("torch", "ddp_comm_hooks.quantization_hooks")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if width is None:
            observer = torch.ao.quantization.MinMaxObserver()
            observer(flat)
            ends = observer.calculate_qparams()
            codes = theirs._quantize_per_tensor_backend(flat, *ends)
            back: Tensor = theirs._dequantize_per_tensor_backend(codes, *ends)
            return back
        channels = F.pad(flat, (0, -len(flat) % width)).view(-1, width)
        per_channel = torch.ao.quantization.PerChannelMinMaxObserver()
        per_channel(channels)
        ends = per_channel.calculate_qparams()
        codes = theirs._quantize_per_channel_backend(channels, *ends)
        back = theirs._dequantize_per_channel_backend(codes, *ends)
        return back.reshape(-1)[: len(flat)]


def _quantized(worker: int) -> dict[str, tuple[float, float, float, Tensor]]:
    """Return the distances to the exact mean and to torch's result, half a quantization step, and the result."""
    gradients = _gradients(worker)
    flat = torch.cat([g.reshape(-1) for g in gradients])
    results = {}
    for name, width in (("quantization_pertensor_hook", None), ("quantization_perchannel_hook", 512)):
        found = torch.cat([t.reshape(-1) for t in averaged(None, getattr(quantization, name), [gradients] * 2)])
        blocks = flat.split(width or len(flat))
        half = max(float(block.amax().clamp(min=0) - block.amin().clamp(max=0)) / 510 for block in blocks)
        half = float(mean_of(torch.tensor(half)))
        theirs = mean_of(_torch_quantized(flat, width))
        results[name] = (_max_difference(found, mean_of(flat)), _max_difference(found, theirs), half, found)
    return results


def _max_difference(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def test_quantization_hooks():
    per_worker = run_workers(_quantized, 2)
    for name in per_worker[0]:
        assert_equal_bits([results[name][3] for results in per_worker])
        from_mean, from_torch, half, _ = per_worker[0][name]
        # Half a step for the element, and half a step for the zero point, which is rounded too.
        assert 0.1 * half < from_mean <= 2 * half, f"{name} is off by {from_mean:.2g}, half a step is {half:.2g}"
        assert from_torch <= 2 * half, f"{name} is {from_torch:.2g} from torch's, half a step is {half:.2g}"


def _torch_with_gloo(worker: int, name: str) -> None:
    hooks = module("torch", "ddp_comm_hooks.quantization_hooks")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        averaged(None, getattr(hooks, name), [_gradients(worker)] * 2)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["quantization_pertensor_hook", "quantization_perchannel_hook"])
def test_torchs_own_quantization_hooks_do_not_run_with_gloo(name):
    with pytest.raises(WorkerError, match="IndexError"):
        run_workers(_torch_with_gloo, 2, (name,), timeout_s=20)


def _torch_bf16(worker: int) -> None:
    averaged(None, module("torch", "ddp_comm_hooks.default_hooks").bf16_compress_hook, [_gradients(worker)])


@pytest.mark.nightly
def test_ddp_rejects_torchs_own_bf16_hook_without_cuda():
    with pytest.raises(WorkerError, match="BF16 all reduce communication hook required CUDA"):
        run_workers(_torch_bf16, 2, timeout_s=20)


def _registered(worker: int) -> dict[str, tuple[Tensor, Tensor]]:
    results = {}
    for kind in DDPCommHookType:
        model = DDP(mlp())
        register_ddp_comm_hook(kind, model, None)
        before = weights(model)
        train(model, sgd(model), worker, range(3))
        results[kind.name] = (before, weights(model))
    return results


def test_every_hook_is_registered_by_its_name():
    first, second = run_workers(_registered, 2)
    their_names = [kind.name for kind in module("torch", "ddp_comm_hooks").DDPCommHookType]
    assert list(first) == their_names
    for name in first:
        assert not torch.equal(*first[name]), f"{name}: the weights did not change"
        assert torch.equal(first[name][1], second[name][1]) == (name != "NOOP"), name


def _wrapped(worker: int) -> dict[str, tuple[float, Tensor]]:
    results = {}
    for name in ("fp16_compress_wrapper", "bf16_compress_wrapper"):
        state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model = hooked(mlp(), state, getattr(default, name)(powerSGD_hook), bucket_cap_mb=0.01)
        optimizer = sgd(model)
        losses: list[float] = []
        for step in [0, 1] * 20:
            losses += train(model, optimizer, worker, [step])
            assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
        assert all(residual.dtype == torch.float32 for residual in state.error_dict.values())
        results[name] = (losses[-1] / losses[0], weights(model))
    return results


def test_wrapped_powersgd_trains_on_cpu():
    per_worker = run_workers(_wrapped, 2)
    for name in per_worker[0]:
        assert_equal_bits([results[name][1] for results in per_worker])
        for results in per_worker:
            assert results[name][0] < 0.6, f"{name}: the loss decreased by a factor of only {results[name][0]:.2f}"


@pytest.mark.parametrize(
    "hook",
    [
        default.allreduce_hook,
        default.fp16_compress_hook,
        default.bf16_compress_hook,
        quantization.quantization_pertensor_hook,
        quantization.quantization_perchannel_hook,
        debugging.noop_hook,
        powerSGD_hook,
        batched_powerSGD_hook,
        post_localSGD_hook,
    ],
    ids=lambda hook: hook.__qualname__,
)
def test_hooks_are_pickled_by_reference(hook):
    assert pickle.loads(pickle.dumps(hook)) is hook  # noqa: S301
