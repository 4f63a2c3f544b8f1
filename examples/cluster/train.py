"""One training script for all launchers in this folder: a small GPT that learns the source of Python's own library.

torchrun's variables are its interface, and LACONIC_PLAN names the plan:

    LACONIC_PLAN="diloco(period=16)" torchrun --nproc-per-node 2 train.py --folder checkpoints

Started again, it goes on from the newest whole checkpoint in the folder, which all machines share. A SIGTERM to any
worker stops all of them after the same step, with a checkpoint.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from laconic import checkpoint

CONTEXT, BATCH, WIDTH = 32, 16, 64


class GPT(nn.Module):
    """Two blocks over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=x.device)
        return self.head(self.blocks(self.byte(x) + self.place.weight, mask=mask, is_causal=True))


def library() -> Tensor:
    """The text, as bytes. Without Python's library, all machines would need a copy of some data."""
    files = (Path(argparse.__file__).parent / f"{name}.py" for name in ("argparse", "ast", "inspect", "typing"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def batch(text: Tensor, step: int, worker: int, workers: int) -> Tensor:
    """The batch of a step and a worker depends on nothing else, so a run that is resumed sees the same data."""
    draw = torch.Generator().manual_seed(step * workers + worker)
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=draw)
    return text[starts + torch.arange(CONTEXT + 1)].long()


def train(
    steps: int,
    save_every: int,
    wrap: Callable[[nn.Module], nn.Module],
    load: Callable[[], dict[str, Any] | None],
    save: Callable[[dict[str, Any], laconic.Session, float], object],
    stop_on_sigterm: bool = True,
) -> tuple[laconic.Session, float]:
    """Train up to `steps` in all; launchers differ in how they wrap a model, and in where checkpoints go."""
    torch.manual_seed(0)
    text, model = library(), GPT()
    wrapped = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = laconic.attach(laconic.plan_from_env(), wrapped, optimizer)
    if stop_on_sigterm:
        session.stop_on()
    parts = {"model": model, "optimizer": optimizer, "session": session}
    if (saved := load()) is not None:
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    device, loss = next(model.parameters()).device, float("nan")
    while session.step < steps and not session.should_stop:
        draws = batch(text, session.step, dist.get_rank(), session.workers).to(device)
        logits = wrapped(draws[:, :-1])
        error = nn.functional.cross_entropy(logits.flatten(0, 1), draws[:, 1:].flatten())
        error.backward()
        optimizer.step()
        optimizer.zero_grad()
        if session.step == steps:
            session.average_weights()  # one model on all workers, whatever the plan
        if session.step % save_every == 0 or session.step == steps or session.should_stop:
            loss = error.item()
            save({name: part.state_dict() for name, part in parts.items()}, session, loss)
    return session, loss


def main() -> None:
    """Train as a worker of torchrun."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"), help="shared by all machines")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=50)
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)

    def load() -> dict[str, Any] | None:
        return checkpoint.load(options.folder).state if checkpoint.checkpoints(options.folder) else None

    session, loss = train(
        options.steps,
        options.save_every,
        wrap=lambda model: DDP(model.to(device)),
        load=load,
        save=lambda state, session, loss: checkpoint.save(options.folder, state, step=session.step),
    )
    if dist.get_rank() == 0:
        print(f"{session.plan}: step {session.step}, loss {loss:.4f}, sent {session.ledger.wire_bytes:,} bytes")
    dist.destroy_process_group()
    if session.step < options.steps:  # an exit code of 0 would tell the launcher that the work is done
        sys.exit(f"stopped after step {session.step}: the same command goes on from there")


if __name__ == "__main__":
    main()
