"""NaN and Inf in gradients: found in the messages, named with worker and parameter.

A message is smaller than the gradients, and a non-finite gradient makes a codec's message non-finite. On the CPU, a
worker with non-finite numbers also sets the first number of its message to NaN: a mean of finite numbers is finite, as
they are divided before they are summed, so all workers look only at the first number of the mean. On a GPU nothing
waits for the result: fused optimizers skip the step on the device, and the worker is named a step later.

Of a sharded model, the workers of one exchange hold the same shard, and see NaN in this shard alone. So the workers
that hold the shards of one replica exchange one number in each step that averages gradients, and all decide alike.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from laconic.checks.agreement import of_all_shards
from laconic.comm.queue import Agree, CollectiveQueue
from laconic.errors import NonFiniteError, names
from laconic.exchange import Averaged, Decide, Exchange, Mean, Request, all_finite, intercept
from laconic.packing import side_by_side
from laconic.torch_private.foreach import norms

logger = logging.getLogger(__name__)

NonFinite: TypeAlias = Literal["skip", "exclude", "raise", "ignore"]
Gradients: TypeAlias = Mapping[str, Tensor] | Mapping[str, Tensor | None]
Finding: TypeAlias = Tensor | str | None
"""Of one message: None if it was finite; else the first parameter that is not, or "" if none can be named. On CUDA, a
0-d tensor: whether it was finite."""


def check_policy(policy: object) -> None:
    """Refuse an unknown policy."""
    if policy not in ("skip", "exclude", "raise", "ignore"):
        raise ValueError(
            f'attach(nonfinite={policy!r}): it must be "skip" (no worker steps), "exclude" (average without the '
            'worker that has them), "raise" or "ignore".'
        )


def scale_without(
    queue: CollectiveQueue, finite: Sequence[bool], what: str, policy: NonFinite, each: str = "worker"
) -> float:
    """Return the factor for a mean to which workers with NaN or Inf contribute zeros; raise if the policy says so."""
    bad = [worker for worker, fine in enumerate(finite) if not fine]
    text = f"{what}: {names(bad, each)} had NaN or Inf ({queue.level})"
    if policy == "raise" or len(bad) == len(finite):
        raise NonFiniteError(f"{text}. Nothing was averaged.", bad)
    logger.warning("%s. The others average without, and all take their mean.", text)
    return len(finite) / (len(finite) - len(bad))


@dataclass(frozen=True, eq=False)
class _Observed:
    """What was seen of one exchange."""

    own: list[Finding]
    """This worker's messages, in order."""
    mean: Tensor | bool
    """Whether the mean is finite."""
    parameters: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Late:
    """What is reported of a step once the device has computed it."""

    queue: CollectiveQueue
    step: int
    seen: list[_Observed]
    parameters: list[str]
    finite: Tensor
    """On the host, for each of `parameters`."""
    ready: torch.cuda.Event | None


