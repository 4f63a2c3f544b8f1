"""FSDP2: which parameters are reduced in one buffer, in what layout, and over which workers.

Private in torch: the parameters of a group and their order, and the group over which a model on a 2-D mesh is
all-reduced. All of it is checked when a model is attached: a torch that has changed is refused there with the name of
what has changed, instead of giving a wrong gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.torch_private import TRIED

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class Unit:
    """One parameter group of FSDP: its gradients are reduced together, in one flat buffer."""

    def __init__(self, module: FSDPModule, private: Any) -> None:
        self.module = module
        self._group = private
        self._native: tuple[Any, Any] | None = None

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters, sharded, in the order in which their gradients lie in the buffer."""
        return [each.sharded_param for each in self._group.fsdp_params]

    def cut(self, flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor] | None:
        """View the flat buffer as the gradients of the trained parameters, of these shapes.

        Each begins where the one before it ends, padded to the size of the largest shard. None if some parameter got
        no gradient: the buffer then leaves it out, and nothing tells which.
        """
        sizes = [each.padded_sharded_param_size.numel() for each in self._group.fsdp_params if _trained(each)]
        if sum(sizes) != flat.numel() or len(sizes) != len(shapes):
            return None
        return [part[: shape.numel()].view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]

    def becomes_gradient(self, flat: Tensor) -> bool:
        """Return whether FSDP makes the buffer itself the gradient, so that it may be written until backward ends.

        Otherwise it divides it, casts it, moves it to the CPU, or passes it to a hook of the user's.
        """
        divides = flat.dtype not in (torch.float32, torch.bfloat16) or self._group.force_sum_reduction_for_comms
        if divides or flat.device.type != "cpu":
            return False
        return all(p.dtype == flat.dtype and not p._post_accumulate_grad_hooks for p in self.params if p.requires_grad)

    @property
    def may_sync(self) -> bool:
        """Whether this backward is averaged: not if the user called `set_requires_all_reduce(False)`."""
        return bool(self._group.all_reduce_grads)

    @property
    def user_ends_backward(self) -> bool:
        """Whether gradients are reduced only in `finalize_backward()`, which the user calls: new in torch 2.15."""
        shared = getattr(self.module._get_fsdp_state(), "_state_ctx", None)
        return bool(getattr(shared, "manual_backward_finalization", False))

    @property
    def missing_factor(self) -> int:
        """The factor for a mean: with a divide factor of the user's, native HSDP sums over replicas."""
        if self._native is None or self._group.gradient_divide_factor is None:
            return 1
        return int(self._native[0].replicate_mesh_size)

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The group that torch itself averages this unit's gradients over, on a 2-D mesh."""
        found: dist.ProcessGroup | None = getattr(self._group.mesh_info, "replicate_process_group", None)
        return found

    def set_hook(self, hook: Any) -> None:
        """Let FSDP call `hook` with every reduced buffer; None removes it."""
        self.module.set_all_reduce_hook(hook)

    def take_over(self) -> None:
        """Let torch reduce inside the shards only: the hook averages between replicas."""
        way_out = 'Shard on the 1-D mesh["shard"] and attach with group=mesh["replicate"].get_group().'
        try:
            before = self._shard_groups()
            self._use_shard_mesh()
            if self._group._is_hsdp or self._shard_groups() != before:
                raise AttributeError("a parameter group does not follow its mesh")
        except (ImportError, AttributeError, TypeError) as error:
            self.give_back()
            raise _unknown_torch(str(error), way_out) from error

    def _shard_groups(self) -> tuple[Any, ...]:
        """Return what must not change: over which workers weights are gathered and gradients reduced."""
        group = self._group
        return group._all_gather_process_group, group._reduce_scatter_process_group, group._use_post_forward_mesh

    def _use_shard_mesh(self) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

        group, native = self._group, self._group.mesh_info
        shards = FSDPMeshInfo(native.mesh, shard_mesh_dim=native.shard_mesh_dim)
        for name in ("reduce_scatter_process_group", "dp_mesh_dims", "spmd_mesh", "is_spmd_mesh"):  # since torch 2.12
            if hasattr(native, name):
                setattr(shards, name, getattr(native, name))
        self._native = (native, shards)
        group.mesh_info = shards
        if group.post_forward_mesh_info is native:
            group.post_forward_mesh_info = shards

    def give_back(self) -> None:
        """Let torch average between replicas again."""
        if self._native is None:
            return
        native, shards = self._native
        self._native = None
        self._group.mesh_info = native
        if self._group.post_forward_mesh_info is shards:
            self._group.post_forward_mesh_info = native
        if hasattr(shards, "reduce_scatter_process_group"):
            native.reduce_scatter_process_group = shards.reduce_scatter_process_group


def find_units(model: nn.Module) -> list[Unit]:
    """Find the parameter groups of an FSDP2 model, in the order of its modules; none for any other model.

    All parameters are sharded afterwards: after a forward without a backward, the last ones may still be unsharded.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import; loaded wherever such a model exists
    if fsdp is None or not isinstance(model, nn.Module):
        return []
    units: dict[int, Unit] = {}
    for module in model.modules():
        if isinstance(module, fsdp.FullyShardedDataParallel):
            raise TypeError(
                "attach(plan, FullyShardedDataParallel(...)): its flat parameters cannot be averaged one by one. "
                "Shard the model with torch.distributed.fsdp.fully_shard instead."
            )
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()
            for private in _groups_of(module):
                units.setdefault(id(private), Unit(module, private))
    return list(units.values())


def _groups_of(module: FSDPModule) -> Iterator[Any]:
    """Find a module's own parameter groups, and check that they are as this file expects."""
    try:
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # a list since torch 2.12
        if groups is None:
            groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
        for group in groups:
            _check(group)
    except AttributeError as error:
        raise _unknown_torch(str(error)) from error
    if len(groups) > 1:
        raise ValueError(
            f"attach: {type(module).__name__} is sharded over several meshes at once (shard_placement_fn), and its "
            "gradients are in several buffers. Use one mesh for all parameters of a module."
        )
    if groups and not hasattr(groups[0].mesh_info, "shard_process_group"):
        raise ValueError(
            f"attach: {type(module).__name__} is replicated, not sharded, and torch averages its gradients itself. "
            "Attach to the bare module, or wrap it in DistributedDataParallel."
        )
    yield from groups


def _check(group: Any) -> None:
    for name in ("all_reduce_grads", "gradient_divide_factor", "force_sum_reduction_for_comms", "mesh_info"):
        getattr(group, name)
    for each in group.fsdp_params:
        if each.padded_sharded_param_size.numel() < each.sharded_param.to_local().numel():
            raise _unknown_torch("a shard is larger than its padded size")
    if group._all_reduce_hook is not None:
        raise RuntimeError(
            "attach: this FSDP model already has an all-reduce hook, and FSDP takes only one. Detach the other session "
            "first, or leave out set_all_reduce_hook; the plan defines how gradients are sent."
        )


def _trained(private: Any) -> bool:
    return bool(private.sharded_param.requires_grad)


def _unknown_torch(why: str, way_out: str = "") -> RuntimeError:
    way_out = way_out or f"Use torch {TRIED[0]} to {TRIED[-1]}, with which it is tested."
    return RuntimeError(f"attach: FSDP of torch {torch.__version__} is not as laconic expects ({why}). {way_out}")
