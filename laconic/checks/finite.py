"""What workers check about each other while training goes on.

- Before a round of weights, and before a bare module's gradients, a header: the step and the plan that each worker
  believes in, whether its numbers are finite, whether it was asked to stop. Workers out of step get an error instead of
  a mean of different things.
- After gradients were averaged, whether the mean is finite; if not, who spoiled it and in which parameter.
- After a round in which all must agree, a digest of the weights: a bit that flipped on one worker is found.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from laconic.checks.digests import digests, together
from laconic.checks.outliers import names, outliers
from laconic.codecs.packing import side_by_side
from laconic.comm.queue import CollectiveQueue
from laconic.comm.requests import Averaged, Exchange, Gather, Mean, all_finite, total

logger = logging.getLogger(__name__)

NonFinite: TypeAlias = Literal["skip", "exclude", "raise", "ignore"]
Grads: TypeAlias = Mapping[str, Tensor] | Mapping[str, Tensor | None]


class NonFiniteError(RuntimeError):
    """NaN or Inf on some workers. `workers` are their indices."""

    def __init__(self, message: str, workers: Sequence[int]) -> None:
        super().__init__(message)
        self.workers = list(workers)


class DesyncError(RuntimeError):
    """Workers are not at the same step, or not under the same plan."""


class DivergedError(RuntimeError):
    """Weights that must be the same on all workers are not. `workers` are those in the minority."""

    def __init__(self, message: str, workers: Sequence[int]) -> None:
        super().__init__(message)
        self.workers = list(workers)


def check_policy(policy: object) -> None:
    """Refuse an unknown policy."""
    if policy not in ("skip", "exclude", "raise", "ignore"):
        raise ValueError(
            f'attach(nonfinite={policy!r}): it must be "skip" (nobody steps), "exclude" (average without the culprit), '
            '"raise" or "ignore".'
        )


def gathered(queue: CollectiveQueue, numbers: Tensor) -> Tensor:
    """Hear a row of int64 from every worker, on the host: [workers, numbers]."""
    if queue.workers == 1:
        return numbers.cpu()[None]

    def exchange() -> Exchange:
        rows = yield Gather(numbers.to(queue.device))
        return Averaged({"": rows.cpu()}, dict, lambda: torch.tensor(True))

    return queue.run(exchange(), "control").mean[""]


@dataclass(frozen=True)
class Headers:
    """What the workers said before a round: whether each is finite, whether any was asked to stop, and what else."""

    finite: list[bool]
    stop: bool
    rest: Tensor
    """[workers, ...]"""


def exchange_headers(
    queue: CollectiveQueue, step: int, plan: str, finite: bool, stop: bool, rest: Sequence[int]
) -> Headers:
    """Make sure that all workers mean the same round, and hear what they say of themselves."""
    rows = gathered(queue, _row(step, plan, finite, stop, rest))
    return _checked(rows, step, plan, queue.level)


class HeaderBeside:
    """A header that travels beside gradients: whoever waits for them need not wait for it."""

    def __init__(
        self, queue: CollectiveQueue, step: int, plan: str, finite: bool, stop: bool, rest: Sequence[int]
    ) -> None:
        row = _row(step, plan, finite, stop, rest).to(queue.device)
        self._heard: Headers | None = None

        def exchange() -> Exchange:
            rows = (yield Gather(row)) if queue.workers > 1 else row[None]
            self._heard = _checked(rows.cpu(), step, plan, queue.level)
            return Averaged({}, dict, lambda: torch.tensor(True))

        self._end = queue.submit(exchange(), "control", torch.empty(0))

    def heard(self) -> Headers:
        """Wait for it; the queue must have been flushed."""
        self._end.wait()
        assert self._heard is not None
        return self._heard


def _row(step: int, plan: str, finite: bool, stop: bool, rest: Sequence[int]) -> Tensor:
    mark = int.from_bytes(hashlib.sha256(plan.encode()).digest()[:8], signed=True)
    return torch.tensor([step, mark, int(finite), int(stop), *rest], dtype=torch.int64)


def _checked(rows: Tensor, step: int, plan: str, level: str) -> Headers:
    for column, what in ((0, "step"), (1, "plan")):
        said = rows[:, column].tolist()
        if len(set(said)) > 1:
            raise DesyncError(_out_of_step(said, what, step, plan, level))
    return Headers([bool(flag) for flag in rows[:, 2].tolist()], bool(rows[:, 3].any()), rows[:, 4:])


def _out_of_step(said: list[int], what: str, step: int, plan: str, level: str) -> str:
    usual, odd = outliers(said)
    if what == "step":
        shown = f"{names(odd)} at step {', '.join(str(said[w]) for w in odd)} and the others at step {usual}"
    else:
        shown = f"{names(odd)} under another plan than the others; this one has {plan}"
    return (
        f"the workers are out of step ({level}, step {step} here): {shown}. Nothing was averaged.\n"
        "  All workers must load the same checkpoint, count the same steps (session.skip() for those left out) and change "
        "plans together."
    )


def mean_of_finite(queue: CollectiveQueue, good: Sequence[bool], what: str, policy: NonFinite) -> float:
    """Decide about a round to which some workers bring NaN or Inf: by how much a mean with zeros must be scaled."""
    bad = [worker for worker, fine in enumerate(good) if not fine]
    text = f"{what}: {names(bad)} brought NaN or Inf ({queue.level})"
    if policy == "raise" or len(bad) == len(good):
        raise NonFiniteError(f"{text}. Nothing was averaged.", bad)
    logger.warning("%s. The others average without, and give their mean to all.", text)
    return len(good) / (len(good) - len(bad))


@dataclass(frozen=True, eq=False)
class _Seen:
    own: list[Tensor | str | None]
    """For each message of an exchange, in order: the parameter in which this worker was the first to spoil it, "" where
    none can be named, None if it was finite. On CUDA, whether it was finite, as a tensor that nobody waits for."""
    mean: Tensor | bool
    of: str
    """The parameters that it was about, the first and the last."""


@dataclass(frozen=True, eq=False)
class _Later:
    """What is still to be told of a step, when the device has come so far."""

    queue: CollectiveQueue
    step: int
    seen: list[_Seen]
    of: list[str]
    fine: Tensor
    """On the host: whether the mean gradients of these parameters are finite."""
    ready: torch.cuda.Event | None


class GradientGuard:
    """Watches the gradients of one step: this worker's own words, and the means."""

    def __init__(self, policy: NonFinite, late: bool = False) -> None:
        check_policy(policy)
        self.policy: NonFinite = policy
        self.late = late
        """Whether nobody waits for the verdict: optimizers carry it out where it is, and it is told a step later."""
        self._seen: list[_Seen] = []
        self._later: _Later | None = None
        self._closely = False
        """Whether a late verdict looks at each parameter, as it does when one was not finite before: it takes long."""

    def watched(self, tensors: Mapping[str, Tensor], average: Callable[[], Exchange]) -> Exchange:
        """Average through `average`, and note what was finite."""
        if self.policy == "ignore":
            return (yield from average())
        share = 1.0
        if self.policy == "exclude":
            own = _finite(tensors)
            share = float((yield Mean(own.to(torch.float32).reshape(1))))
            if share < 1 and not bool(own):
                for t in tensors.values():
                    t.zero_()
        said: list[Tensor | str | None] = []
        heard: list[bool] = []
        end = yield from _overheard(average(), tensors, said, heard)
        if share < 1:
            for t in end.mean.values():
                t.mul_(1 / share if share else torch.nan)
            logger.warning("gradients: %.0f%% of the workers brought NaN or Inf, and were left out.", 100 * (1 - share))
        self._seen.append(
            _Seen(said, all(heard) if len(heard) == len(said) else end.finite(), _first_and_last(tensors))
        )
        return end

    def forget(self) -> None:
        """Drop what was noted."""
        self._seen, self._later = [], None

    def spoiled(self, queue: CollectiveQueue, grads: Callable[[], Grads], step: int) -> bool:
        """Tell whether this step's mean gradients are not finite, on every worker alike; name who spoiled them.

        `grads` gives those of all parameters, in an order that all workers share.
        """
        seen, self._seen = self._seen, []
        if _all_true([each.mean for each in seen]):
            return False
        now = grads()
        bad, where = _who_and_where(queue, seen, list(now))
        message = (
            f"step {step}: {names(bad)} brought NaN or Inf, in {where or _first_bad(now) or 'no single parameter'}"
        )
        if self.policy == "raise":
            raise NonFiniteError(f"{message}. No worker has stepped.", bad)
        logger.warning("%s. No worker steps, and no codec remembers it.", message)
        return True

    def verdict(self, queue: CollectiveQueue, grads: Callable[[], Grads], step: int) -> Tensor | None:
        """Say 1.0 if this step's mean gradients are not finite, in a tensor that is not waited for."""
        seen, self._seen = self._seen, []
        if not seen:
            return None
        there = {name: t for name, t in grads().items() if t is not None} if self._closely else {}
        if there:
            fine, of = torch.stack(torch._foreach_norm(list(there.values()), 1)).isfinite(), list(there)
        else:
            where = next((e.mean.device for e in seen if isinstance(e.mean, Tensor)), None)
            fine, of = torch.stack([torch.as_tensor(e.mean, device=where) for e in seen]), [e.of for e in seen]
        ready = None
        here = torch.empty(fine.shape, dtype=torch.bool, pin_memory=fine.is_cuda).copy_(fine, non_blocking=True)
        if fine.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        self._later = _Later(queue, step, seen, of, here, ready)
        return (~fine.all()).to(torch.float32)

    def tell(self, parameters: Iterable[str]) -> None:
        """Tell what became of the last step that had a verdict. Every worker calls it after the same step.

        `parameters` are in an order that all workers share.
        """
        later, self._later = self._later, None
        if later is None:
            return
        if later.ready is not None:
            later.ready.synchronize()
        if bool(later.fine.all()):
            return
        self._closely = True
        bad, where = _who_and_where(later.queue, later.seen, parameters)
        where = where or later.of[later.fine.tolist().index(False)]
        logger.warning(
            "step %d: %s brought NaN or Inf, in %s. No worker has stepped, and no codec remembers it.",
            later.step,
            names(bad),
            where,
        )


