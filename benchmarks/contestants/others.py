"""Other libraries, each as its documentation or its own example uses it. All are imported where they are needed."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import TCPStore
from torch.optim import SGD

from contestants.contract import Host, Training

TIMEOUT = timedelta(seconds=120)


def accelerate_local_sgd(host: Host, period: int) -> Training:
    """Return accelerate's LocalSGD: `local_sgd.step()` after each step of the optimizer."""
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    inner = host.adamw()
    model, optimizer = accelerator.prepare(host.module, inner)
    local_sgd = LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=period)
    local_sgd.__enter__()  # never left: at its end it would average once more
    return Training(host.module, model, inner, optimizer, backward=accelerator.backward, after_step=local_sgd.step)


def torchft_manager(host: Host, use_async_quorum: bool) -> tuple[Any, Any]:
    """A torchft replica of one process and, on worker 0, the lighthouse: all of it over the link."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer("[::]:0", host.workers) if host.rank == 0 else None
    address = "" if lighthouse is None else f"http://{host.address}:{lighthouse.address().rpartition(':')[2]}"
    store = TCPStore(host.address, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=host.module.load_state_dict,
        state_dict=host.module.state_dict,
        min_replica_size=host.workers,
        use_async_quorum=use_async_quorum,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=host.address,
        store_port=store.port,
        lighthouse_addr=host.from_worker_0(address),
        replica_id=f"replica_{host.rank}",
        hostname=host.address,
        init_sync=False,  # as it advises where all start with the same weights
    )
    return manager, (store, lighthouse)


def torchft_local_sgd(host: Host, period: int) -> Training:
    """Return torchft's LocalSGD."""
    from torchft.local_sgd import LocalSGD

    training = host.bare()
    manager, servers = torchft_manager(host, use_async_quorum=True)
    LocalSGD(manager, host.module, training.inner, sync_every=period).__enter__()
    return replace(training, close=lambda: (manager.shutdown(wait=False), servers))


def torchft_diloco(
    host: Host, period: int, lr: float, momentum: float, by_block: bool = False, delay: int = 0, alpha: float = 0.0
) -> Training:
    """Return torchft's DiLoCo, of the whole model or by block with a delay (Streaming DiLoCo)."""
    from torchft.local_sgd import DiLoCo

    training = host.bare()
    manager, servers = torchft_manager(host, use_async_quorum=False)
    parts: list[Any] = [host.module.embed, *host.module.blocks] if by_block else [host.module]
    outer = [SGD(part.parameters(), lr=lr, momentum=momentum, nesterov=True) for part in parts]
    DiLoCo(
        manager,
        parts,
        training.inner,
        outer,
        sync_every=period,
        fragment_sync_delay=delay,
        fragment_update_alpha=alpha,
    ).__enter__()
    # A fragment that is in flight would travel while the clock of validation stands still: wait for its end.
    each = period // len(parts)
    due = (lambda step: step % each == 0) if delay else training.is_due
    return replace(training, is_due=due, close=lambda: (manager.shutdown(wait=False), servers))


def hivemind_local_updates(host: Host, period: int, matchmaking_s: float) -> Training:
    """Return hivemind's Optimizer with local updates and state averaging in 8 bits.

    Its workers are not in step with each other. They validate when an epoch ends, which they do together.
    """
    import hivemind
    from hivemind.compression import quantization

    # it calls int() on an array of one number, which numpy 2.4 refuses: no average would ever arrive
    vars(quantization)["int"] = lambda number: np.asarray(number).item()

    def dht(initial_peers: list[str]) -> Any:
        return hivemind.DHT(host_maddrs=[f"/ip4/{host.address}/tcp/0"], initial_peers=initial_peers, start=True)

    first = dht([]) if host.rank == 0 else None
    known = host.from_worker_0("" if first is None else "\n".join(map(str, first.get_visible_maddrs())))
    node = first or dht(known.split())
    training = host.bare()
    optimizer = hivemind.Optimizer(
        dht=node,
        run_id="peers",
        batch_size_per_step=host.settings.batch,
        target_batch_size=host.settings.batch * host.workers * period,
        optimizer=training.inner,
        use_local_updates=True,
        delay_state_averaging=False,
        matchmaking_time=matchmaking_s,
        averaging_timeout=60.0,
        state_averaging_compression=hivemind.compression.Uniform8BitQuantization(),
        next_chunk_timeout=30.0,
        averager_opts={"target_group_size": host.workers, "request_timeout": 1.0},
    )
    seen = 0

    def is_due(step: int) -> bool:
        nonlocal seen
        before, seen = seen, optimizer.local_epoch
        return seen > before

    def close() -> None:
        optimizer.shutdown()
        node.shutdown()

    return replace(training, optimizer=optimizer, is_due=is_due, close=close)


class Packer:
    """What DeepSpeed's packbits extension does, which it builds for XPUs alone: signs as bits, and back as ±1."""

    def load(self) -> Packer:
        """As an op builder of DeepSpeed."""
        return self

    def packbits(self, values: Tensor, count: int, rank: int) -> Tensor:
        """One bit for each number: whether it is at least 0."""
        return torch.from_numpy(np.packbits(values.numpy() >= 0))

    def unpackbits(self, packed: Tensor, count: int, rank: int) -> Tensor:
        """1 or -1 for each bit."""
        return torch.from_numpy(np.unpackbits(packed.numpy())).float() * 2 - 1


def gather_scales(gathered: list[Tensor], own: Tensor, group: Any) -> object:
    """Return what all_gather does, of a tensor in the shape of those that it is gathered into."""
    return torch.distributed.all_gather(gathered, own.reshape(gathered[0].shape), group=group)


def deepspeed_one_bit_adam(host: Host, freeze: int) -> Training:
    """Return DeepSpeed's 1-bit Adam over its "compressed" back end, with `Packer` for its missing extension.

    gloo, other than NCCL, gathers a number without dimensions into such numbers alone.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.runtime.comm import compressed

    compressed.PackbitsBuilder = Packer
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # it would compile for minutes, and hosts share no memory
    )
    vars(compressed)["dist"] = SimpleNamespace(**{**vars(deepspeed.comm), "all_gather": gather_scales})
    adam = {"lr": host.settings.lr, "betas": [0.9, 0.95], "weight_decay": 0.01}
    config = {
        "train_micro_batch_size_per_gpu": host.settings.batch,
        "optimizer": {
            "type": "OneBitAdam",
            "params": adam | {"freeze_step": freeze, "comm_backend_name": "compressed"},
        },
    }
    engine, optimizer, _, _ = deepspeed.initialize(
        model=host.module, model_parameters=host.module.parameters(), config=config, dist_init_required=False
    )
    return Training(host.module, engine, optimizer, engine, backward=engine.backward)
