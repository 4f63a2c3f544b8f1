"""Models sharded by FSDP2: workers that hold the same shard average it.

Inside a replica torch shards, gathers and reduces as always. Between replicas, workers that hold the same shard average
its gradient inside backward, after FSDP has reduced it, and its weights after the optimizer's step. No parameter is
gathered for that.

FSDP calls one hook for each of its parameter groups. Where the buffer that it passes becomes the gradient as it is,
the exchange runs while backward goes on, and backward ends when all exchanges have; otherwise FSDP waits for it.

NaN on one worker reaches only the shards whose numbers it is in. At the end of backward, the workers that hold the
shards of one replica agree whether all of them are finite: one number each, inside the replica.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future

from laconic.checks.agreement import agree
from laconic.checks.headers import Headers, exchange_headers
from laconic.codecs import Codec, Exact
from laconic.comm.averaging import write
from laconic.exchange import Averaged, Exchange, State
from laconic.plans.plan import Plan
from laconic.plans.schedules import Payload, Sync
from laconic.session.gradients import MANUAL, GradientAverager, GradientPath
from laconic.session.live_model import local_of, same_tensors
from laconic.session.scaling import ScaledSteps
from laconic.session.step_headers import StepHeaders
from laconic.torch_private.distributed import flat_group
from laconic.torch_private.fsdp import Unit
from laconic.torch_private.modules import at_end_of_backward, backward_id

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Pending:
    """One unit's gradients that are being averaged, and what its parameters had for gradients before."""

    params: list[nn.Parameter]
    pieces: list[Tensor]
    before: list[Tensor | None]
    future: Future[Tensor]


