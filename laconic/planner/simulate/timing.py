"""What a simulated run takes its time from: steps, stragglers, links and faults, and the text that describes them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from laconic.compare.links import Link, collective_s
from laconic.compare.settings import LabError
from laconic.values import is_number

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class Stragglers:
    """So many workers, the first ones, take `times` as long for every step."""

    count: int = 0
    times: float = 1.0


@dataclass(frozen=True)
class Failure:
    """A worker that is lost when a step begins."""

    worker: int
    step: int


@dataclass(frozen=True)
class Timing:
    """How long computing and sending takes.

    `step_s` is what a step computes for. `jitter` is its standard deviation, relative to it, drawn for each worker and
    step. Without a link, sending takes no time.
    """

    step_s: float = 0.05
    jitter: float = 0.0
    stragglers: Stragglers = Stragglers()
    link: Link | None = None
    latency_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_number(self.step_s) or self.step_s <= 0:
            raise LabError(f"--step {self.step_s:g}s: a step takes more than 0 seconds. Write --step 50ms.")
        for name, value in (("jitter", self.jitter), ("latency", self.latency_s)):
            if not is_number(value) or value < 0:
                raise LabError(f"--{name} {value:g}: it must not be negative. Leave it out for none.")

    def collective_s(self, op: str, payload_bytes: int, workers: int) -> float:
        """Return the seconds of a collective among `workers` neighbours."""
        if self.link is None:
            return 0.0
        return collective_s(op, payload_bytes, workers, self.link.inside(workers), self.latency_s)


def seconds(option: str, text: str) -> float:
    """Read a duration.

    >>> seconds("--step", "50ms"), seconds("--mtbf", "30d")
    (0.05, 2592000.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip())
    if match is None or match[2] not in _UNITS:
        raise LabError(f"{option} {text}: write a number and one of {', '.join(_UNITS)}, such as 50ms.")
    return float(match[1]) * _UNITS[match[2]]


def stragglers(text: str | None, workers: int) -> Stragglers:
    """Read how many workers are slower, and how many times.

    >>> stragglers("2@1.5x", workers=64)
    Stragglers(count=2, times=1.5)
    """
    if text is None:
        return Stragglers()
    match = re.fullmatch(r"(\d+)\s*@\s*(\d+(?:\.\d+)?)x?", text.strip())
    if match is None or int(match[1]) > workers or float(match[2]) < 1:
        raise LabError(
            f"--stragglers {text}: write how many of the {workers} workers are slower, and how many times, at least 1, "
            "such as 2@1.5x."
        )
    return Stragglers(int(match[1]), float(match[2]))


def failure(text: str, workers: int, steps: int) -> Failure:
    """Read which worker is lost, and when.

    >>> failure("5@300", workers=64, steps=1000)
    Failure(worker=5, step=300)
    """
    match = re.fullmatch(r"(\d+)\s*@\s*(\d+)", text.strip())
    if match is None or int(match[1]) >= workers or not 1 <= int(match[2]) <= steps:
        raise LabError(
            f"--fail {text}: write a worker from 0 to {workers - 1} and a step from 1 to {steps}, such as 5@30: worker "
            "5 is lost when step 30 begins."
        )
    return Failure(int(match[1]), int(match[2]))