def _who_and_where(queue: CollectiveQueue, seen: Sequence[_Seen], parameters: Iterable[str]) -> tuple[list[int], str]:
    """Find the workers whose messages were not finite first, and the first parameter that they name, if they do."""
    order = {name: place for place, name in enumerate(parameters, start=2)}
    own = [_code(flag, order) for each in seen for flag in each.own]
    rows = gathered(queue, torch.tensor(own)).split([len(each.own) for each in seen], dim=1)
    culprits = [found for row in rows for found in _culprits(row)]
    places = {place for _, place in culprits}
    where = next((name for name, place in order.items() if place in places), "")
    return sorted({worker for worker, _ in culprits}), where


def _overheard(
    exchange: Exchange, tensors: Mapping[str, Tensor], said: list[Tensor | str | None], heard: list[bool]
) -> Exchange:
    """Let an exchange run, and note for each of its messages whether it is finite.

    Messages are smaller than gradients, and what is not finite in a gradient is not finite in what a codec says of it.
    A message in code tells nothing: then the gradients themselves are looked at, once.

    A mean of finite numbers is finite, as they are divided before they are added. So where numbers can be looked at
    at once, a worker whose own are not finite spoils its first as well, and of the mean all look at that one alone.
    """
    answer: Tensor | None = None
    while True:
        try:
            request = next(exchange) if answer is None else exchange.send(answer)
        except StopIteration as stop:
            end: Averaged = stop.value
            return end
        x = request.x
        if x.device.type != "cpu":
            if x.is_floating_point():
                said.append(all_finite({"": x}))
            else:
                said.append(torch.tensor(True, device=x.device) if said else _finite(tensors))
            answer = yield request
        elif isinstance(request, Mean) and x.dtype in (torch.float32, torch.float64) and x.numel():
            first = (0,) * x.dim()
            fine = is_finite(x)
            said.append(None if fine else _first_bad(tensors))
            if not fine:
                x[first] = torch.nan
            answer = yield request
            heard.append(math.isfinite(answer[first].item()))
        else:
            looked_at = [x] if x.is_floating_point() else [] if said else list(tensors.values())
            said.append(None if all(map(is_finite, looked_at)) else _first_bad(tensors))
            answer = yield request


