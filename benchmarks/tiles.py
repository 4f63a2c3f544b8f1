"""Measure candidate tile sizes of PowerSGD's kernels on this GPU, on the matrices of a model.

    python benchmarks/tiles.py
    python benchmarks/tiles.py --ranks 32 --rounds two --model "GPT-2 medium"

For comparison it prints the time of each kernel's passes over the gradients at the bandwidth of a copy. The fastest
belong in the tables of `laconic/kernels/cuda/triton_low_rank.py`. Needs a GPU, Triton and laconic.
"""

from __future__ import annotations

import argparse
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
from laconic.kernels.cuda.matrices import BucketMatrices
from laconic.kernels.cuda.triton_low_rank import Blocks

RANKS = (1, 4, 16, 64)
COMPUTE_P = [
    Blocks(32, 32, 2, 3), Blocks(32, 32, 2, 5), Blocks(32, 32, 2, 6), Blocks(16, 32, 1, 5), Blocks(64, 32, 4, 5),
    Blocks(32, 64, 4, 3), Blocks(64, 64, 4, 3), Blocks(128, 32, 4, 4), Blocks(128, 64, 8, 3),
]  # fmt: skip
COMPUTE_Q = [
    Blocks(32, 64, 2, 4), Blocks(32, 32, 2, 4), Blocks(32, 128, 4, 3), Blocks(32, 256, 8, 3), Blocks(64, 128, 4, 3),
    Blocks(32, 64, 4, 4), Blocks(64, 64, 4, 3),
]  # fmt: skip
RECONSTRUCT = [
    Blocks(32, 64, 4, 2), Blocks(32, 64, 2, 2), Blocks(16, 64, 2, 2), Blocks(16, 64, 4, 2), Blocks(16, 128, 4, 2),
    Blocks(64, 32, 4, 2), Blocks(32, 128, 4, 2), Blocks(16, 512, 8, 2, dot=False), Blocks(8, 512, 4, 2, dot=False),
    Blocks(16, 512, 8, 1, dot=False, one_tile=True), Blocks(8, 512, 4, 1, dot=False, one_tile=True),
    Blocks(4, 512, 4, 1, dot=False, one_tile=True), Blocks(4, 1024, 8, 1, dot=False, one_tile=True),
]  # fmt: skip


def bucket_of(shapes: list[tuple[int, ...]], rank: int, rounds: str) -> tuple[BucketMatrices, list[Tensor]]:
    """Return random matrices in one bucket, and their flat memory."""
    sizes = [torch.Size(s).numel() for s in shapes]
    flats = [torch.randn(sum(sizes), device="cuda") for _ in range(2)]
    g, e = (
        {str(i): x.view(s) for i, (x, s) in enumerate(zip(flat.split(sizes), shapes, strict=True))} for flat in flats
    )
    bucket = BucketMatrices(LowRank(rank, rounds=rounds, min_compression=0), g, {})
    for x in (bucket.p, bucket.q, bucket.own_q, bucket.q_message, bucket.p_message, bucket.own_p):
        x.normal_(std=0.01)
    bucket.set_addresses(g, e, {})
    return bucket, flats


def trials(bucket: BucketMatrices, rounds: str) -> list[tuple[str, str, list[Blocks], int, Callable[[], list[Launch]]]]:
    """Return each kernel, its table, candidates, passes over the gradients, and a function that builds its launches."""
    if rounds == "two":
        return [
            ("compute_p, store M", "COMPUTE_P_AND_M", COMPUTE_P, 3, bucket._compute_p),
            ("compute_q", "COMPUTE_Q", COMPUTE_Q, 1, lambda: bucket._compute_q(first=False)),
            ("reconstruct from M", "RECONSTRUCT_FROM_M", RECONSTRUCT, 3,
             lambda: bucket._reconstruct(bucket.p, bucket.q_message, bucket.own_q, left=False)),
        ]  # fmt: skip
    return [
        ("compute_p", "COMPUTE_P", COMPUTE_P, 2, bucket._compute_p),
        ("compute_q, add", "COMPUTE_Q", COMPUTE_Q, 2, lambda: bucket._compute_q(first=True)),
        ("reconstruct", "RECONSTRUCT", RECONSTRUCT, 4,
         lambda: bucket._reconstruct(bucket.p_message, bucket.q, bucket.own_p, left=True)),
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--rounds", nargs="+", choices=["two", "alternating"], default=["two", "alternating"])
    parser.add_argument("--model", choices=list(MODELS), default="BERT-large")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {options.model}")
    matrices = [s for s in MODELS[options.model]() if len(s) > 1 and s[0] >= max(options.ranks)]
    for rank in options.ranks:
        for rounds in options.rounds:
            bucket, flats = bucket_of(matrices, rank, rounds)
            one_pass = milliseconds(lambda a=flats[0], b=flats[1]: a.copy_(b)) / 2
            for kernel, table, candidates, passes, launches in trials(bucket, rounds):
                print(f"rank {rank}, {kernel}: {passes} passes are {passes * one_pass:.3f} ms")
                times = []
                for blocks in candidates:
                    setattr(kernels, table, {64: blocks})
                    flats[0].normal_()  # the kernels overwrite the gradients
                    times.append((milliseconds(Sequence(launches())), repr(blocks)))
                for ms, text in sorted(times)[:4]:
                    print(f"    {ms:.3f}  {text}", flush=True)
            del bucket, flats


if __name__ == "__main__":
    main()
