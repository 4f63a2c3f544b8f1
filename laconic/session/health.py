"""How much of what workers have to say reaches the others: measured in a few synchronisations, from short sketches.

A sketch of a set of tensors is 256 sums of their numbers with random signs, the same signs on all workers. Its squared
norm is that of the tensors, to about 9 %, and the mean of the workers' sketches is the sketch of their mean. So one
gather of three sketches tells the norms of means that no worker has ever computed: of the gradients, and of residuals.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.codecs.feedback import residuals_by_name
from laconic.exchange import Averaged, Exchange, Peers, State

SKETCH = 256
"""Numbers in a sketch."""
MOST_TENSORS = 32
"""The largest tensors of an exchange are sketched, and no others: on a GPU the launches would cost more than 1 %."""


@dataclass(frozen=True)
class Health:
    """What a synchronisation delivered, the same on all workers. "Mean" is the mean over the workers."""

    step: int
    residual: float
    """The norm of the mean residual over that of the mean gradient, or delta: how many steps or rounds lag behind."""
    error: float
    """The norm of the mean residual over that of what was to be sent, gradient plus old residual: 0 to about 1."""
    agreement: float
    """The squared norm of the mean gradient, or delta, over the mean of the workers' squared norms: 1 if all are the
    same, 1 / workers if they have nothing in common."""
    norm: float
    """The norm of the mean gradient, or delta; of scaled gradients on a DDP or sharded model under a GradScaler."""
    drift: float
    """The distance of the workers' gradients, or deltas, from their mean: root mean square. Of deltas it is how far
    the workers' weights are from their mean."""

    @property
    def finite(self) -> bool:
        """Whether all numbers are finite; a step with NaN tells nothing."""
        return all(map(math.isfinite, (self.residual, self.error, self.agreement, self.norm, self.drift)))


class Sketcher:
    """Sketches what is averaged, in synchronisations that are `due`."""

    def __init__(self) -> None:
        self.due = False
        self._sums: list[Tensor] = []
        """For each exchange [3, SKETCH]: of what was to be sent, of residuals before, and after."""
        self._signs: dict[tuple[str, int, torch.device], Tensor] = {}

    def watch(
        self, tensors: Mapping[str, Tensor], state: State, average: Callable[[], Exchange[Averaged]]
    ) -> Exchange[Averaged]:
        """Run the exchange that `average` makes of `tensors`, and sketch them."""
        names = sorted(tensors, key=lambda name: (-tensors[name].numel(), name))[:MOST_TENSORS]
        device = tensors[names[0]].device if names else torch.device("cpu")
        own = self._sketch({name: tensors[name] for name in names}, device)
        before = self._sketch(_residuals_of(names, state), device)
        end = yield from average()
        after = self._sketch(_residuals_of(names, state), device)
        self._sums.append(torch.stack([own, before, after]))
        return end

    def take(self) -> list[int]:
        """Return the sums of all sketches since the last call, as int64 numbers to gather; empty if there are none."""
        sums, self._sums = self._sums, []
        if not sums:
            return []
        total = sum((each.cpu() for each in sums), torch.zeros(3, SKETCH))
        bits: list[int] = total.reshape(-1).view(torch.int64).tolist()  # two fp32 numbers each
        return bits

    @torch.no_grad()
    def _sketch(self, tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
        sums = torch.zeros(SKETCH, device=device)
        for name, t in tensors.items():
            flat = t.detach().reshape(-1)
            rows = flat.numel() // SKETCH
            signs = self._signs_of(name, rows + 1, flat.device)
            if rows:
                sums += (signs[:rows].to(flat.dtype) @ flat[: rows * SKETCH].view(rows, SKETCH)).float()
            tail = flat[rows * SKETCH :]
            sums[: tail.numel()] += signs[rows] * tail.float()
        return sums

    def _signs_of(self, name: str, count: int, device: torch.device) -> Tensor:
        key = (name, count, device)
        if key not in self._signs:
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 1
            drawn = torch.randint(0, 2, (count,), generator=torch.Generator().manual_seed(seed))
            self._signs[key] = (2 * drawn - 1).float().to(device)
        return self._signs[key]


@dataclass(frozen=True, eq=False)
class Watched:
    """A codec whose exchanges a probe sketches, where they are due."""

    codec: Codec
    probe: Sketcher

    def accepts(self, shape: torch.Size) -> bool:
        """Accept what the codec accepts."""
        return self.codec.accepts(shape)

    def average(
        self, tensors: Mapping[str, Tensor], state: State, peers: Peers, *, reuse: bool = False
    ) -> Exchange[Averaged]:
        """Average through the codec."""
        if not self.probe.due:
            return self.codec.average(tensors, state, peers, reuse=reuse)
        return self.probe.watch(tensors, state, lambda: self.codec.average(tensors, state, peers, reuse=reuse))


def health_of(rows: Sequence[Sequence[int]], step: int) -> Health:
    """Compute the health from the rows of all workers, bit for bit the same wherever it is computed."""
    tables = [torch.tensor(row, dtype=torch.int64).view(torch.float32).view(3, SKETCH).tolist() for row in rows]
    gradient, before, after = ([table[i] for table in tables] for i in range(3))
    mean = _mean(gradient)
    norm, lag = _norm(mean), _norm(_mean(after))
    wanted = _norm([a + b for a, b in zip(mean, _mean(before), strict=True)])
    own = math.fsum(_norm(each) ** 2 for each in gradient) / len(rows)
    agreement = norm * norm / own if own else 1.0
    drift = math.sqrt(max(0.0, own - norm * norm))
    return Health(step, lag / norm if norm else 0.0, lag / wanted if wanted else 0.0, agreement, norm, drift)


def _mean(sketches: Sequence[Sequence[float]]) -> list[float]:
    return [math.fsum(column) / len(sketches) for column in zip(*sketches, strict=True)]


def _norm(sketch: Sequence[float]) -> float:
    if not all(map(math.isfinite, sketch)):
        return math.nan
    return math.sqrt(math.fsum(x * x for x in sketch))


def _residuals_of(names: Sequence[str], state: State) -> dict[str, Tensor]:
    residuals = residuals_by_name(state)
    return {name: residuals[name] for name in names if name in residuals}