class ShardedPath(GradientPath):
    """Averages the gradients of FSDP's parameter groups between replicas."""

    def __init__(self, units: Sequence[Unit], averager: GradientAverager, headers: StepHeaders) -> None:
        self._units = list(units)
        self._averager = averager
        self._live = averager.live
        self._queue = averager.levels.world
        self._headers = headers
        self._received: Headers | None = None
        """The headers of the last backward of this step, where means are weighted."""
        self._backward = -1
        """The backward whose gradients are being averaged; -1 if there is none."""
        self._pending: list[_Pending] = []
        self._before: State | None = None
        """The codecs' state when this backward began, if some exchanges have not waited for those of the others."""
        self._kept_local: set[str] = set()
        """Parameters whose gradients earlier backwards of this step have reduced inside a replica only."""
        self._warned: set[int] = set()
        agree(self._queue, "the shards that they hold", _shard_facts(self._live.originals))

    def check_plan(self, plan: Plan) -> None:
        """Refuse plans with groups inside a replica."""
        check_sharded_plan(self._units, plan)

    def install(self) -> None:
        """Take the gradients of every unit from now on."""
        try:
            for unit in self._units:
                self._check_finalization(unit)
                if _same_workers(unit.replicas, self._queue.group):
                    unit.take_over()
                unit.set_hook(partial(self._take, unit))
        except BaseException:
            self.detach()
            raise

    def begin_step(self, sync: Sync | None) -> None:
        """Prepare for the next step. FSDP itself sends nothing between replicas."""
        self._sync = sync
        self._kept_local.clear()

    def before_optimizer(self, optimizer: ScaledSteps) -> Headers | None:
        """Exchange headers where they are due, and none were in backward."""
        received, self._received = self._received, None
        if received is not None or not self._headers.stop_due:
            return received
        return exchange_headers(self._queue, self._headers.stop_header(), self._averager.levels.shards)

    def detach(self) -> None:
        """Let torch average as it did before."""
        for unit in self._units:
            unit.set_hook(None)
            unit.give_back()

    def _take(self, unit: Unit, flat: Tensor) -> None:
        """FSDP's hook: what is in `flat` when it returns, or when backward ends, is the gradient."""
        # 1. whether this backward is averaged at all
        self._check_finalization(unit)
        if flat.is_cuda:  # FSDP may free it while this stream still reads it
            flat.record_stream(torch.cuda.current_stream(flat.device))
        if unit.missing_factor != 1:
            flat.mul_(unit.missing_factor)
        if self._sync is None:
            return
        params = [p for p in unit.params if p.requires_grad]
        names = [self._live.name_of.get(id(p), "") for p in params]
        if not unit.may_sync:
            self._kept_local.update(names)
            return
        if self._backward != backward_id():
            if self._backward != -1:  # one that failed: its gradients are lost
                self._drop_pending()
            self._received = self._averager.weigh_in_backward(None, self._headers)
            self._backward = backward_id()
            at_end_of_backward(self._finish)
        # 2. this worker's shards by name: views of the flat buffer
        pieces = unit.cut(flat, [self._live.params[name].shape for name in names if name])
        if pieces is None:
            self._average_whole(unit, names, flat)
            return
        self._add_kept_local(params, names, pieces)
        tensors = dict(zip(names, pieces, strict=True))
        # 3. exchange: waited for at the end of backward where FSDP makes the buffer the gradient, else here
        in_place = unit.becomes_gradient(flat)
        if not in_place:
            self._wait_for(tensors, flat)
            return
        future = self._submit(self._averager.average(tensors), flat)
        self._pending.append(_Pending(params, pieces, [p.grad for p in params], future))
        for p in params:
            p.grad = None  # so that FSDP makes the buffer the gradient, and does not add it to an older one

    @staticmethod
    def _check_finalization(unit: Unit) -> None:
        if unit.user_ends_backward:
            raise RuntimeError(MANUAL.format("set_manual_backward_finalization(True) is set", "Call it with False."))

    def _wait_for(self, tensors: dict[str, Tensor], flat: Tensor, codec: Codec | None = None) -> None:
        """Average before backward goes on, and so before it is known whether the other gradients are finite."""
        agree, gradient = self._averager.check.agree, self._live.state["gradient"]
        if agree is not None and self._before is None:
            self._before = same_tensors(gradient)
        state = gradient if codec is None else {}
        future = self._submit(self._averager.average(tensors, codec, state, reuse=agree is None), flat)
        self._queue.flush(agree=agree if self._pending else None)  # exchanges that run in place end here, too
        future.wait()

    def _submit(self, exchange: Exchange[Averaged], flat: Tensor) -> Future[Tensor]:
        if flat.is_cuda and self._queue.device.type == "cpu":
            torch.cuda.current_stream(flat.device).synchronize()  # the queue's thread works on another stream
        return self._queue.submit(exchange, Payload.GRADIENT, flat)

    @torch.no_grad()
    def _finish(self) -> None:
        """At the end of backward: wait for all gradients, and add them to those of earlier backwards."""
        pending, self._pending = self._pending, []
        state, self._before, self._backward = self._before, None, -1
        # 1. whether all are finite, on all workers that hold the shards of this replica
        check = self._averager.check
        concluding = None if check.agree is None else self._queue.start(check.conclude(), Payload.GRADIENT)
        self._queue.flush(agree=check.agree)
        for each in pending:
            each.future.wait()
        if concluding is not None and not concluding.wait() and state is not None:
            self._live.state["gradient"] = state
        # 2. the buffers are the gradients now
        for each in reversed(pending):  # a unit may come twice: its gradient is now that of the later one
            for p, piece, before in zip(each.params, each.pieces, each.before, strict=True):
                assert p.grad is not None
                write({"": local_of(p.grad)}, {"": piece})
                if before is not None:
                    local_of(before).add_(piece)
                    p.grad = before

    def _drop_pending(self) -> None:
        """Let the exchanges of a backward that failed keep nothing."""
        pending, self._pending = self._pending, []
        state, self._before = self._before, None
        self._queue.flush(void=True)
        for each in pending:
            each.future.wait()
        if state is not None:
            self._live.state["gradient"] = state
        self._averager.check.forget()

    def _add_kept_local(self, params: Sequence[nn.Parameter], names: Sequence[str], pieces: Sequence[Tensor]) -> None:
        """Add what earlier backwards of this step have reduced inside a replica only."""
        for p, name, piece in zip(params, names, pieces, strict=True):
            if name in self._kept_local and p.grad is not None:
                piece.add_(local_of(p.grad).to(piece.device))
                p.grad = None
        self._kept_local.difference_update(names)

    def _average_whole(self, unit: Unit, names: Sequence[str], flat: Tensor) -> None:
        """Average a buffer from which a parameter is missing, whole and exactly: its layout is unknown."""
        if self._kept_local.intersection(names):
            raise RuntimeError(
                f"some of {', '.join(names)} got no gradient in this backward, and an earlier one was kept back by "
                "set_requires_all_reduce(False): the two do not fit together. Use set_requires_gradient_sync(False)."
            )
        if id(unit) not in self._warned:
            self._warned.add(id(unit))
            logger.warning(
                "some of %s got no gradient, and FSDP does not tell which: the others of their group are sent exactly, "
                "whatever the codec. Freeze unused parameters, or call set_reduce_scatter_unused_params(True).",
                ", ".join(names),
            )
        self._wait_for({f"unit:{names[0]}": flat}, flat, Exact())


