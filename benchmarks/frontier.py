"""The front of loss against bytes: one training with each plan, beside `ddp()` and beside `alone()`.

    python benchmarks/frontier.py --device cuda                       # a GPT of 10.7 M parameters, 4 workers on one GPU
    python benchmarks/frontier.py --device cuda --steps 3000 --seeds 0 --plans "frugal(bytes='60x')"
    python benchmarks/frontier.py --device cpu                        # a small GPT, about 10 minutes on 2 cores

Workers are processes that exchange over gloo. Each trains on bytes of Python's standard library, with AdamW, a cosine
learning rate and gradients clipped at norm 1. The validation loss is that of the averaged weights; workers that never
communicate have none, so theirs is the mean of their own losses. Bytes are those of the ledger of worker 0.

    kept = (loss of alone() - loss of the plan) / (loss of alone() - loss of ddp())
    fewer = bytes of ddp() / bytes of the plan

Each finished run is a line of `--json`; runs that are there already are not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

import torch
import torch.distributed as dist
from processes import free_port
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import laconic
from laconic.tools.lab import text
from laconic.tools.lab.models import GPT
from laconic.tools.lab.script import lr_share
from laconic.tools.lab.tasks import loss_of

WORKERS = 4
VALIDATION_BATCHES = 40
FRONT = ["ddp()", "alone()"]


@dataclass(frozen=True)
class Training:
    """One training of the benchmark."""

    plan: str
    seed: int
    steps: int
    device: str
    layers: int
    width: int
    batch: int
    context: int
    lr: float
    clip: str = "session"


SIZES = {
    "cuda": {"layers": 6, "width": 384, "batch": 16, "context": 256, "lr": 1.5e-3},
    "cpu": {"layers": 4, "width": 128, "batch": 2, "context": 64, "lr": 3e-3},
}


def work(training: Training, result: Path) -> None:
    """Train as one worker, and let worker 0 write the result."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, device = dist.get_rank(), torch.device(training.device)
    source, held_out = text.load(None, training.context)
    model = GPT(training.layers, training.width, training.width // 64, training.seed).to(device)
    replica = DistributedDataParallel(model)
    optimizer = AdamW(model.parameters(), lr=training.lr, betas=(0.9, 0.95), weight_decay=0.01)
    plan = laconic.plan(training.plan)
    clips = {"clip_norm": 1.0} if training.clip == "session" else {}
    began = time.perf_counter()
    with laconic.attach(plan, replica, optimizer, **clips) as session:
        for step in range(1, training.steps + 1):
            optimizer.param_groups[0]["lr"] = training.lr * lr_share(step, training.steps)
            ids = text.batch(source, training.batch, training.context, (training.seed, rank, step))
            with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
                loss = loss_of(replica, (ids[0].to(device), ids[1].to(device)))
            loss.backward()
            if training.clip == "after":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        seconds = time.perf_counter() - began
        sent = session.ledger.wire_bytes
    if training.plan != "alone()":
        for p in model.parameters():
            dist.all_reduce(p.data.div_(WORKERS))
    with torch.no_grad():
        mine = range(rank, VALIDATION_BATCHES, WORKERS)
        batches = [text.batch(held_out, training.batch, training.context, (0, index)) for index in mine]
        losses = torch.stack([loss_of(model, (x.to(device), y.to(device))) for x, y in batches]).mean().cpu()
    dist.all_reduce(losses.div_(WORKERS))
    if rank == 0:
        found = {**asdict(training), "loss": losses.item(), "bytes": sent / training.steps, "seconds": seconds}
        result.write_text(json.dumps(found))
    dist.barrier()


def start(training: Training, result: Path) -> list[subprocess.Popen[bytes]]:
    """Start the workers of one training."""
    port = free_port()
    variables = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORKERS)}
    variables |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, __file__, "--worker", json.dumps(asdict(training)), "--json", str(result)]
    log = result.with_suffix(".log").open("wb")
    return [
        subprocess.Popen(command, env=variables | {"RANK": str(rank)}, stdout=log, stderr=log)
        for rank in range(WORKERS)
    ]


