"""Kernel launches whose arguments stay the same from step to step.

Triton inspects every argument of every launch, which takes longer than most of these kernels. A `Sequence` goes through
Triton once; after that it launches the compiled kernels with the same addresses, one by one or as a CUDA graph.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

GRAPHS = os.environ.get("LACONIC_CUDA_GRAPHS", "1") == "1"
"""Whether sequences become CUDA graphs: one call on the host instead of one for each kernel."""


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel, its number of programs, its arguments by name, and Triton's options."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    options: dict[str, int]

    def through_triton(self) -> Any:
        """Compile if needed, launch, and return the compiled kernel."""
        return self.kernel[(self.programs,)](**self.arguments, **self.options)

    def addresses(self) -> list[Any]:
        """Return the arguments as a compiled kernel takes them, with tensors as addresses."""
        values = [self.arguments[name] for name in self.kernel.arg_names]
        return [value.data_ptr() if isinstance(value, Tensor) else value for value in values]


class Sequence:
    """Launches in order. The addresses of their tensors must not change; the values may."""

    def __init__(self, launches: Iterable[Launch]) -> None:
        self.launches = [launch for launch in launches if launch.programs]
        self._direct: list[tuple[Callable[..., Any], list[Any]]] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._no_graph = not GRAPHS

    def __call__(self) -> None:
        """Launch all kernels on the current stream."""
        if self._graph is not None and not torch.cuda.is_current_stream_capturing():
            self._graph.replay()
        elif self._direct is None:
            compiled = [launch.through_triton() for launch in self.launches]
            if all(hasattr(each, "packed_metadata") for each in compiled):  # missing in Triton's interpreter
                pairs = zip(self.launches, compiled, strict=True)
                self._direct = [(kernel[(launch.programs, 1, 1)], launch.addresses()) for launch, kernel in pairs]
        elif self._no_graph or self._graph is not None or torch.cuda.is_current_stream_capturing():
            for run, arguments in self._direct:
                run(*arguments)
        else:
            self._capture(self._direct)
            self()

    def _capture(self, direct: list[tuple[Callable[..., Any], list[Any]]]) -> None:
        """Record the launches as a graph without running them. Other threads may use CUDA meanwhile."""
        graph = torch.cuda.CUDAGraph()
        self._no_graph = True  # unless the capture succeeds
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    for run, arguments in direct:
                        run(*arguments)
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            logger.warning("CUDA graph capture failed, so kernels are launched one by one: %s", error)
        else:
            self._graph = graph