class NonFiniteCheck:
    """Observes the gradients of one step: this worker's messages, and the means.

    `shards` are the workers that hold the shards of this replica: if one of them finds NaN, all have.
    """

    def __init__(self, policy: NonFinite, late: bool = False, shards: CollectiveQueue | None = None) -> None:
        self.policy: NonFinite = policy
        self._shards = shards
        self._each = "worker" if shards is None else "replica"
        self.late = late
        """Whether the optimizers skip a non-finite step themselves, and it is reported a step later."""
        self._seen: list[_Observed] = []
        self._pending: list[_Late] = []
        self._each_parameter = False
        """Whether a late check looks at each parameter, as it does after a first non-finite step: it takes longer."""

    def watch(
        self, tensors: Mapping[str, Tensor], exchange: Exchange[Averaged], weight: float | None = None
    ) -> Exchange[Averaged]:
        """Run an exchange that averages `tensors`, and note which messages and means are finite.

        Where means are weighted, `weight` is this worker's, and the exchange multiplies the tensors by it.
        """
        if self.policy == "ignore":
            unseen = yield from exchange
            return unseen if unseen.decided else replace(unseen, finite=lambda: _finite(tensors))
        fraction = 1.0
        if self.policy == "exclude":
            fraction = yield from self._finite_fraction(tensors, weight)
        own: list[Finding] = []
        means: list[bool] = []
        ok: Tensor | None = None

        def see(request: Request | Decide) -> Exchange[Tensor]:
            nonlocal ok
            if isinstance(request, Decide):
                ok = request.ok.bool()
                return (yield request)
            x = request.x
            looked = {"": x}
            if not x.is_floating_point():  # codes tell nothing: look at the gradients themselves, once
                looked = {} if own else dict(tensors)
            fine = _finite(looked)
            if x.device.type != "cpu":
                own.append(fine)
                return (yield request)
            own.append(None if bool(fine) else _first_nonfinite(tensors))
            if not (isinstance(request, Mean) and x.dtype in (torch.float32, torch.float64) and x.numel()):
                return (yield request)
            if not bool(fine):
                x[(0,) * x.dim()] = torch.nan
            answer = yield request
            means.append(math.isfinite(answer[(0,) * answer.dim()].item()))
            return answer

        end = yield from intercept(exchange, see)
        if 0 < fraction < 1:
            percent = 100 * (1 - fraction)
            logger.warning("gradients: %.0f%% of the %ss had NaN or Inf, and were left out.", percent, self._each)
        looked = len(means) == len(own)  # at each message's first number
        finite = all(means) if looked else end.finite() if ok is None else ok
        self._seen.append(_Observed(own, finite, tuple(tensors)))
        return end if end.decided else replace(end, finite=lambda: torch.as_tensor(finite))

    @property
    def agree(self) -> Agree | None:
        """What says whether a batch is finite in all shards of this replica; None if nobody else must be asked."""
        shards = self._shards
        if shards is None or self.policy == "ignore":
            return None
        return lambda ok: (shards.largest(torch.tensor(int(not bool(ok)))) == 0).to(ok.device)

    def conclude(self) -> Exchange[bool]:
        """Note and return whether all that was averaged since the last optimizer's step is finite.

        The last exchange before a flush: with `agree`, the answer is that of all shards.
        """
        ok = yield Decide(torch.tensor(_all_true([each.mean for each in self._seen])))
        self._seen.append(_Observed([], bool(ok), ()))
        return bool(ok)

    def _finite_fraction(self, tensors: Mapping[str, Tensor], weight: float | None) -> Exchange[float]:
        """Return the fraction of workers whose gradients are finite; let the gradients of the others count as zeros.

        The finite ones are scaled up for that, and not the mean: it also holds residuals. Where means are weighted,
        they are scaled by the share of the weight that is theirs. If none is, as these workers have counted nothing,
        there is no mean without the others: 0 is returned, and the step is void as where no worker is finite.
        """
        own = _finite(tensors)
        own = own if self.agree is None else self.agree(own)  # a replica is left out as a whole
        row = own.to(torch.float32).reshape(1)
        found = (yield Mean(row if weight is None else torch.cat([row, row * weight]))).tolist()
        fraction, of_weight = found[0], found[-1]
        if not of_weight:
            return 0.0
        if fraction < 1:
            for t in tensors.values():
                t.copy_(t / of_weight if bool(own) else torch.zeros_like(t))
        return float(fraction)

    def forget(self) -> None:
        """Drop what was noted."""
        self._seen, self._pending = [], []

    def has_nonfinite(self, queue: CollectiveQueue, gradients: Callable[[], Gradients], step: int) -> bool:
        """Return whether this step's mean gradients are not finite, the same on every worker; log who caused it.

        `gradients` returns those of all parameters, in an order that all workers share.
        """
        seen, self._seen = self._seen, []
        if _all_true([each.mean for each in seen]):
            return False
        now = gradients()
        bad, where = _who_and_where(queue, seen, list(now))
        where = where or _first_nonfinite(now)
        if self._shards is not None:
            bad, where = of_all_shards(self._shards, bad, where, list(now), queue.workers)
        where = where or "several parameters"
        message = f"step {step}: {names(bad, self._each) if bad else f'some {self._each}'} had NaN or Inf, in {where}"
        if self.policy == "raise":
            raise NonFiniteError(f"{message}. No worker has stepped.", bad)
        logger.warning("%s. No worker steps, and no codec keeps anything of it.", message)
        return True

    def nonfinite_flag(self, queue: CollectiveQueue, gradients: Callable[[], Gradients], step: int) -> Tensor | None:
        """Return 1.0 if this step's mean gradients are not finite, as a tensor that nothing waits for."""
        seen, self._seen = self._seen, []
        if not seen:
            return None
        averaged = {name for each in seen for name in each.parameters} if self._each_parameter else set()
        present = {name: t for name, t in gradients().items() if t is not None and name in averaged} if averaged else {}
        if present:
            finite, of = torch.stack(norms(list(present.values()), 1)).isfinite(), list(present)
        else:
            device = next((e.mean.device for e in seen if isinstance(e.mean, Tensor)), None)
            finite = torch.stack([torch.as_tensor(e.mean, device=device) for e in seen])
            of = [_first_and_last(e.parameters) for e in seen]
        ready = None
        host = torch.empty(finite.shape, dtype=torch.bool, pin_memory=finite.is_cuda).copy_(finite, non_blocking=True)
        if finite.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        self._pending.append(_Late(queue, step, seen, of, host, ready))
        return (~finite.all()).to(torch.float32)

    def report_late(self, parameters: Iterable[str]) -> None:
        """Log the flags of the last step, if they were not finite. Every worker calls it after the same step.

        `parameters` are in an order that all workers share.
        """
        pending, self._pending = self._pending, []
        for late in pending:
            if late.ready is not None:
                late.ready.synchronize()
            if bool(late.finite.all()):
                continue
            self._each_parameter = True
            bad, where = _who_and_where(late.queue, late.seen, parameters)
            logger.warning(
                "step %d: %s had NaN or Inf, in %s. No worker has stepped, and no codec keeps anything of it.",
                late.step,
                names(bad) if bad else "some worker",
                where or late.parameters[late.finite.tolist().index(False)],
            )


