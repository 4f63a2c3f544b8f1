"""Which tiles suit PowerSGD's kernels on this GPU: each candidate's time on the matrices of BERT-large.

    python benchmarks/tiles.py

Beside each kernel, what its passes over the gradients would take at the bandwidth of a copy. The fastest belong in the
tables of `laconic/kernels/cuda/triton_low_rank.py`. Needs a GPU, Triton and laconic's core on the path.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch
from shapes import MODELS
from torch import Tensor

from laconic.codecs import LowRank
from laconic.kernels.cuda import triton_low_rank as kernels
from laconic.kernels.cuda.launches import Launch, Sequence
from laconic.kernels.cuda.matrices import Group
from laconic.kernels.cuda.triton_low_rank import Blocks

RANKS = (1, 4, 16, 64)
PROJECT = [
    Blocks(32, 32, 2, 3), Blocks(32, 32, 2, 5), Blocks(32, 32, 2, 6), Blocks(16, 32, 1, 5), Blocks(64, 32, 4, 5),
    Blocks(32, 64, 4, 3), Blocks(64, 64, 4, 3), Blocks(128, 32, 4, 4),
]  # fmt: skip
REFLECT = [
    Blocks(32, 64, 2, 4), Blocks(32, 32, 2, 4), Blocks(32, 128, 4, 3), Blocks(32, 256, 8, 3), Blocks(64, 128, 4, 3),
]  # fmt: skip
DELIVER = [
    Blocks(32, 64, 4, 2), Blocks(32, 64, 2, 2), Blocks(16, 64, 2, 2), Blocks(16, 64, 4, 2), Blocks(16, 128, 4, 2),
    Blocks(64, 32, 4, 2), Blocks(32, 128, 4, 2), Blocks(16, 512, 8, 2, dot=False), Blocks(8, 512, 4, 2, dot=False),
    Blocks(16, 512, 8, 1, dot=False, alone=True), Blocks(8, 512, 4, 1, dot=False, alone=True),
    Blocks(4, 512, 4, 1, dot=False, alone=True), Blocks(4, 1024, 8, 1, dot=False, alone=True),
]  # fmt: skip


def group_of(shapes: list[tuple[int, ...]], rank: int, rounds: str) -> tuple[Group, list[Tensor]]:
    """Random matrices in one group, and the memory that they lie in."""
    sizes = [torch.Size(s).numel() for s in shapes]
    flats = [torch.randn(sum(sizes), device="cuda") for _ in range(2)]
    g, e = (
        {str(i): x.view(s) for i, (x, s) in enumerate(zip(flat.split(sizes), shapes, strict=True))} for flat in flats
    )
    group = Group(LowRank(rank, rounds=rounds, min_compression=0), g, {})
    for x in (group.p, group.q, group.own_q, group.q_message, group.p_message, group.own_p):
        x.normal_(std=0.01)
    group.aim(g, e, {})
    return group, flats


def trials(group: Group, rounds: str) -> list[tuple[str, str, list[Blocks], int, Callable[[], list[Launch]]]]:
    """Each kernel, its table, candidates, passes over the gradients, and what makes its launches."""
    if rounds == "two":
        return [
            ("project, keep", "PROJECT_AND_KEEP", PROJECT, 3, group._project),
            ("reflect", "REFLECT", REFLECT, 1, lambda: group._reflect(first=False)),
            ("deliver, kept", "DELIVER_KEPT", DELIVER, 3,
             lambda: group._deliver(group.p, group.q_message, group.own_q, left=False)),
        ]  # fmt: skip
    return [
        ("project", "PROJECT", PROJECT, 2, group._project),
        ("reflect, add", "REFLECT", REFLECT, 2, lambda: group._reflect(first=True)),
        ("deliver", "DELIVER", DELIVER, 4,
         lambda: group._deliver(group.p_message, group.q, group.own_p, left=True)),
    ]  # fmt: skip


def milliseconds(action: Callable[[], object], count: int = 9) -> float:
    for _ in range(3):
        action()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start, end in pairs:
        start.record()
        action()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def main() -> None:
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    matrices = [s for s in MODELS["BERT-large"]() if len(s) > 1 and s[0] >= max(RANKS)]
    for rank in RANKS:
        for rounds in ("two", "alternating"):
            group, flats = group_of(matrices, rank, rounds)
            one_pass = milliseconds(lambda a=flats[0], b=flats[1]: a.copy_(b)) / 2
            for kernel, table, candidates, passes, launches in trials(group, rounds):
                print(f"rank {rank}, {kernel}: {passes} passes are {passes * one_pass:.3f} ms")
                times = []
                for blocks in candidates:
                    setattr(kernels, table, {64: blocks})
                    flats[0].normal_()  # what was delivered is not what is to be averaged
                    times.append((milliseconds(Sequence(launches())), repr(blocks)))
                for ms, text in sorted(times)[:4]:
                    print(f"    {ms:.3f}  {text}", flush=True)
            del group, flats


if __name__ == "__main__":
    main()
