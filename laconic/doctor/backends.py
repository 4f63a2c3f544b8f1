"""The backends and CUDA devices that torch can use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from laconic.doctor.finding import Finding, ok, problem, warning


@dataclass(frozen=True)
class Backends:
    """What torch finds on this machine. `devices` are the names of the CUDA devices."""

    gloo: bool
    nccl: bool
    cuda_built: bool
    devices: tuple[str, ...]


def backends_here() -> Backends:
    """Ask torch."""
    available = dist.is_available()
    return Backends(
        gloo=available and dist.is_gloo_available(),
        nccl=available and dist.is_nccl_available(),
        cuda_built=torch.version.cuda is not None,
        devices=tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())),
    )


def check_backends(found: Backends, local_workers: int = 1) -> list[Finding]:
    """Check the backends, and the devices of the workers on this host."""
    return [_gloo(found), _devices(found, local_workers)]


def _gloo(found: Backends) -> Finding:
    if not found.gloo:
        why, way_out = "CPU tensors cannot be averaged without it.", "Install torch's own wheels: pip install torch."
        return problem("gloo", "this torch was built without gloo", why, way_out)
    return ok("gloo", f"gloo is available; NCCL is {'available' if found.nccl else 'not (it needs CUDA)'}")


def _devices(found: Backends, local_workers: int) -> Finding:
    shown = ", ".join(found.devices)
    if not found.devices:
        if not found.cuda_built:
            return ok("devices", "no CUDA: models train on the CPU, over gloo")
        way_out = "Check nvidia-smi, CUDA_VISIBLE_DEVICES and, in a container, --gpus all."
        return warning("devices", "torch was built for CUDA and finds no device", "Models train on the CPU.", way_out)
    if not found.nccl:
        why = "gloo copies CUDA tensors through host memory, which is slow."
        return warning("devices", f"{shown}; no NCCL", why, "Install torch's CUDA wheels.")
    if len(found.devices) < local_workers:
        shown = f"{shown}: {len(found.devices)} for {local_workers} workers on this host"
        why, way_out = "NCCL needs a device for each worker.", "Start as many workers as there are devices."
        return warning("devices", shown, why, way_out)
    return ok("devices", shown)
