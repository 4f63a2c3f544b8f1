"""Models sharded by FSDP2: replicas agree about their shards.

Inside a replica torch shards, gathers and reduces as always. Between replicas, workers that hold the same shard agree
about it as the plan says: about its gradient inside backward, when FSDP has reduced it, and about its weights after the
optimizer's step. No parameter is ever gathered for that.

FSDP calls one hook for each of its parameter groups. Where the buffer that it hands over becomes the gradient as it is,
the exchange runs beside backward, and backward ends when all have ended; elsewhere FSDP waits for it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.futures import Future

from laconic.checks.agreement import agree
from laconic.codecs import Codec, Exact
from laconic.comm.averaging import write, written
from laconic.comm.requests import State
from laconic.plans.plan import Plan
from laconic.plans.schedules import Payload
from laconic.session.fsdp_units import Unit
from laconic.session.model_state import ModelState, local_of

logger = logging.getLogger(__name__)

Now: TypeAlias = Callable[[], Codec | None]
"""How gradients of this step travel; None in silence."""


@dataclass(frozen=True, eq=False)
class _Message:
    """One unit's gradients on their way, and what its parameters had for gradients before."""

    backward: int
    params: list[nn.Parameter]
    pieces: list[Tensor]
    before: list[Tensor | None]
    arrives: Future[Tensor]


class Sharded:
    """FSDP's side of a session: takes every unit's gradients, and gives them back averaged."""

    def __init__(self, units: Sequence[Unit], model_state: ModelState, now: Now) -> None:
        self._units = list(units)
        self._model_state = model_state
        self._now = now
        self._on_their_way: list[_Message] = []
        self._kept_back: set[str] = set()
        self._warned: set[int] = set()
        agree(model_state.queue, "the shards that they hold", _shard_facts(model_state.originals))
        self._listen()

    def _listen(self) -> None:
        try:
            for unit in self._units:
                if _is_group(unit.replicas, self._model_state.queue.group):
                    unit.take_over()
                unit.listen(partial(self._take, unit))
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Let torch do what it did before."""
        for unit in self._units:
            unit.listen(None)
            unit.give_back()

    def let_talk(self, buckets: bool, buffers: bool) -> None:
        """Begin a step. FSDP sends nothing between replicas by itself, so there is nothing to forbid."""
        self._kept_back.clear()

    def _take(self, unit: Unit, flat: Tensor) -> None:
        """FSDP's hook: what is in `flat` when it returns, or when backward ends, is the gradient."""
        if flat.is_cuda:  # FSDP may let go of it while this stream still reads it
            flat.record_stream(torch.cuda.current_stream(flat.device))
        if unit.missing_factor != 1:
            flat.mul_(unit.missing_factor)
        codec = self._now()
        if codec is None:
            return
        params = [p for p in unit.params if p.requires_grad]
        names = [self._model_state.name_of.get(id(p), "") for p in params]
        if not unit.may_talk:
            self._kept_back.update(names)
            return
        pieces = unit.cut(flat, [self._model_state.params[name].shape for name in names if name])
        if pieces is None:
            self._send_whole(unit, names, flat)
            return
        self._add_kept_back(params, names, pieces)
        tensors = dict(zip(names, pieces, strict=True))
        beside = unit.becomes_gradient(flat)
        arrives = self._send(tensors, self._model_state.state["gradient"], codec, flat, wait=not beside)
        if beside:
            backward = torch._C._current_graph_task_id()
            self._on_their_way.append(_Message(backward, params, pieces, [p.grad for p in params], arrives))
            for p in params:
                p.grad = None  # so that FSDP makes the buffer the gradient, and does not add it to an older one
            Variable._execution_engine.queue_callback(self._arrive)

    def _send(self, tensors: dict[str, Tensor], state: State, codec: Codec, flat: Tensor, wait: bool) -> Future[Tensor]:
        queue = self._model_state.queue
        exchange = self._model_state.routed(codec, queue).average(tensors, state, reuse=True)
        if flat.is_cuda and queue.device.type == "cpu":
            torch.cuda.current_stream(flat.device).synchronize()  # the queue's thread works on another stream
        arrives = queue.submit(written(exchange, tensors), Payload.GRADIENT, flat)
        if wait:
            queue.flush()
            arrives.wait()
        return arrives

    @torch.no_grad()
    def _arrive(self) -> None:
        """At the end of backward: wait for all gradients, and add them to those of earlier backwards."""
        messages, self._on_their_way = self._on_their_way, []
        self._model_state.queue.flush()
        for message in messages:
            message.arrives.wait()
        backward = torch._C._current_graph_task_id()
        for message in reversed(messages):  # a unit may come twice: the gradient there now is the later one's
            if message.backward != backward:  # of one that failed: its gradients are lost
                continue
            for p, piece, before in zip(message.params, message.pieces, message.before, strict=True):
                assert p.grad is not None
                write({"": local_of(p.grad)}, {"": piece})
                if before is not None:
                    local_of(before).add_(piece)
                    p.grad = before

    def _add_kept_back(self, params: Sequence[nn.Parameter], names: Sequence[str], pieces: Sequence[Tensor]) -> None:
        """Put in what earlier backwards of this step reduced inside the shards only."""
        for p, name, piece in zip(params, names, pieces, strict=True):
            if name in self._kept_back and p.grad is not None:
                piece.add_(local_of(p.grad).to(piece.device))
                p.grad = None
        self._kept_back.difference_update(names)

    def _send_whole(self, unit: Unit, names: Sequence[str], flat: Tensor) -> None:
        """Average a buffer that some parameter is missing from, whole and exactly, as nobody knows what is where."""
        if self._kept_back.intersection(names):
            raise RuntimeError(
                f"some of {', '.join(names)} got no gradient in this backward, and an earlier one was kept back by "
                "set_requires_all_reduce(False): the two do not fit together. Use set_requires_gradient_sync(False)."
            )
        if id(unit) not in self._warned:
            self._warned.add(id(unit))
            logger.warning(
                "some of %s got no gradient, and FSDP does not say which: the others of their group are sent exactly, "
                "whatever the codec. Freeze what is not used, or call set_reduce_scatter_unused_params(True).",
                ", ".join(names),
            )
        self._send({f"unit:{names[0]}": flat}, {}, Exact(), flat, wait=True)


