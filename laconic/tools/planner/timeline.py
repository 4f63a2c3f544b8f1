"""The time of steps in which communication overlaps with computation, as one serial queue.

A step computes for `compute_s` seconds: the forward pass, then the backward pass, from the last layer down. Messages
are released at their offset from the start of a step, into a queue that sends one after another. A step ends when its
computation has, and all messages that are due at its end have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BACKWARD_SHARE = 2 / 3
"""The share of a step that the backward pass takes: it computes two products where the forward pass computes one."""


@dataclass(frozen=True)
class Message:
    """What is sent of one step: when it is released, how long it takes, and how many steps later it is due."""

    release_s: float
    seconds: float
    delay: int = 0


@dataclass(frozen=True)
class Timeline:
    """The seconds of one cycle of steps."""

    total_s: float
    compute_s: float
    steps: int

    @property
    def step_s(self) -> float:
        """The mean seconds of a step."""
        return self.total_s / self.steps

    @property
    def exposed_s(self) -> float:
        """The mean seconds of a step in which nothing is computed."""
        return max(0.0, self.step_s - self.compute_s)

    @property
    def utilisation(self) -> float:
        """The share of the time in which workers compute."""
        return self.compute_s / self.step_s if self.step_s else 1.0


def timeline(cycle: Sequence[Sequence[Message]], compute_s: float) -> Timeline:
    """Return the time of a cycle of steps that repeats, each given by its messages, once it has settled.

    >>> timeline([[Message(release_s=1.0, seconds=0.5)]], compute_s=1.0).step_s
    1.5
    >>> timeline([[], [Message(release_s=1.0, seconds=0.5, delay=1)]], compute_s=1.0).exposed_s
    0.0
    """
    now = free = began = 0.0
    steps, number = len(cycle), 0
    delay = max((message.delay for messages in cycle for message in messages), default=0)
    settled = (2 + 2 * delay // steps) * steps  # from here on, every cycle takes as long
    busy = [index for index, messages in enumerate(cycle) if messages] or [steps]
    due: list[tuple[int, float]] = []  # the step at whose end a message must have arrived, and when it does
    while number < settled + steps:
        if number == settled:
            began = now
        if not due and not cycle[number % steps]:  # only computation until the next message, or the cycle's end
            quiet = next((index for index in busy if index > number % steps), steps) - number % steps
            now, number = now + quiet * compute_s, number + quiet
            continue
        for message in cycle[number % steps]:
            free = max(free, now + message.release_s) + message.seconds
            due.append((number + message.delay, free))
        now = max([now + compute_s, *(at for step, at in due if step <= number)])
        due = [(step, at) for step, at in due if step > number]
        number += 1
    return Timeline(now - began, compute_s, steps)


def released_s(done: float, compute_s: float) -> float:
    """Return when a gradient is ready, after the share `done` of the backward pass, from the start of the step."""
    return compute_s * (1 - BACKWARD_SHARE + BACKWARD_SHARE * done)
