"""What a simulated run takes its time from: steps, stragglers, links and failures, and the text that describes them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from laconic.tools.errors import UsageError
from laconic.tools.planner.collectives import NetworkTimes
from laconic.values import is_number


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
class Conditions:
    """How long computing and sending takes.

    `step_s` is what a step computes for. `jitter` is its standard deviation, relative to it, drawn for each worker and
    step. Without a network, sending takes no time.
    """

    step_s: float = 0.05
    jitter: float = 0.0
    stragglers: Stragglers = Stragglers()
    network: NetworkTimes | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_number(self.step_s) or self.step_s <= 0:
            raise UsageError(f"--step {self.step_s:g}s: a step takes more than 0 seconds. Write --step 50ms.")
        if not is_number(self.jitter) or self.jitter < 0:
            raise UsageError(f"--jitter {self.jitter:g}: it must not be negative. Write --jitter 0.1 for 10 %.")

    def collective_s(self, op: str, payload_bytes: float, workers: int) -> float:
        """Return the seconds of a collective among `workers` neighbours."""
        return 0.0 if self.network is None else self.network.seconds(op, payload_bytes, workers)


def stragglers_of(text: str | None, workers: int) -> Stragglers:
    """Read how many workers are slower, and how many times.

    >>> stragglers_of("2@1.5x", workers=64)
    Stragglers(count=2, times=1.5)
    """
    if text is None:
        return Stragglers()
    match = re.fullmatch(r"(\d+)\s*@\s*(\d+(?:\.\d+)?)x?", text.strip())
    if match is None or int(match[1]) > workers or float(match[2]) < 1:
        raise UsageError(
            f"--stragglers {text}: write how many of the {workers} workers are slower, and how many times, at least 1, "
            "such as 2@1.5x."
        )
    return Stragglers(int(match[1]), float(match[2]))


def failures_of(texts: list[str], workers: int, steps: int) -> tuple[Failure, ...]:
    """Read which workers are lost, and when; one at least stays.

    >>> failures_of(["5@300"], workers=64, steps=1000)
    (Failure(worker=5, step=300),)
    """
    found = tuple(_failure(text, workers, steps) for text in texts)
    lost = {each.worker for each in found}
    if len(lost) < len(found) or len(lost) == workers:
        raise UsageError(
            f"--fail {' --fail '.join(texts)}: each worker can be lost once, and one of the {workers} must stay."
        )
    return found


def _failure(text: str, workers: int, steps: int) -> Failure:
    match = re.fullmatch(r"(\d+)\s*@\s*(\d+)", text.strip())
    if match is None or int(match[1]) >= workers or not 1 <= int(match[2]) <= steps:
        raise UsageError(
            f"--fail {text}: write a worker from 0 to {workers - 1} and a step from 1 to {steps}, such as 5@30: worker "
            "5 is lost when step 30 begins."
        )
    return Failure(int(match[1]), int(match[2]))