def check_sharded_plan(units: Sequence[Unit], plan: Plan) -> None:
    """Refuse what has no meaning between shards."""
    if units and plan.topology.inner is not None:
        raise ValueError(
            f"{plan!r}: a sharded model has its inner groups in its mesh. Let FSDP average there, with a 2-D mesh "
            "inside each site, leave the plan's group out, and attach with the group between the sites."
        )


def check_sharded(model: nn.Module, units: Sequence[Unit], plan: Plan, group: dist.ProcessGroup | None) -> None:
    """Refuse a group whose workers hold other shards of the model than this one: their mean means nothing."""
    check_sharded_plan(units, plan)
    sharding = sys.modules.get("torch.distributed.tensor")
    if sharding is None or group is None:
        return
    whole = [name for name, p in model.named_parameters() if p.requires_grad and not isinstance(p, sharding.DTensor)]
    if units and whole:
        raise ValueError(
            f"attach: {whole[0]} is trained and not sharded, so nobody averages its gradient inside a model_state. Call "
            "fully_shard(model) on the whole model last, or freeze it."
        )
    me, ranks = dist.get_rank(), set(dist.get_process_group_ranks(group))
    taken_over = bool(units) and all(_is_group(unit.replicas, group) for unit in units)
    for name, p in model.named_parameters():
        if not isinstance(p, sharding.DTensor) or taken_over:
            continue
        others = sorted(ranks & set(p.device_mesh.mesh.flatten().tolist()) - {me})
        if others:
            raise ValueError(
                f"attach: {name} is sharded over workers {p.device_mesh.mesh.flatten().tolist()}, and the group that "
                f"is to agree has worker {others[0]} among them, who holds another part of it. Only workers that hold "
                'the same shard can average it: give group=mesh["replicate"].get_group(), on a mesh of two dimensions '
                'such as init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard")).'
            )


def replicas_of(units: Sequence[Unit]) -> dist.ProcessGroup | None:
    """Find the group that torch averages over between replicas, if the model is on a 2-D mesh."""
    found = [unit.replicas for unit in units]
    return found[0] if found and all(_is_group(each, found[0]) for each in found) else None


def _is_group(one: dist.ProcessGroup | None, other: dist.ProcessGroup | None) -> bool:
    if one is None or other is None:
        return False
    return set(dist.get_process_group_ranks(one)) == set(dist.get_process_group_ranks(other))


def _shard_facts(originals: Mapping[str, Tensor]) -> dict[str, str]:
    """State of each parameter which part of it this worker holds."""
    return {f"parameter {index}": _shard_fact(name, p) for index, (name, p) in enumerate(originals.items())}


def _shard_fact(name: str, p: Tensor) -> str:
    sharding = sys.modules["torch.distributed.tensor"]
    fact = f"{name} {list(p.shape)} {str(p.dtype).removeprefix('torch.')}"
    assert isinstance(p, sharding.DTensor)
    here = p.device_mesh.get_coordinate()
    parts = [
        f"part {here[dim]} of {p.device_mesh.size(dim)}"
        for dim, placement in enumerate(p.placements)
        if not placement.is_replicate()
    ]
    return ", ".join([fact, *parts])
