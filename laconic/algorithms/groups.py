"""Subgroups of a process group, made by their members alone."""

import os

import torch
import torch.distributed as dist


def subgroup_of(group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    """Make the subgroup of `size` consecutive workers of `group` that this worker is in.

    Where `group` is the whole world, every worker makes every subgroup, as torch does. Otherwise only its members make
    a subgroup, so that other groups in the same world need not make theirs at the same time.
    """
    ranks = dist.get_process_group_ranks(group)
    if size < 1 or len(ranks) % size:
        raise ValueError(
            f"{len(ranks)} workers cannot be divided into groups of {size}. Choose a size that divides {len(ranks)}."
        )
    backend = dist.get_backend(group)
    whole = len(ranks) == dist.get_world_size()
    made = None
    for first in range(0, len(ranks), size):
        members = ranks[first : first + size]
        if dist.get_rank() in members:
            made = dist.new_group(members, backend=backend, use_local_synchronization=not whole)
        elif whole:
            dist.new_group(members, backend=backend)
    if not isinstance(made, dist.ProcessGroup):
        raise RuntimeError("torch.distributed.new_group() did not make this worker a member of its own group.")
    return made


def workers_on_this_machine(group: dist.ProcessGroup) -> int:
    """Tell how many workers share a machine: what the launcher says, else the GPUs here, else all of `group`."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    if said.isdigit() and int(said) > 0:
        return min(int(said), group.size())
    return min(torch.accelerator.device_count() or group.size(), group.size())