def run_all(trainings: list[Training], path: Path, jobs: int) -> list[dict[str, Any]]:
    """Run trainings, `jobs` at a time, and return all results of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    known = [{key: found[key] for key in asdict(trainings[0])} for found in done]
    waiting = [training for training in trainings if asdict(training) not in known]
    running: dict[Path, tuple[Training, list[subprocess.Popen[bytes]]]] = {}
    numbers = itertools.count()
    while waiting or running:
        while waiting and len(running) < jobs:
            training, result = waiting.pop(0), path.with_name(f"{path.stem}-{os.getpid()}-{next(numbers)}.json")
            running[result] = (training, start(training, result))
        time.sleep(0.2)
        for result, (training, processes) in list(running.items()):
            if any(process.poll() not in (None, 0) for process in processes):
                for process in processes:
                    process.kill()
            if any(process.poll() is None for process in processes):
                continue
            del running[result]
            log = result.with_suffix(".log")
            if result.exists():
                done.append(json.loads(result.read_text()))
                with path.open("a") as file:
                    file.write(json.dumps(done[-1]) + "\n")
                print(f"{training.plan} seed {training.seed}: {done[-1]['loss']:.4f}", flush=True)
                result.unlink()
                log.unlink()
            else:
                print(f"{training.plan} seed {training.seed} failed:\n{log.read_text()[-2000:]}", flush=True)
    wanted = [asdict(training) for training in trainings]
    return [found for found in done if {key: found[key] for key in wanted[0]} in wanted]


@dataclass(frozen=True)
class Row:
    """The mean over the seeds of one plan."""

    plan: str
    seeds: int
    loss: float
    spread: float
    more: float
    kept: float
    fewer: float


def rows(found: list[dict[str, Any]]) -> list[Row]:
    """Summarise the runs, the most bytes first."""
    plans = dict.fromkeys(each["plan"] for each in found)
    losses = {plan: [each["loss"] for each in found if each["plan"] == plan] for plan in plans}
    sent = {plan: next(each["bytes"] for each in found if each["plan"] == plan) for plan in plans}
    mean = {plan: statistics.mean(values) for plan, values in losses.items()}
    best, worst = mean.get("ddp()", float("nan")), mean.get("alone()", float("nan"))
    table = [
        Row(
            plan=plan,
            seeds=len(values),
            loss=mean[plan],
            spread=max(values) - min(values),
            more=mean[plan] / best - 1,
            kept=(worst - mean[plan]) / (worst - best),
            fewer=sent.get("ddp()", float("nan")) / max(sent[plan], 1),
        )
        for plan, values in losses.items()
    ]
    return sorted(table, key=lambda row: row.fewer)


def show(table: list[Row]) -> None:
    """Print a table in Markdown."""
    print("| plan | seeds | loss | spread | over ddp() | kept | fewer bytes |\n|---|---|---|---|---|---|---|")
    for row in table:
        fewer = "no bytes" if row.plan == "alone()" else f"{row.fewer:.1f} x"
        print(
            f"| `{row.plan}` | {row.seeds} | {row.loss:.4f} | {row.spread:.4f} | {row.more:+.1%} | {row.kept:.0%} "
            f"| {fewer} |"
        )


def draw(table: list[Row], path: Path) -> None:
    """Draw loss against bytes."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(9, 6), layout="constrained")).subplots()
    for row in table:
        if row.plan == "alone()":
            axes.axhline(row.loss, color="grey", linestyle=":", label="alone()")
            continue
        axes.plot(row.fewer, row.loss, "o", color="C0")
        axes.annotate(row.plan, (row.fewer, row.loss), fontsize=7, xytext=(4, 3), textcoords="offset points")
    axes.set(xscale="log", xlabel="times fewer bytes than ddp()", ylabel="validation loss")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cpu")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--plans", nargs="+", default=FRONT)
    parser.add_argument("--clip", choices=["session", "after", "none"], default="session")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--json", type=Path, default=Path("frontier.jsonl"))
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(Training(**json.loads(options.worker)), options.json)
        sys.stdout.flush()
        os._exit(0)  # a thread of gloo may abort an interpreter that shuts down (torch 2.13)
    size: dict[str, Any] = SIZES[options.device]
    plans = dict.fromkeys(["ddp()", "alone()", *(repr(laconic.plan(plan)) for plan in options.plans)])
    trainings = [
        Training(plan, seed, options.steps, options.device, clip=options.clip, **size)
        for plan, seed in itertools.product(plans, options.seeds)
    ]
    table = rows(run_all(trainings, options.json, options.jobs))
    where = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    print(f"{options.steps} steps, {WORKERS} workers, torch {torch.__version__}, {where}")
    show(table)
    if options.picture:
        draw(table, options.picture)


if __name__ == "__main__":
    main()