def _who_and_where(
    queue: CollectiveQueue, seen: Sequence[_Observed], parameters: Iterable[str]
) -> tuple[list[int], str]:
    """Find the workers whose messages were the first that were not finite, and the first parameter that they name."""
    # 1. this worker's findings as numbers: 0 for a finite message, 1 for another, or the index of the parameter
    index_of = {name: index for index, name in enumerate(parameters, start=2)}
    codes: list[int] = []
    for finding in (finding for each in seen for finding in each.own):
        if isinstance(finding, Tensor):
            codes.append(int(not bool(finding)))
        else:
            codes.append(0 if finding is None else index_of.get(finding, 1))
    # 2. those of all; in each exchange, who sent the first message that was not finite: later ones contain its mean
    found: dict[int, set[int]] = {}
    for messages in queue.gather(torch.tensor(codes)).split([len(each.own) for each in seen], dim=1):
        first = next((column for column in messages.unbind(1) if bool(column.any())), torch.zeros(0))
        for worker, code in enumerate(first.tolist()):
            if code:
                found.setdefault(worker, set()).add(code)
    where = next((name for name, index in index_of.items() if any(index in some for some in found.values())), "")
    return sorted(found), where


def _all_true(flags: Sequence[Tensor | bool]) -> bool:
    known = [flag for flag in flags if isinstance(flag, Tensor)]
    return all(flag for flag in flags if not isinstance(flag, Tensor)) and (not known or bool(torch.stack(known).all()))


def _finite(tensors: Mapping[str, Tensor]) -> Tensor:
    flat = side_by_side(tensors.values())
    return all_finite(tensors if flat is None else {"": flat})


def _first_and_last(parameters: Sequence[str]) -> str:
    first, *rest = parameters or ("",)
    return f"one of those from {first} to {rest[-1]}" if rest else first


def _first_nonfinite(tensors: Gradients) -> str:
    return next((name for name, t in tensors.items() if t is not None and not bool(t.isfinite().all())), "")
