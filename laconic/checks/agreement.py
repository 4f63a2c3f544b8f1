"""The handshake: workers compare their settings and parameters before anything is averaged.

Each worker states facts: an ordered mapping of labels to text with settings, and name, shape and dtype of every
parameter. A digest is gathered, 16 bytes a worker. Only if digests differ are the facts themselves exchanged, as JSON,
and every worker raises the same error with the first difference and the workers that have it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from laconic.checks.errors import DisagreementError
from laconic.checks.outliers import outliers
from laconic.comm.queue import CollectiveQueue


def agree(queue: CollectiveQueue, what: str, facts: Mapping[str, object]) -> None:
    """Check that all workers state the same facts; raise `DisagreementError` on all of them otherwise."""
    if queue.workers == 1:
        return
    text = json.dumps([[label, str(value)] for label, value in facts.items()])
    digest = hashlib.sha256(text.encode()).digest()
    everyone = queue.gather(torch.tensor([int.from_bytes(digest[:8], signed=True), len(text.encode())]))
    if bool((everyone == everyone[0]).all()):
        return
    texts = _gather_texts(queue, text, [int(length) for length in everyone[:, 1]])
    raise DisagreementError(_first_difference(what, [json.loads(each) for each in texts]))


def parameter_facts(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """State index, name, shape, dtype, memory layout and whether it is trained of each parameter, in order."""
    return {f"parameter {index}": _fact(name, p) for index, (name, p) in enumerate(parameters)}


def _fact(name: str, p: Tensor) -> str:
    layout = "" if p.is_contiguous() else f" strides {p.stride()}"
    return f"{name} {list(p.shape)} {str(p.dtype).removeprefix('torch.')}{layout}{'' if p.requires_grad else ' frozen'}"


def _gather_texts(queue: CollectiveQueue, text: str, lengths: Sequence[int]) -> list[str]:
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    padded[: len(mine)] = mine
    rows = queue.gather(padded)
    return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]


def _first_difference(what: str, stated: list[list[list[str]]]) -> str:
    for index in range(max(len(facts) for facts in stated)):
        entries = [tuple(facts[index]) if index < len(facts) else ("nothing more", "") for facts in stated]
        usual, odd = outliers(entries)
        if not odd:
            continue
        shown = "; ".join(f"worker {worker} has {_shown(entries[worker])}" for worker in odd[:4])
        return (
            f"the workers disagree about {what}: {shown}, while worker {entries.index(usual)} has {_shown(usual)}.\n"
            "  Every worker must use the same settings and the same parameters in the same order. "
            "Nothing was averaged."
        )
    return f"the workers disagree about {what}."


def _shown(entry: tuple[str, ...]) -> str:
    return " ".join(part for part in (entry[0] + (":" if entry[-1] else ""), entry[-1]) if part)
