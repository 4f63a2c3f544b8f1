"""The handshake: workers compare their settings and parameters before anything is averaged.

Each worker states facts: an ordered mapping of labels to text with settings, and name, shape and dtype of every
parameter. Workers compare digests, by the largest and the smallest of all: 16 bytes in one all_reduce. Only if they
differ are the facts themselves exchanged, as JSON, and every worker raises the same error with the first difference and
the workers that have it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from laconic.comm.queue import CollectiveQueue
from laconic.errors import DisagreementError, outliers


@dataclass(frozen=True)
class Facts:
    """Facts that one worker states, and their digest: equal for equal facts."""

    stated: Mapping[str, object]

    @cached_property
    def text(self) -> str:
        """The facts as JSON."""
        return json.dumps([[label, str(value)] for label, value in self.stated.items()])

    @cached_property
    def digest(self) -> int:
        """A digest of 64 bits."""
        return digest_of(self.text)


def digest_of(text: str) -> int:
    """Return 64 bits of a text's SHA-256, as a signed number."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], signed=True)


def agree(queue: CollectiveQueue, what: str, facts: Mapping[str, object]) -> None:
    """Check that all workers state the same facts; raise `DisagreementError` on all of them otherwise."""
    found = difference(queue, facts)
    if found is not None:
        raise DisagreementError(
            f"the workers disagree about {what}: {found}.\n"
            "  Every worker must use the same settings and the same parameters in the same order. "
            "Nothing was averaged."
        )


def difference(queue: CollectiveQueue, facts: Mapping[str, object]) -> str | None:
    """Describe the first fact that workers state differently, and who does; None if all state the same."""
    if queue.workers == 1:
        return None
    mine = Facts(facts)
    if all_same(queue, mine.digest):
        return None
    # Texts as bytes, padded to the longest.
    own = torch.frombuffer(bytearray(mine.text.encode()), dtype=torch.uint8)
    lengths: list[int] = queue.gather(torch.tensor([len(own)])).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(own)] = own
    rows = zip(queue.gather(padded), lengths, strict=True)
    return _first_difference([json.loads(bytes(row[:length].tolist()).decode()) for row, length in rows])


DIGEST_BYTES = 16
"""What workers exchange to compare a number of 64 bits."""


def all_same(queue: CollectiveQueue, digest: int | Tensor) -> bool:
    """Return, on all workers alike, whether all have the same number of 64 bits."""
    digest = torch.as_tensor(digest)
    largest, of_complement = queue.largest(torch.stack([digest, ~digest])).tolist()
    return bool(largest == ~of_complement)  # the largest and the smallest of all workers' numbers


def of_all_shards(
    shards: CollectiveQueue, bad: Sequence[int], where: str, parameters: Sequence[str], replicas: int
) -> tuple[list[int], str]:
    """Join what the workers that hold the shards of one replica have found: which replicas, and the first parameter."""
    early = len(parameters) - parameters.index(where) if where in parameters else 0  # the largest is the first one
    first, *found = shards.largest(torch.tensor([early, *(replica in bad for replica in range(replicas))])).tolist()
    return [replica for replica, each in enumerate(found) if each], parameters[-first] if first else where


def parameter_facts(parameters: Iterable[tuple[str, Tensor]], what: str = "parameter") -> dict[str, str]:
    """State index, name, shape, dtype, memory layout and whether it is trained of each parameter, in order."""
    return {f"{what} {index}": _fact(name, p) for index, (name, p) in enumerate(parameters)}


def _fact(name: str, p: Tensor) -> str:
    layout = "" if p.is_contiguous() else f" strides {p.stride()}"
    frozen = " frozen" if isinstance(p, nn.Parameter) and not p.requires_grad else ""
    return f"{name} {list(p.shape)} {str(p.dtype).removeprefix('torch.')}{layout}{frozen}"


def _first_difference(stated: list[list[list[str]]]) -> str:
    for index in range(max(len(facts) for facts in stated)):
        entries = [tuple(facts[index]) if index < len(facts) else ("nothing more", "") for facts in stated]
        usual, odd = outliers(entries)
        if odd:
            shown = "; ".join(f"worker {worker} has {_shown(entries[worker])}" for worker in odd[:4])
            return f"{shown}, while worker {entries.index(usual)} has {_shown(usual)}"
    return "their digests differ"


def _shown(entry: tuple[str, ...]) -> str:
    return " ".join(part for part in (entry[0] + (":" if entry[-1] else ""), entry[-1]) if part)
