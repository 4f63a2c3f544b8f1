"""The loss of each plan: the lab's training with each plan and several seeds, compared with DDP.

    python benchmarks/quality.py                                   # the named plans, GPT, 192 steps, 4 workers
    python benchmarks/quality.py --steps 300 --plans "diloco(period=16)" "streaming_diloco(period=16)"
    python benchmarks/quality.py --model resnet --plans "post_local_sgd(period=8, buffers='keep')"

Each run is a `laconic compare`. The table has the mean of the final validation losses over the seeds, their spread, the
difference from the mean of the first plan, and the bytes that one worker passes to collectives.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

LOCAL_FROM = 53  # of 192 steps: DiLoCo's paper starts local steps after 24 of 88 thousand
PLANS = [
    "ddp()",
    "power_sgd(rank=4)",
    "power_sgd(rank=4, rounds='two')",
    "post_local_sgd(period=16)",
    f"post_local_sgd(start={LOCAL_FROM}, period=16)",
    f"hierarchical_sgd({{4: 2, 16: 4}}, start={LOCAL_FROM})",
    f"qsr(growth=0.012, floor=4, start={LOCAL_FROM})",
    f"diloco(period=16, lr=0.9, momentum=0.5, start={LOCAL_FROM})",
    f"streaming_diloco(period=16, fragments=4, delay=1, lr=0.9, momentum=0.5, start={LOCAL_FROM})",
]


def outcomes(plans: list[str], seed: int, options: argparse.Namespace) -> dict[str, tuple[float, int]]:
    """Final validation loss and bytes sent, by plan."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "outcomes.json")
        command = [sys.executable, "-m", "laconic", "compare", "--plain", "--fresh", "--json", str(path)]
        command += ["--no-baselines", "--batch", "4", "--context", "128"]
        command += ["--seed", str(seed), "--steps", str(options.steps), "--model", options.model]
        command += ["--workers", str(options.workers), "--lr", str(options.lr)]
        for plan in plans:
            command += ["--plan", plan]
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
        runs = json.loads(path.read_text())
    return {plan: (run["loss_final"], run["sent_bytes"]) for plan, run in zip(plans, runs, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", default=PLANS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=192)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--model", default="gpt")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {platform.machine()}; {options.model}, {options.workers} workers,", end=" ")
    print(f"{options.steps} steps, lr {options.lr:g}, seeds {' '.join(map(str, options.seeds))}\n", flush=True)
    by_seed = [outcomes(options.plans, seed, options) for seed in options.seeds]
    base = statistics.mean(found[options.plans[0]][0] for found in by_seed)
    print("| plan | validation loss | spread | of the first | sent by each |\n|---|---|---|---|---|")
    for plan in options.plans:
        losses = [found[plan][0] for found in by_seed]
        mean, spread = statistics.mean(losses), max(losses) - min(losses)
        sent = by_seed[0][plan][1] / 1e6
        print(f"| `{plan}` | {mean:.3f} | {spread:.3f} | {100 * (mean / base - 1):+.1f}% | {sent:.1f} MB |", flush=True)


if __name__ == "__main__":
    main()
