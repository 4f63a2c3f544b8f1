"""What plans keep of trainings of many kinds: small ones, each beside `ddp()` and `alone()`.

    python benchmarks/trainings.py --quick                      # two trainings, a few plans: ten minutes
    python benchmarks/trainings.py                              # all trainings, all plans, two seeds: a night
    python benchmarks/trainings.py --trainings prose cnn --plans "power_sgd(rank=8)" --seeds 0
    python benchmarks/trainings.py --device cuda --jobs 14      # the same on a GPU: minutes
    python benchmarks/trainings.py --tune --trainings prose --lr 0.5 1 2    # the learning rate of `ddp()`
    python benchmarks/trainings.py --table                      # what is in the file of results, and no runs
    python benchmarks/trainings.py --record                     # add the results to what `laconic plan` predicts from
    python benchmarks/trainings.py --left-out                   # how well each training is predicted from the others

Each run is four workers in one process, as threads of the simulator: sessions run unchanged, and the collectives have
the bits of gloo's. `--processes` runs one with real processes over gloo instead, to check that. Learning rates are
tuned for `ddp()`; `--lr 1 2` also runs each plan at twice that rate. The validation loss is that of the averaged
weights (and buffers); workers that never communicate have none, so theirs is the mean of their own losses.

    kept  = (loss of alone() - loss of the plan) / (loss of alone() - loss of ddp())
    fewer = bytes of ddp() in fp32 / bytes of the plan, in the ledger of worker 0

Data comes with Python and with scikit-learn: the source of the standard library, the text of its language reference
(`pydoc_data.topics`), handwritten digits. Each finished run is a line of `--json`; runs that are there are not
repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

sys.path[:0] = [str(Path(__file__).parents[1])]

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import laconic
from laconic.plans.targets import Kind, TargetPlan, width_of
from laconic.tools.lab import text
from laconic.tools.lab.models import GPT
from laconic.tools.planner import quality
from laconic.tools.simulate.in_process import InProcessWorld

WORKERS = 4
CONTEXT = 64
POINTS = 4
"""How often a run is validated; `alone()`, whose workers all are, only at its end."""
CACHE = Path(__file__).parents[1] / "build" / "trainings"
"""What is computed once: digits, a pretrained model."""
RECORD = Path(quality.__file__).with_suffix(".json")
"""What was measured, by training, plan and seed."""

Batch = tuple[Tensor, Tensor]
Optimizers = list[torch.optim.Optimizer]


@dataclass(frozen=True)
class Training:
    """One training. `lr` was tuned for `ddp()` with `--tune`. `sign_lr` of `demo()` was not: see `--lr`."""

    about: str
    model: Callable[[int], nn.Module]
    """Makes the model of a seed."""
    draw: Callable[[int, int, int], Batch]
    """Returns the batch of (seed, worker, step)."""
    held_out: Callable[[], Sequence[Batch]]
    optimizers: Callable[[nn.Module, float], Optimizers]
    lr: float
    steps: int = 300
    clip: float | None = 1.0
    warmup: int = 10
    sign_lr: float = 4e-3
    """The learning rate of steps by sign."""


# Models. Those of the lab have no biases, norms or buffers; these have.


class LSTM(nn.Module):
    """A recurrent model over bytes."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(256, width // 2)
        self.lstm = nn.LSTM(width // 2, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, time] to [batch, time, 256]."""
        logits: Tensor = self.head(self.lstm(self.embed(ids))[0])
        return logits


class ConvNet(nn.Module):
    """Residual blocks of convolutions with BatchNorm, for 8x8 digits."""

    def __init__(self, width: int, blocks: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
                *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """[batch, 1, 8, 8] to [batch, 10]."""
        x = self.stem(images)
        for block in self.blocks:
            x = F.relu(x + block(x))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


class ViT(nn.Module):
    """A transformer with LayerNorm and biases over the 16 patches of a digit."""

    def __init__(self, width: int, layers: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.places = nn.Parameter(0.02 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(deepcopy(layer) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """[batch, 1, 8, 8] to [batch, 10]."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places  # [batch, 16, width]
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x.mean(dim=1))
        return logits


class Adapted(nn.Module):
    """A frozen linear layer with a trained adapter of low rank beside it (LoRA, arXiv:2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """As the base layer, plus 2 · up(down(x))."""
        out: Tensor = self.base(x) + 2 * F.linear(F.linear(x, self.down), self.up)
        return out


def gpt(width: int, layers: int, seed: int) -> nn.Module:
    """The lab's GPT."""
    return GPT(layers, width, max(1, width // 64), seed)


def adapted_gpt(seed: int) -> nn.Module:
    """A GPT that was trained on code by one worker, frozen, with adapters of rank 8 at all its linear layers."""
    path = CACHE / "pretrained.pt"
    model = gpt(128, 2, 0)
    if not path.exists():
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
        for step in range(1, 601):
            optimizer.param_groups[0]["lr"] = 3e-3 * share_of_lr(step, 600, 20)
            loss_of(model, text_batch((code,), 8, 1_000_000, 0, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        write(path, lambda place: torch.save(model.state_dict(), place))
    model.load_state_dict(torch.load(path, weights_only=True))
    model.requires_grad_(False)
    torch.manual_seed(seed)
    for block in model.get_submodule("blocks").children():
        for name, layer in list(block.named_children()):
            assert isinstance(layer, nn.Linear)
            setattr(block, name, Adapted(layer, 8))
    return model


# Data.


@cache
def code() -> tuple[Tensor, Tensor]:
    """The source of Python's standard library: to train on, and held out."""
    return text.load(None, CONTEXT)


@cache
def prose() -> tuple[Tensor, Tensor]:
    """Python's language reference, which `help()` shows; the last tenth is held out."""
    from pydoc_data.topics import topics

    whole = torch.frombuffer(bytearray("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)
    cut = len(whole) * 9 // 10
    return whole[:cut], whole[cut:]


@cache
def digits() -> tuple[Batch, Batch]:
    """Scikit-learn's digits: to train on, and every fourth held out."""
    path = CACHE / "digits.pt"
    if not path.exists():
        from sklearn.datasets import load_digits

        found = load_digits()
        images, labels = torch.from_numpy(found.images).float()[:, None] / 16, torch.from_numpy(found.target).long()
        write(path, lambda place: torch.save((images, labels), place))
    images, labels = torch.load(path, weights_only=True)
    held_out = torch.arange(len(labels)) % 4 == 0
    return (images[~held_out], labels[~held_out]), (images[held_out], labels[held_out])


def write(path: Path, save: Callable[[Path], object]) -> None:
    """Write a file as a whole, also if several processes do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    place = path.with_suffix(f".{os.getpid()}")
    save(place)
    place.replace(path)


Texts = Sequence[Callable[[], tuple[Tensor, Tensor]]]


def text_batch(texts: Texts, batch: int, seed: int, worker: int, step: int) -> Batch:
    """Draw sequences of the worker's text."""
    source = texts[worker % len(texts)]()[0]
    return text.batch(source, batch, CONTEXT, (seed, worker, step))


def text_held_out(texts: Texts) -> list[Batch]:
    """Sequences of all texts, the same in every run."""
    return [text.batch(each()[1], 32, CONTEXT, (0, index)) for index in range(8 // len(texts)) for each in texts]


def image_batch(batch: int, by_label: bool, seed: int, worker: int, step: int) -> Batch:
    """Draw digits; with `by_label`, nine of ten of the worker's own labels."""
    images, labels = digits()[0]
    source = text.generator((seed, worker, step))
    rows = torch.randint(len(labels), (batch,), generator=source)
    if by_label:
        mine = ((labels * WORKERS // 10) == worker).nonzero()[:, 0]
        own = mine[torch.randint(len(mine), (batch,), generator=source)]
        rows = torch.where(torch.rand(batch, generator=source) < 0.9, own, rows)
    noise = 0.3 * torch.randn(images[rows].shape, generator=source)  # keeps the loss from reaching zero
    return images[rows] + noise, labels[rows]


def image_held_out() -> list[Batch]:
    """All held-out digits, with the same noise in every run."""
    images, labels = digits()[1]
    return [(images + 0.3 * torch.randn(images.shape, generator=text.generator((0,))), labels)]


# Optimizers.


def adamw(model: nn.Module, lr: float) -> Optimizers:
    """AdamW, as for small transformers."""
    return [torch.optim.AdamW(trained(model), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)]


def sgd(model: nn.Module, lr: float) -> Optimizers:
    """SGD with momentum."""
    return [torch.optim.SGD(trained(model), lr=lr, momentum=0.9, weight_decay=5e-4)]


def muon(model: nn.Module, lr: float) -> Optimizers:
    """Muon for the matrices of the blocks, AdamW for the embedding."""
    inside = [p for name, p in model.named_parameters() if "embed" not in name]
    outside = [p for name, p in model.named_parameters() if "embed" in name]
    return [
        torch.optim.Muon(inside, lr=lr, weight_decay=0.01),
        torch.optim.AdamW(outside, lr=lr / 4, betas=(0.9, 0.95), weight_decay=0.01),
    ]


def demo(model: nn.Module, lr: float) -> Optimizers:
    """Decoupled momentum, for the plan of that name."""
    return [laconic.optim.DeMo(trained(model), lr=lr)]


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained."""
    return [p for p in model.parameters() if p.requires_grad]


def on_text(about: str, model: Callable[[int], nn.Module], batch: int, *texts: Any, **more: Any) -> Training:
    """A training on text."""
    held_out = partial(text_held_out, texts)
    return Training(about, model, partial(text_batch, texts, batch), held_out, **more)


def on_digits(about: str, model: Callable[[int], nn.Module], batch: int, by_label: bool, **more: Any) -> Training:
    """A training on digits."""
    return Training(about, model, partial(image_batch, batch, by_label), image_held_out, **more)


small, wide = partial(gpt, 128, 2), partial(gpt, 384, 1)
TRAININGS: dict[str, Training] = {
    "prose": on_text("transformer, AdamW, small batches", small, 2, prose, optimizers=adamw, lr=4e-3),
    "batches": on_text("the same with batches 8 times as large", small, 16, prose, optimizers=adamw, lr=4e-3),
    "wide": on_text("the same as prose, three times as wide", wide, 2, prose, optimizers=adamw, lr=4e-3),
    "muon": on_text("transformer, Muon and AdamW", small, 2, prose, optimizers=muon, lr=2e-2),
    "lora": on_text("adapters of rank 8 on a frozen transformer", adapted_gpt, 2, prose, optimizers=adamw, lr=4e-3),
    "lstm": on_text("recurrent, SGD", partial(LSTM, 128), 4, prose, optimizers=sgd, lr=1.0),
    "cnn": on_digits(
        "convolutions, BatchNorm, SGD", partial(ConvNet, 32, 2), 8, False, optimizers=sgd, lr=0.1, clip=None
    ),
    "vit": on_digits("vision transformer, AdamW", partial(ViT, 64, 2), 8, False, optimizers=adamw, lr=2e-3),
    "labels": on_digits("labels differ by worker", partial(ConvNet, 32, 2), 8, True, optimizers=sgd, lr=0.1, clip=None),
    "texts": on_text("text differs by worker", small, 2, prose, code, optimizers=adamw, lr=4e-3),
    "long": on_text(
        "a tiny transformer, 3000 steps", partial(gpt, 64, 2), 2, code, optimizers=adamw, lr=4e-3, steps=3000
    ),
}
QUICK = ("prose", "cnn")
PLANS = (
    *("quantized_ddp()", "power_sgd(rank=32)", "power_sgd(rank=16)", "power_sgd(rank=8)", "power_sgd(rank=4)"),
    *("frugal('30x')", "frugal('60x')", "frugal('120x')", "sparse_loco()", "diloco()", "post_local_sgd()"),
    *("diloco(period=4)", "streaming_diloco()"),
)


# Runs.


@dataclass(frozen=True)
class Run:
    """One run: `lr` is a factor of the training's own; `steps` None is the training's own number."""

    training: str
    plan: str
    seed: int
    lr: float = 1.0
    steps: int | None = None
    guard: Literal["warn", "act"] | None = None


@dataclass
class Found:
    """The result of a run."""

    became: str
    loss: float
    curve: list[tuple[int, float]]
    bytes: int
    ddp_bytes: float
    seconds: float
    noise: float | None = None
    """The gradient noise in batches of one worker, under `ddp()`."""
    alarms: list[str] = field(default_factory=list)
    """What the guard logged."""
    torch: str = field(default_factory=lambda: torch.__version__)
    device: str = "cpu"


def share_of_lr(step: int, steps: int, warmup: int) -> float:
    """The share of the learning rate in a step: a linear warm-up, and half a cosine."""
    return min(1.0, step / warmup) * 0.5 * (1 + math.cos(math.pi * (step - 1) / steps))


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The mean cross-entropy."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch."""
    inputs, targets = batch
    return inputs.to(device), targets.to(device)


class Worker:
    """One worker of a run, on the device of its model."""

    def __init__(self, run: Run, worker: int, model: nn.Module) -> None:
        self.run, self.worker, self.model = run, worker, model
        self.device = next(model.parameters()).device
        self.training = TRAININGS[run.training]
        self.steps = run.steps or self.training.steps
        self.plan = laconic.plan(run.plan)
        self.guard = run.guard or ("warn" if self.plan == laconic.ddp() else None)  # it measures the noise
        if run.plan.startswith("demo("):
            self.optimizers = demo(model, self.training.sign_lr)
        else:
            self.optimizers = self.training.optimizers(model, self.training.lr)
        self.rates = [group["lr"] for each in self.optimizers for group in each.param_groups]

    def train(self, group: Any, barrier: Callable[[], None], validate: Callable[[int], None]) -> laconic.Session:
        """Train; `barrier` waits for all workers, and `validate` is called by the first of them."""
        session = laconic.attach(
            self.plan,
            self.model,
            self.optimizers,
            group=group,
            clip_norm=self.training.clip,
            observers=[laconic.Guard(self.guard)] if self.guard else [],
        )
        barrier()  # sessions are listed in one place
        often = 1 if self.run.plan == "alone()" else POINTS
        points = {round(self.steps * (point + 1) / often) for point in range(often)}
        for step in range(1, self.steps + 1):
            factor = self.run.lr * share_of_lr(step, self.steps, self.training.warmup)
            groups = [each for optimizer in self.optimizers for each in optimizer.param_groups]
            for each, lr in zip(groups, self.rates, strict=True):
                each["lr"] = lr * factor
            batch = on_device(self.training.draw(self.run.seed, self.worker, step), self.device)
            loss_of(self.model, batch).backward()
            for optimizer in self.optimizers:
                optimizer.step()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            if step in points:
                barrier()
                if self.worker == 0:
                    validate(step)
                barrier()
        return session


def simulate(run: Run, device: torch.device) -> Found:
    """Run in one process, workers in threads, one at a time."""
    torch.set_num_threads(1)
    training = TRAININGS[run.training]
    first = training.model(run.seed).to(device)
    models = [first, *(deepcopy(first) for _ in range(1, WORKERS))]
    workers = [Worker(run, index, model) for index, model in enumerate(models)]
    world = InProcessWorld(WORKERS, at_once=1)
    batches = [on_device(batch, device) for batch in training.held_out()]
    curve: list[tuple[int, float]] = []
    sessions: dict[int, laconic.Session] = {}
    alone = run.plan == "alone()"

    def validate(step: int) -> None:
        ours = models if alone else [mean_of(models)]
        curve.append((step, statistics.fmean(validation_loss(each, batches) for each in ours)))

    def work(index: int) -> None:
        with world.working(index):
            barrier = partial(world.barrier, index)
            sessions[index] = workers[index].train(world.group(index), barrier, validate)

    logged: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda line: logged.append(line.getMessage())  # type: ignore[method-assign]
    logging.getLogger("laconic.guard").addHandler(listener)
    began = time.perf_counter()
    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if world.error is not None:
        raise world.error
    session = sessions[0]
    whole = laconic.sent_bytes(laconic.ddp(), session.parameters, WORKERS) * workers[0].steps
    seconds = time.perf_counter() - began
    noise = None if session.health is None else session.health.noise
    found = Found(
        became=repr(session.plan),
        loss=curve[-1][1],
        curve=curve,
        bytes=session.ledger.wire_bytes,
        ddp_bytes=whole,
        seconds=seconds,
        noise=noise,
        alarms=logged,
        device=device.type,
    )
    for each in sessions.values():
        each.detach()
    return found


@torch.no_grad()
def mean_of(models: Sequence[nn.Module]) -> nn.Module:
    """The model with the mean of all weights and buffers."""
    mean = deepcopy(models[0])
    states = [each.state_dict() for each in models]
    for name, into in mean.state_dict().items():
        if into.is_floating_point():
            into.copy_(torch.stack([state[name] for state in states]).mean(0))
    return mean


@torch.no_grad()
def validation_loss(model: nn.Module, batches: Sequence[Batch]) -> float:
    """The mean loss over the batches, in evaluation mode."""
    model.eval()
    loss = statistics.fmean(loss_of(model, batch).item() for batch in batches)
    model.train()
    return loss


def process(run: Run, worker: int, folder: str, results: Any) -> None:
    """Run as one real process over gloo."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), WORKERS)
    dist.init_process_group("gloo", store=store, rank=worker, world_size=WORKERS)
    mine = Worker(run, worker, TRAININGS[run.training].model(run.seed))
    mine.train(None, dist.barrier, lambda step: None)
    rows: list[Any] = [None] * WORKERS if worker == 0 else []
    state = {name: t.tolist() for name, t in mine.model.state_dict().items()}
    gathered: list[Any] | None = rows if worker == 0 else None
    dist.gather_object(state, gathered)
    if gathered is not None:
        models = [deepcopy(mine.model) for _ in range(WORKERS)]
        for model, each in zip(models, gathered, strict=True):
            model.load_state_dict({name: torch.tensor(values) for name, values in each.items()})
        batches = TRAININGS[run.training].held_out()
        ours = models if run.plan == "alone()" else [mean_of(models)]
        results.put(statistics.fmean(validation_loss(each, batches) for each in ours))
    dist.barrier()
    dist.destroy_process_group()


def real_loss(run: Run) -> float:
    """Return the validation loss of a run with real processes."""
    import tempfile

    context = get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [context.Process(target=process, args=(run, index, folder, results)) for index in range(WORKERS)]
        for each in workers:
            each.start()
        loss: float = results.get(timeout=600)
        for each in workers:
            each.join(60)
    return loss


def run_all(runs: Iterable[Run], path: Path, jobs: int, device: torch.device) -> list[dict[str, Any]]:
    """Run what is not in the file, `jobs` at a time, and return all its lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    done = lines(path)
    known = {Run(**{name: each[name] for name in asdict(Run("", "", 0)) if name in each}) for each in done}
    waiting = [run for run in dict.fromkeys(runs) if run not in known]
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for run, future in [(run, pool.submit(simulate, run, device)) for run in waiting]:
            try:
                found = asdict(run) | asdict(future.result())
            except Exception as error:
                print(f"{run}: {type(error).__name__}: {error}", flush=True)
                continue
            with path.open("a") as file:
                file.write(json.dumps(found) + "\n")
            print(
                f"{run.training} {run.plan} seed {run.seed} lr {run.lr:g}: {found['loss']:.4f} "
                f"in {found['seconds']:.0f} s",
                flush=True,
            )
            done.append(found)
    return done


def lines(path: Path) -> list[dict[str, Any]]:
    """Read the results."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# Tables.


def kept_of(found: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """What each run keeps, beside `ddp()` and `alone()` of the same training, seed and steps."""
    ends = {
        (each["training"], each["seed"], each["steps"], each["plan"]): each["loss"]
        for each in found
        if each["plan"] in ("ddp()", "alone()") and each["lr"] == 1
    }
    for each in found:
        key = (each["training"], each["seed"], each["steps"])
        if (*key, "ddp()") not in ends or (*key, "alone()") not in ends:
            continue
        best, worst = ends[*key, "ddp()"], ends[*key, "alone()"]
        fewer = each["ddp_bytes"] / max(1, each["bytes"])
        yield {**each, "kept": (worst - each["loss"]) / (worst - best), "fewer": fewer}


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """A row for each plan, a column for each training: kept in percent, and times fewer bytes."""
    cells: dict[tuple[str, float], dict[str, list[Mapping[str, Any]]]] = {}
    for each in kept_of(found):
        guarded = f"{each['plan']}, guard {each['guard']}" if each.get("guard") else each["plan"]
        cells.setdefault((guarded, each["lr"]), {}).setdefault(each["training"], []).append(each)
    columns = [name for name in TRAININGS if any(name in row for row in cells.values())]
    rows = [f"| plan | {' | '.join(columns)} |", f"|{'---|' * (1 + len(columns))}"]
    for (plan, lr), row in cells.items():
        shown = []
        for name in columns:
            runs = row.get(name, [])
            kept = ", ".join(f"{each['kept']:.0%}" for each in runs)
            shown.append(f"{kept} ({runs[0]['fewer']:.0f} ×)" if runs and plan != "alone()" else kept)
        rows.append(f"| `{plan}`{'' if lr == 1 else f', lr × {lr:g}'} | {' | '.join(shown)} |")
    return "\n".join(rows)


# Predictions.


KINDS: dict[str, tuple[Kind, ...]] = {"adamw": ("adaptive",), "sgd": ("sgd",), "muon": ("muon", "adaptive")}
"""What optimizers of the suite are to the planner, the one of most numbers first."""


def record(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Add runs to the file that the planner reads. What it has of other plans, learning rates and seeds stays."""
    held: dict[str, Any] = json.loads(path.read_text())["trainings"] if path.exists() else {}
    for each in kept_of(found):
        name = each["training"] if each["steps"] is None else f"{each['training']}, {each['steps']} steps"
        if name not in held:
            held[name] = described(each["training"], each["steps"], found)
        end = each["plan"] == "ddp()" and each["lr"] == 1
        if end or each["plan"] == "alone()" or each.get("guard"):
            continue
        rates = held[name]["plans"] if each["lr"] == 1 else held[name]["rates"].setdefault(f"{each['lr']:g}", {})
        target = isinstance(laconic.plan(each["plan"]), TargetPlan)
        ran = each["became"] if target else each["plan"]
        same = [plan for plan in rates if laconic.plan(plan) == laconic.plan(ran)]
        cell = rates.setdefault(same[0] if same else ran, {"fewer": round(each["fewer"], 1), "kept": {}})
        cell["kept"][str(each["seed"])] = round(each["kept"], 3)
    text = as_lines({"trainings": held}) + "\n"
    write(path, lambda place: place.write_bytes(text.encode()))


def described(name: str, steps: int | None, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is known of a training besides its results; its shapes resolve targets of bytes."""
    training, model = TRAININGS[name], TRAININGS[name].model(0)
    shapes = {n: p for n, p in model.named_parameters() if p.requires_grad}
    kinds = KINDS[training.optimizers.__name__]
    noise = [each["noise"] for each in found if each["training"] == name and each.get("noise") is not None]
    mean = round(statistics.fmean(noise), 1) if noise else None
    facts = quality.TrainingFacts(round(width_of(shapes), 1), steps or training.steps, kinds[0], mean)
    return {
        "about": training.about,
        "training": asdict(facts),
        "optimizers": kinds,
        "shapes": {n: list(p.shape) for n, p in shapes.items()},
        "buffers": {n: list(b.shape) for n, b in model.named_buffers() if b.is_floating_point()},
        "plans": {},
        "rates": {},
    }


def as_lines(value: Any, depth: int = 0) -> str:
    """JSON with a line for each plan."""
    if depth == 4 or not isinstance(value, dict) or not value:
        return json.dumps(value)
    inside = (f"{' ' * depth} {json.dumps(key)}: {as_lines(each, depth + 1)}" for key, each in value.items())
    return "{\n" + ",\n".join(inside) + "\n" + " " * depth + "}"


def left_out(cells: Sequence[quality.Cell]) -> str:
    """Predict the cells of each training from all others; return a table, and how many are within 15 points."""
    rows, within, inside, known = (
        ["| training | plan | kept | predicted | interval |", "|---|---|---|---|---|"],
        0,
        0,
        0,
    )
    for each in cells:
        others = [other for other in cells if other.name.split(",")[0] != each.name.split(",")[0]]
        found = quality.predict(laconic.plan(each.plan), each.training, others)
        if found is None:
            continue
        known += 1
        within += abs(found.value - each.kept) <= 0.15
        inside += found.low <= each.kept <= found.high
        interval = f"{found.low:.0%} to {found.high:.0%}"
        rows.append(f"| {each.name} | `{each.plan}` | {each.kept:.0%} | {found.value:.0%} | {interval} |")
    return "\n".join([*rows, "", f"{within} of {known} within 15 points, {inside} of {known} inside the interval"])


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainings", nargs="+", choices=list(TRAININGS), default=list(TRAININGS))
    parser.add_argument("--plans", nargs="+", default=list(PLANS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--lr", nargs="+", type=float, default=[1.0], help="factors of the learning rate")
    parser.add_argument("--steps", type=int, help="of each run; default: the training's own")
    parser.add_argument("--guard", choices=["warn", "act"], help="watch each plan; what it logs is in the results")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, default=Path("build/trainings.jsonl"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--left-out", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--tune", action="store_true", help="ddp() and alone() alone, at several learning rates")
    parser.add_argument("--processes", action="store_true", help="check a run beside real processes")
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.table:
        print(table(lines(options.json)))
        return
    if options.record:
        record(lines(options.json), RECORD)
        return
    if options.left_out:
        print(left_out(quality.measured_cells()))
        return
    names = [name for name in options.trainings if not options.quick or name in QUICK]
    seeds = options.seeds[:1] if options.quick else options.seeds
    if options.processes:
        for name, plan in itertools.product(names, options.plans):
            run = Run(name, plan, seeds[0], steps=options.steps)
            print(name, plan, "in one process", simulate(run, device).loss, "real", real_loss(run), flush=True)
        return
    ends = [
        Run(name, plan, seed, steps=options.steps) for name in names for seed in seeds for plan in ("ddp()", "alone()")
    ]
    if options.tune:
        runs = [Run(name, "ddp()", seed, lr, options.steps) for name in names for seed in seeds for lr in options.lr]
    else:
        runs = [
            Run(name, plan, seed, lr, options.steps, options.guard)
            for plan, lr, name, seed in itertools.product(options.plans, options.lr, names, seeds)
        ]
    for name in names:
        TRAININGS[name].model(0)  # what is computed once
    found = run_all([*ends, *runs], options.json, options.jobs, device)
    print(table(found))


if __name__ == "__main__":
    main()