def _code(flag: Tensor | str | None, order: Mapping[str, int]) -> int:
    """Say in a number what was noted of a message: 0 if it was finite, 1 if not, or the place of the parameter."""
    if isinstance(flag, Tensor):
        return int(not bool(flag))
    return 0 if flag is None else order.get(flag, 1)


def _culprits(said: Tensor) -> list[tuple[int, int]]:
    """Find who said something that is not finite, [workers, messages], first: what follows has heard it."""
    first = next((column for column in said.unbind(1) if bool(column.any())), None)
    return [] if first is None else [(worker, code) for worker, code in enumerate(first.tolist()) if code]


def is_finite(x: Tensor) -> bool:
    """Return whether a tensor holds neither NaN nor Inf, in one pass, and wait for it.

    >>> is_finite(torch.full((2,), 3e38)), is_finite(torch.tensor([1.0, torch.nan]))
    (True, False)
    """
    return math.isfinite(total(x).item()) or bool(x.isfinite().all())  # a sum may overflow though all terms are finite


def _all_true(flags: Sequence[Tensor | bool]) -> bool:
    known = [flag for flag in flags if isinstance(flag, Tensor)]
    return all(flag for flag in flags if not isinstance(flag, Tensor)) and (not known or bool(torch.stack(known).all()))


