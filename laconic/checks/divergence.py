"""Replicas that must hold equal weights are compared by digest: a flipped bit on one worker is found."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from laconic.checks.agreement import all_same
from laconic.checks.digests import combined, digests
from laconic.comm.queue import CollectiveQueue
from laconic.errors import DivergedError, names, outliers
from laconic.values import is_whole

EVERY_GRADIENT_STEPS = 100
"""How often weights are compared by default where gradients are averaged at every step."""


class DivergenceCheck:
    """Compares the workers' weights after every `every`-th synchronisation that leaves them equal."""

    def __init__(self, every: int | None) -> None:
        if every is not None and not is_whole(every, 0):
            raise ValueError(
                f"attach(verify_every={every!r}): it must be a whole number of synchronisations, 0 for never, or None."
            )
        self.every = every
        self._count = 0

    def after_sync(self, queue: CollectiveQueue, weights: Mapping[str, Tensor], local: bool, step: int) -> None:
        """Count a synchronisation; where one is due, raise `DivergedError` on all workers unless weights are equal."""
        self._count += 1
        every = self.every if self.every is not None else (1 if local else EVERY_GRADIENT_STEPS)
        if every and queue.workers > 1 and self._count % every == 0:
            compare_weights(queue, weights, f"after step {step}")


def compare_weights(queue: CollectiveQueue, weights: Mapping[str, Tensor], when: str) -> None:
    """Raise `DivergedError` on all workers unless all hold the same weights, bit for bit."""
    found = first_difference(queue, weights)
    if found is not None:
        odd, name = found
        raise DivergedError(
            f"{when}, {names(odd)} holds other weights than the rest, first in {name}, where all must be equal.\n"
            "  A bit may have flipped in memory, the hardware may differ between workers (then attach with "
            "verify_every=0), or other code writes to the weights. Go back to a checkpoint, or average them.",
            odd,
        )


def first_difference(queue: CollectiveQueue, weights: Mapping[str, Tensor]) -> tuple[list[int], str] | None:
    """Find the first tensor that is not the same on all workers, and the workers that differ from the majority."""
    found = differences(queue, weights)
    return None if not found else (next(iter(found.values())), next(iter(found)))


def differences(queue: CollectiveQueue, tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Find the tensors that are not the same on all workers, each with the workers that differ from the majority."""
    each = digests(tensors)
    if all_same(queue, combined(each)):
        return {}
    table = queue.gather(each)
    odd = {name: outliers(table[:, index].tolist())[1] for index, name in enumerate(tensors)}
    return {name: workers for name, workers in odd.items() if workers}
