"""The training of train.py as one replica under torchft: others may die, leave or join at any time. See torchft.sh."""

import argparse
import socket

import torch
import torchft
from torch import nn
from train import GPT, batch, library

import laconic
from laconic.integrations import torchft as ft

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--replicas", type=int, default=1, help="how many there must be at least")
parser.add_argument("--address", default=socket.gethostname(), help="of this machine, for the other replicas")
options = parser.parse_args()

store = laconic.elastic.serve(0)  # torchft needs one for each replica
manager = torchft.Manager(
    pg=ft.Group(),
    load_state_dict=None,
    state_dict=None,
    min_replica_size=options.replicas,
    use_async_quorum=False,
    rank=0,
    world_size=1,
    store_addr=options.address,
    store_port=store.port,
    hostname=options.address,
    replica_id=socket.gethostname(),
)
torch.manual_seed(0)
text, model, loss = library(), GPT(), torch.zeros(())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
session = laconic.attach(laconic.plan_from_env(laconic.diloco(period=16)), model, optimizer, timeout_s=30)
session.stop_on()
with ft.Run(manager, session, model, optimizer) as run:
    for step in run.steps(options.steps):
        with step:
            draws = batch(text, step.number, step.worker, step.workers)
            loss = nn.functional.cross_entropy(model(draws[:, :-1]).flatten(0, 1), draws[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if session.should_stop:
            break
    sent = f"{session.ledger.wire_bytes:,} bytes"
    print(f"{session.plan}: step {session.step}, {run.workers} replicas, loss {loss.item():.4f}, sent {sent}")
manager.shutdown(wait=False)