class Divergence:
    """Compares the workers' weights, every so many rounds in which they must be equal."""

    def __init__(self, every: int | None) -> None:
        if every is not None and every < 0:
            raise ValueError(f"attach(verify_every={every!r}): a whole number of rounds, 0 for never, or None.")
        self.every = every
        self._rounds = 0

    def after_round(self, queue: CollectiveQueue, weights: Mapping[str, Tensor], local: bool, step: int) -> None:
        """Count a round; if it is time, raise `DivergedError` on all workers unless all weights are equal."""
        self._rounds += 1
        every = self.every if self.every is not None else (1 if local else 100)
        if every and queue.workers > 1 and self._rounds % every == 0:
            compare(queue, weights, f"after step {step}")


def compare(queue: CollectiveQueue, weights: Mapping[str, Tensor], when: str) -> None:
    """Raise `DivergedError` on all workers unless all hold the same weights, bit for bit."""
    found = different(queue, weights)
    if found is not None:
        odd, name = found
        raise DivergedError(
            f"{when}, {names(odd)} holds other weights than the rest, first in {name}, where all must be equal.\n"
            "  A bit may have flipped in memory, the hardware may differ between workers (then attach with "
            "verify_every=0), or something else writes to the weights. Go back to a checkpoint, or average them.",
            odd,
        )


def different(queue: CollectiveQueue, weights: Mapping[str, Tensor]) -> tuple[list[int], str] | None:
    """Find the workers whose weights are not those of most, and the first parameter where they differ."""
    each = digests(weights)
    rows = gathered(queue, together(each).reshape(1))
    if bool((rows == rows[0]).all()):
        return None
    table = gathered(queue, each)
    for index, name in enumerate(weights):
        _, odd = outliers(table[:, index].tolist())
        if odd:
            return odd, name
    return None


def _finite(tensors: Mapping[str, Tensor]) -> Tensor:
    flat = side_by_side(tensors.values())
    return all_finite(tensors if flat is None else {"": flat})


def _first_and_last(names: Iterable[str]) -> str:
    first, *rest = [*names] or [""]
    return f"one of those from {first} to {rest[-1]}" if rest else first


def _first_bad(tensors: Grads) -> str:
    """Name the first that holds NaN or Inf."""
    return next((name for name, t in tensors.items() if t is not None and not bool(t.isfinite().all())), "")
