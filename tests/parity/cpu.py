"""Let tests that use GPUs only to place tensors run on CPU. Their assertions do not change.

All adaptations:

- the decorators that skip a test without GPUs let it run;
- `.cuda()`, `.to(rank)` and `device=rank` mean the CPU;
- `device_ids` of DistributedDataParallel is dropped, as a CPU module requires;
- `torch.cuda.set_device` and `synchronize` do nothing, `current_device` is 0;
- a subgroup with backend "nccl" uses gloo;
- a test that upstream skips as flaky runs;
- the file that workers share in the test of reloading stays until all have read it; upstream's worker 0 removes it
  when it has finished, and the others sometimes do not find it;
- one input would take minutes on a CPU and a gigabyte per worker: the image of 1000 x 1000 for a convolution (without
  a hook) in the test of uneven inputs is 24 x 24.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

WORLD_SIZE = 4
UPSTREAM = "torch.testing._internal.distributed.distributed_test"
FLAKY = "Skipped due to flakiness"


def upstream() -> Any:
    """Import torch's test file with the adaptations."""
    _replace_expecttest()
    _let_gpu_tests_run()
    _map_cuda_to_cpu()
    module: Any = importlib.import_module(UPSTREAM)
    module._rank_temp_file = _kept_until_all_have_finished(module._rank_temp_file)
    module.DDPUnevenTestInput = _smaller_image(module.DDPUnevenTestInput)
    return module


class OnCpu(TorchFunctionMode):
    """While active, a tensor that would be on a GPU is created on the CPU or stays there."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_gpu(args[1]):
            args = (args[0], "cpu", *args[2:])
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _is_gpu(device: object) -> bool:
    """Return whether this is a worker's index, which the tests use as a device, or a CUDA device."""
    if isinstance(device, bool):
        return False
    return isinstance(device, int) or (isinstance(device, str | torch.device) and torch.device(device).type == "cuda")


def _replace_expecttest() -> None:
    """Provide `expecttest.TestCase`, the base class of torch's test tools; no selected test uses its methods."""
    try:
        importlib.import_module("expecttest")
    except ModuleNotFoundError:
        module: Any = types.ModuleType("expecttest")
        module.TestCase = unittest.TestCase
        module.ACCEPT = False
        sys.modules["expecttest"] = module


def _let_gpu_tests_run() -> None:
    common: Any = importlib.import_module("torch.testing._internal.common_distributed")
    utils: Any = importlib.import_module("torch.testing._internal.common_utils")
    common.skip_if_no_gpu = lambda test: test
    common.skip_if_lt_x_gpu = lambda count, *, allow_cpu=False: lambda test: test
    common.init_multigpu_helper = lambda world_size, backend: {worker: [worker] for worker in range(world_size)}
    skip_if = utils.skip_but_pass_in_sandcastle_if
    utils.skip_but_pass_in_sandcastle_if = lambda condition, reason: skip_if(condition and reason != FLAKY, reason)


def _map_cuda_to_cpu() -> None:
    cuda: Any = torch.cuda
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda.current_device = lambda: 0
    module: Any = torch.nn.Module
    module.cuda = lambda self, device=None: self
    module.to = _to_cpu(module.to)
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    ddp.__init__ = _without_device_ids(ddp.__init__)
    dist: Any = torch.distributed
    dist.new_group = _on_gloo(dist.new_group)


def _to_cpu(to: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(to)
    def wrapper(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return to(self, *["cpu" if _is_gpu(arg) else arg for arg in args], **kwargs)

    return wrapper


def _without_device_ids(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def wrapper(self: Any, module: Any, device_ids: Any = None, **kwargs: Any) -> None:
        init(self, module, **kwargs)

    return wrapper


def _on_gloo(new_group: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(new_group)
    def wrapper(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        return new_group(*args, backend="gloo" if backend == "nccl" else backend, **kwargs)

    return wrapper


def _kept_until_all_have_finished(shared_file: Callable[[], Any]) -> Callable[[], Any]:
    @contextlib.contextmanager
    def wrapper() -> Iterator[str]:
        with shared_file() as name:
            yield name
            torch.distributed.barrier()

    return wrapper


def _smaller_image(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def wrapper(*, name: str, inp: Any, **kwargs: Any) -> Any:
        if name == "large_conv_model":
            inp = inp[..., :24, :24]
        return make(name=name, inp=inp, **kwargs)

    return wrapper