def check_sharded_plan(units: Sequence[Unit], plan: Plan) -> None:
    """Refuse plans that have no meaning between shards."""
    if units and plan.topology.inner is not None:
        raise ValueError(
            f"{plan!r}: a sharded model has its inner groups in its mesh. Let FSDP average there, with a 2-D mesh "
            "inside each site, leave the plan's group out, and attach with the group between the sites."
        )


def check_sharded(model: nn.Module, units: Sequence[Unit], plan: Plan, group: dist.ProcessGroup | None) -> None:
    """Refuse a group whose workers hold different shards of the model: these cannot be averaged."""
    check_sharded_plan(units, plan)
    sharding = sys.modules.get("torch.distributed.tensor")
    if sharding is None or group is None:
        return
    whole = [name for name, p in model.named_parameters() if p.requires_grad and not isinstance(p, sharding.DTensor)]
    if units and whole:
        raise ValueError(
            f"attach: {whole[0]} is trained and not sharded, so its gradient is not averaged inside a replica. Call "
            "fully_shard(model) on the whole model last, or freeze it."
        )
    sharded = {name: p for name, p in model.named_parameters() if isinstance(p, sharding.DTensor)}
    if not sharded or (units and all(_same_workers(unit.replicas, group) for unit in units)):
        return
    me, ranks = dist.get_rank(), set(dist.get_process_group_ranks(group))
    for name, p in sharded.items():
        others = sorted(ranks & set(p.device_mesh.mesh.flatten().tolist()) - {me})
        if others:
            raise ValueError(
                f"attach: {name} is sharded over workers {p.device_mesh.mesh.flatten().tolist()}, and the group that "
                f"averages it contains worker {others[0]}, which holds another part of it. Only workers that hold "
                'the same shard can average it: give group=mesh["replicate"].get_group(), on a mesh of two dimensions '
                'such as init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard")).'
            )


def shards_of(model: nn.Module) -> dist.ProcessGroup | None:
    """Find the group of the workers that hold the shards of one replica, this one included; None if it is whole."""
    sharding = sys.modules.get("torch.distributed.tensor")
    found: dict[tuple[int, ...], tuple[DeviceMesh, list[int]]] = {}
    for p in model.parameters():
        if sharding is not None and isinstance(p, sharding.DTensor) and p.requires_grad:
            mesh, here = p.device_mesh, p.device_mesh.get_coordinate()
            dims = [dim for dim, placement in enumerate(p.placements) if not placement.is_replicate()]
            ranks = mesh.mesh[tuple(slice(None) if dim in dims else here[dim] for dim in range(mesh.ndim))]
            if ranks.numel() > 1:
                found.setdefault(tuple(sorted(ranks.flatten().tolist())), (mesh, dims))
    if not found:
        return None
    largest = max(found, key=len)
    outside = [ranks for ranks in found if not set(ranks) <= set(largest)]
    if outside:
        raise ValueError(
            f"attach: some parameters are sharded over workers {list(largest)}, and others over workers "
            f"{list(outside[0])}. The workers of one replica skip a step and stop together, so one of its groups must "
            "contain the others. Shard all parameters inside one mesh, or attach a session to each part of the model."
        )
    mesh, dims = found[largest]
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    of_dims = mesh.mesh_dim_names or ()
    return flat_group(mesh if len(dims) == mesh.ndim else mesh[tuple(of_dims[dim] for dim in dims)])


def replicas_of(units: Sequence[Unit]) -> dist.ProcessGroup | None:
    """Find the group that torch averages over between replicas, if the model is on a 2-D mesh."""
    found = [unit.replicas for unit in units]
    return found[0] if found and all(_same_workers(each, found[0]) for each in found) else None


def _same_workers(one: dist.ProcessGroup | None, other: dist.ProcessGroup | None) -> bool:
    if one is None or other is None:
        return False
    return set(dist.get_process_group_ranks(one)) == set(dist.get_process_group_ranks(other))


def _shard_facts(originals: Mapping[str, Tensor]) -> dict[str, str]:
    """State for each parameter which part of it this worker holds."""
    sharding, facts = sys.modules["torch.distributed.tensor"], dict[str, str]()
    for index, (name, p) in enumerate(originals.items()):
        assert isinstance(p, sharding.DTensor)
        here, sizes = p.device_mesh.get_coordinate(), p.device_mesh.shape
        dims = [dim for dim, placement in enumerate(p.placements) if not placement.is_replicate()]
        fact = f"{name} {list(p.shape)} {str(p.dtype).removeprefix('torch.')}"
        facts[f"parameter {index}"] = ", ".join([fact, *(f"part {here[dim]} of {sizes[dim]}" for dim in dims)])
    return facts
