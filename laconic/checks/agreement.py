"""Agreement: workers find out at once whether they mean the same thing.

Each worker states facts, an ordered mapping of labels to text: settings, and the name, shape and dtype of every
parameter. A digest of them is gathered, 16 bytes a worker. Only if the digests differ are the facts themselves
exchanged, as JSON, and then every worker raises the same error with the first difference and on whom it is.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from laconic.comm.queue import CollectiveQueue
from laconic.comm.requests import Averaged, Exchange, Gather


class DisagreementError(RuntimeError):
    """Workers do not mean the same thing. The message, the same on every worker, names the first difference."""


def agree(queue: CollectiveQueue, what: str, facts: Mapping[str, object]) -> None:
    """Make sure that all workers state the same facts; raise `DisagreementError` on all of them otherwise."""
    if queue.workers == 1:
        return
    text = json.dumps([[label, str(value)] for label, value in facts.items()])
    digest = hashlib.sha256(text.encode()).digest()
    mine = torch.tensor([int.from_bytes(digest[:8], signed=True), len(text.encode())])
    everyone = _gather(queue, mine)
    if bool((everyone == everyone[0]).all()):
        return
    stated = _gather_texts(queue, text, [int(length) for length in everyone[:, 1]])
    raise DisagreementError(_first_difference(what, [json.loads(each) for each in stated]))


def parameter_facts(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """State number, name, shape, dtype, memory layout and whether it is trained of each parameter, in order."""
    return {f"parameter {index}": _stated(name, p) for index, (name, p) in enumerate(parameters)}


def _stated(name: str, p: Tensor) -> str:
    layout = "" if p.is_contiguous() else f" strides {p.stride()}"
    return f"{name} {list(p.shape)} {str(p.dtype).removeprefix('torch.')}{layout}{'' if p.requires_grad else ' frozen'}"


def _gather(queue: CollectiveQueue, x: Tensor) -> Tensor:
    def exchange() -> Exchange:
        answer = yield Gather(x.to(queue.device))
        return Averaged({"": answer.cpu()}, dict, lambda: torch.tensor(True))

    return queue.run(exchange(), "control").mean[""]


def _gather_texts(queue: CollectiveQueue, text: str, lengths: Sequence[int]) -> list[str]:
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    padded[: len(mine)] = mine
    rows = _gather(queue, padded)
    return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]


def _first_difference(what: str, stated: list[list[list[str]]]) -> str:
    for index in range(max(len(facts) for facts in stated)):
        entries = [tuple(facts[index]) if index < len(facts) else ("nothing more", "") for facts in stated]
        counts = Counter(entries)
        if len(counts) == 1:
            continue
        usual = counts.most_common(1)[0][0]
        odd = [worker for worker, entry in enumerate(entries) if entry != usual]
        shown = "; ".join(f"worker {worker} has {_shown(entries[worker])}" for worker in odd[:4])
        return (
            f"the workers disagree about {what}: {shown}, while worker {entries.index(usual)} has {_shown(usual)}.\n"
            "  Every worker must use the same settings and the same parameters in the same order. "
            "Nothing was averaged."
        )
    return f"the workers disagree about {what}."


def _shown(entry: tuple[str, ...]) -> str:
    return " ".join(part for part in (entry[0] + (":" if entry[-1] else ""), entry[-1]) if part)
