"""What a probe has measured, and its file.

Units are SI: seconds, bytes, bits per second. Every sample is kept; `seconds` is the median. A sample of a collective
is the time of the slowest worker; of computation, the mean over the workers, which compute at the same time. This file
imports no torch.distributed, so that a prediction needs no network.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from laconic.atomic_write import write_atomically
from laconic.ledger import wire_bytes
from laconic.tools.errors import UsageError
from laconic.values import is_number, is_whole

FORMAT = 2
"""Of the file. A change that old code cannot read raises it."""
OPS = ("all_reduce", "all_gather", "all_to_all")
WORLD, MACHINE = "world", "machine"
"""The levels of all workers, and of those of one machine. Others are "groups of 2"."""


class Sampled:
    """Something that was measured several times, in seconds."""

    samples: tuple[float, ...]

    def __post_init__(self) -> None:
        check_samples(self.samples)

    @property
    def seconds(self) -> float:
        """The median."""
        return median(self.samples)

    @property
    def spread(self) -> float:
        """Half of the interquartile range, relative to the median; 0 for one sample."""
        if len(self.samples) < 2:
            return 0.0
        low, middle, high = quantiles(self.samples, n=4, method="inclusive")
        return (high - low) / 2 / middle


@dataclass(frozen=True)
class Timing(Sampled):
    """The seconds of a collective of `bytes` bytes, the payload of one worker, among the `workers` of one group.

    All groups of the level run at the same time. A sample is the time of the slowest worker.

    >>> timing = Timing("all_reduce", "world", workers=4, bytes=1024, samples=(0.003, 0.001, 0.002))
    >>> timing.seconds, timing.hops, timing.traffic_bytes
    (0.002, 6, 1536)
    """

    op: str
    level: str
    workers: int
    bytes: int
    samples: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ValueError(f"op is {self.op!r}, and must be one of {', '.join(OPS)}")
        if self.workers < 2 or self.bytes < 1:
            raise ValueError(
                f"{self.workers} workers and {self.bytes} bytes: there must be 2 workers and 1 byte or more"
            )
        super().__post_init__()

    @property
    def hops(self) -> int:
        """The messages that follow one another in a ring."""
        return (2 if self.op == "all_reduce" else 1) * (self.workers - 1)

    @property
    def traffic_bytes(self) -> int:
        """The bytes that one worker sends in a ring."""
        return wire_bytes(self.op, self.bytes, self.workers)


@dataclass(frozen=True)
class CodecTiming(Sampled):
    """The seconds of a plan's own computation when every trained tensor is encoded and decoded once.

    For gradients this is one step; for weights one synchronisation of all fragments, with deltas and outer step.
    """

    plan: str
    samples: tuple[float, ...]


@dataclass(frozen=True)
class StepTiming(Sampled):
    """The seconds of training steps without synchronising, while all workers compute.

    `samples` are whole steps. `by_worker` has the median of each worker, where a straggler shows.
    """

    samples: tuple[float, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    optimizer_s: tuple[float, ...]
    by_worker: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        for each in (self.forward_s, self.backward_s, self.optimizer_s, self.by_worker):
            check_samples(each)


@dataclass(frozen=True)
class ModelShapes:
    """The trained tensors of a model, by name, in their order."""

    name: str
    shapes: dict[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        for name, shape in self.shapes.items():
            if not all(is_whole(size, least=0) for size in shape):
                raise ValueError(f"the shape of {name} is {shape!r}, and must be a list of whole numbers")

    @property
    def parameters(self) -> int:
        """The number of trained parameters."""
        return sum(prod(shape) for shape in self.shapes.values())


@dataclass(frozen=True)
class Probe:
    """Everything that one probe has measured. `hosts` has the workers of each host."""

    workers: int
    hosts: tuple[tuple[int, ...], ...]
    device: str
    backend: str
    threads: int
    timings: tuple[Timing, ...]
    codecs: tuple[CodecTiming, ...]
    model: ModelShapes
    step: StepTiming | None = None
    link: str | None = None
    """The link that was asked for with --link."""
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if sorted(worker for host in self.hosts for worker in host) != list(range(self.workers)):
            raise ValueError(f"hosts is {self.hosts}, and must have each of the workers 0 to {self.workers - 1} once")

    @property
    def levels(self) -> dict[str, int]:
        """The workers in one group of each level that was measured."""
        return {each.level: each.workers for each in self.timings}

    def of(self, op: str, level: str = WORLD) -> tuple[Timing, ...]:
        """Return the timings of a collective."""
        return tuple(each for each in self.timings if each.op == op and each.level == level)

    def to_json(self) -> str:
        """Return the text of the file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Probe:
        """Read what `to_json` has written; refuse anything else."""
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise UsageError(f"this is not JSON ({error}). Write the file with laconic probe --out.") from None
        if not isinstance(fields, dict) or "format" not in fields:
            raise UsageError("this is not a probe: it has no field 'format'. Write the file with laconic probe --out.")
        found = fields.pop("format")
        if found != FORMAT:
            raise UsageError(f"format {found!r} of a probe: this laconic reads {FORMAT}. Run laconic probe again.")
        try:
            fields = {name: _frozen(value) for name, value in fields.items()}
            step = fields.pop("step")
            return Probe(
                timings=tuple(Timing(**each) for each in fields.pop("timings")),
                codecs=tuple(CodecTiming(**each) for each in fields.pop("codecs")),
                model=ModelShapes(**fields.pop("model")),
                step=None if step is None else StepTiming(**step),
                **fields,
            )
        except (TypeError, ValueError, KeyError) as error:
            raise UsageError(f"this probe is damaged: {error}. Run laconic probe again.") from None

    def write(self, path: Path) -> None:
        """Write the file, completely or not at all."""
        write_atomically(path, self.to_json().encode())

    @staticmethod
    def read(path: Path) -> Probe:
        """Read a file; the error names it."""
        try:
            return Probe.from_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"--probe {path}: {reason}") from None


def check_samples(samples: Sequence[float]) -> None:
    """Refuse samples that are empty or not above 0."""
    if not samples or not all(is_number(each) and each > 0 for each in samples):
        raise ValueError(f"samples is {list(samples)}, and must have seconds above 0")


def _frozen(value: Any) -> Any:
    """Make tuples of the lists in a JSON value."""
    if isinstance(value, dict):
        return {key: _frozen(each) for key, each in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
