"""Lets tests that use GPUs only as a place for tensors run on CPU, without touching what they assert.

What is adapted, all of it:

- the decorators that skip for lack of GPUs let the test run;
- `.cuda()`, `.to(rank)` and `device=rank` mean the CPU;
- `device_ids` of DistributedDataParallel is dropped, as it must be for a CPU module;
- `torch.cuda.set_device` and `synchronize` do nothing, `current_device` is 0;
- a subgroup asked for on "nccl" is on gloo;
- a test that upstream skips as flaky (not as unfit) runs;
- the file that workers share in the test of reloading stays until all have read it: upstream's worker 0 removes it
  when it is done itself, and the others then sometimes find nothing;
- one input would take a CPU minutes and a gigabyte a worker: the image of 1000 x 1000 for a convolution (which
  has no hook) in the test of uneven inputs is 24 x 24.
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
    """The installed test file, imported with the adaptations in place."""
    _stand_in_for_expecttest()
    _let_gpu_tests_run()
    _make_cuda_a_place_on_the_cpu()
    module: Any = importlib.import_module(UPSTREAM)
    module._rank_temp_file = _kept_until_all_are_done(module._rank_temp_file)
    module.DDPUnevenTestInput = _smaller_image(module.DDPUnevenTestInput)
    return module


class OnCpu(TorchFunctionMode):
    """While active, a tensor asked for on a GPU is made on, or stays on, the CPU."""

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
    """A worker's index, as tests give it, or a CUDA device by name."""
    if isinstance(device, bool):
        return False
    return isinstance(device, int) or (isinstance(device, str | torch.device) and torch.device(device).type == "cuda")


def _stand_in_for_expecttest() -> None:
    """The test tools subclass `expecttest.TestCase`; no test driven here uses what it adds."""
    try:
        importlib.import_module("expecttest")
    except ModuleNotFoundError:
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        stand_in.ACCEPT = False
        sys.modules["expecttest"] = stand_in


def _let_gpu_tests_run() -> None:
    common: Any = importlib.import_module("torch.testing._internal.common_distributed")
    utils: Any = importlib.import_module("torch.testing._internal.common_utils")
    common.skip_if_no_gpu = lambda test: test
    common.skip_if_lt_x_gpu = lambda count, *, allow_cpu=False: lambda test: test
    common.init_multigpu_helper = lambda world_size, backend: {worker: [worker] for worker in range(world_size)}
    skip_if = utils.skip_but_pass_in_sandcastle_if
    utils.skip_but_pass_in_sandcastle_if = lambda condition, reason: skip_if(condition and reason != FLAKY, reason)


def _make_cuda_a_place_on_the_cpu() -> None:
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


def _kept_until_all_are_done(shared_file: Callable[[], Any]) -> Callable[[], Any]:
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
