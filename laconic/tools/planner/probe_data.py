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

from laconic.atomic_write import write_atomically
from laconic.ledger import wire_bytes
from laconic.tools.planner.decode import DecodeError, decode
from laconic.tools.planner.fit import Fit, fit, interpolated

FORMAT = 1
"""Of the file. A change that old code cannot read raises it."""
OPS = ("all_reduce", "all_gather", "all_to_all")
WORLD, MACHINE = "world", "machine"
"""The levels of all workers, and of those of one machine. Others are "groups of 2"."""


class ProbeError(ValueError):
    """A file that is no probe. The message is ready to be shown."""


class Sampled:
    """Something that was measured several times, in seconds."""

    samples: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median."""
        return median(self.samples)

    @property
    def spread(self) -> float:
        """Half of the interquartile range, relative to the median."""
        return spread(self.samples)


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
        check_samples(self.samples)

    @property
    def hops(self) -> int:
        """The messages that follow one another in a ring."""
        return (2 if self.op == "all_reduce" else 1) * (self.workers - 1)

    @property
    def traffic_bytes(self) -> int:
        """The bytes that one worker sends in a ring."""
        return wire_bytes(self.op, self.bytes, self.workers)


@dataclass(frozen=True)
class LinkTiming:
    """The link from one host to another, by index: seconds of a small message one way, and bits per second."""

    sender: int
    receiver: int
    latency_s: float
    bandwidth_bps: float

    def __post_init__(self) -> None:
        if self.latency_s < 0 or self.bandwidth_bps <= 0:
            raise ValueError(f"a latency of {self.latency_s} s and {self.bandwidth_bps} bit/s: both must be positive")


@dataclass(frozen=True)
class CodecTiming(Sampled):
    """The seconds of a plan's own computation when every trained tensor is encoded and decoded once.

    For gradients this is one step; for weights one synchronisation of all fragments, with deltas and outer step.
    """

    plan: str
    samples: tuple[float, ...]

    def __post_init__(self) -> None:
        check_samples(self.samples)


@dataclass(frozen=True)
class CopyTiming(Sampled):
    """The seconds to copy `bytes` bytes in the memory of the device."""

    bytes: int
    samples: tuple[float, ...]

    def __post_init__(self) -> None:
        check_samples(self.samples)

    @property
    def bandwidth_bps(self) -> float:
        """The bits that are read and written per second."""
        return 2 * 8 * self.bytes / self.seconds


@dataclass(frozen=True)
class StepTiming(Sampled):
    """The seconds of training steps without synchronising, while all workers compute.

    `samples` are whole steps, the others their parts; a script reports whole steps alone. `by_worker` has the median of
    each worker: a straggler is there.
    """

    samples: tuple[float, ...]
    forward_s: tuple[float, ...] = ()
    backward_s: tuple[float, ...] = ()
    optimizer_s: tuple[float, ...] = ()
    by_worker: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_samples(self.samples)
        for parts in (self.forward_s, self.backward_s, self.optimizer_s, self.by_worker):
            check_samples(parts or self.samples)

    @property
    def backward_share(self) -> float | None:
        """The share of backward in a step; None if it was not measured."""
        parts = (self.forward_s, self.backward_s, self.optimizer_s)
        return median(self.backward_s) / sum(map(median, parts)) if all(parts) else None


@dataclass(frozen=True)
class ModelShapes:
    """The trained tensors of a model, by name, in their order."""

    name: str
    shapes: dict[str, tuple[int, ...]]
    dtype: str = "float32"

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
    memory: CopyTiming
    model: ModelShapes
    step: StepTiming | None = None
    links: tuple[LinkTiming, ...] = ()
    links_together: bool = False
    """Whether disjoint pairs of hosts were measured at the same time, and may have shared a link."""
    link: str | None = None
    """The link that was asked for with --link."""
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if sorted(worker for host in self.hosts for worker in host) != list(range(self.workers)):
            raise ValueError(f"hosts is {self.hosts}, and must have each of the workers 0 to {self.workers - 1} once")
        for each in self.links:
            if not (0 <= each.sender < len(self.hosts) and 0 <= each.receiver < len(self.hosts)):
                raise ValueError(f"links has {each.sender} to {each.receiver}, and there are {len(self.hosts)} hosts")

    @property
    def levels(self) -> dict[str, int]:
        """The workers in one group of each level that was measured."""
        return {each.level: each.workers for each in self.timings}

    def of(self, op: str, level: str = WORLD) -> list[Timing]:
        """Return the timings of a collective."""
        chosen = [each for each in self.timings if each.op == op and each.level == level]
        if not chosen:
            known = ", ".join(f"{op} of {level!r}" for op, level in {(t.op, t.level): None for t in self.timings})
            raise ValueError(f"{op} of {level!r} was not measured. Measured: {known or 'none'}.")
        return chosen

    def fit(self, op: str, level: str = WORLD) -> Fit:
        """Fit latency and bandwidth of a collective."""
        return fit(self.of(op, level))

    def seconds(self, op: str, payload_bytes: float, level: str = WORLD) -> float:
        """Return the seconds of a collective of any size, interpolated between those measured."""
        return interpolated(self.of(op, level), payload_bytes)

    def codec_seconds(self, plan: str) -> float | None:
        """Return the seconds of a plan's own computation, by its text as a plan prints it; None if not measured."""
        return next((each.seconds for each in self.codecs if each.plan == plan), None)

    def to_json(self) -> str:
        """Return the text of the file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Probe:
        """Read what `to_json` has written; refuse anything else."""
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise ProbeError(f"this is not JSON ({error}). Write the file with laconic probe --out.") from None
        if not isinstance(fields, dict) or "format" not in fields:
            raise ProbeError("this is not a probe: it has no field 'format'. Write the file with laconic probe --out.")
        found = fields.pop("format")
        if found != FORMAT:
            raise ProbeError(f"format {found!r} of a probe: this laconic reads {FORMAT}. Run laconic probe again.")
        try:
            return decode(Probe, fields)
        except DecodeError as error:
            raise ProbeError(f"this probe is damaged: {error}. Run laconic probe again.") from None

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
            raise ProbeError(f"{path}: {reason}") from None


def spread(samples: Sequence[float]) -> float:
    """Return half of the interquartile range over the median; 0 for one sample.

    >>> spread([1.0, 2.0, 3.0]), spread([4.0])
    (0.25, 0.0)
    """
    if len(samples) < 2:
        return 0.0
    low, middle, high = quantiles(samples, n=4, method="inclusive")
    return (high - low) / 2 / middle


def check_samples(samples: Sequence[float]) -> None:
    """Refuse samples that are empty or not above 0."""
    if not samples or min(samples) <= 0:
        raise ValueError(f"samples is {list(samples)}, and must have seconds above 0")
