"""What torch was built with: gloo, NCCL, CUDA, Triton, and whether gloo could encrypt."""

from __future__ import annotations

import importlib.util
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from laconic.doctor.finding import Finding, ok, problem, warning

TRITON_CAPABILITY = (7, 0)
TLS_SYMBOL = b"gloo9transport3tcp3tls"  # the namespace of gloo's TLS transport, as the compiler writes it


@dataclass(frozen=True)
class Device:
    """A CUDA device."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class Built:
    """What torch on this machine can do."""

    gloo: bool
    nccl: bool
    devices: tuple[Device, ...]
    cuda_built: bool
    triton: bool


def built_here() -> Built:
    """Asks torch."""
    available = dist.is_available()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = tuple(Device(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in range(count))
    return Built(
        gloo=available and dist.is_gloo_available(),
        nccl=available and dist.is_nccl_available(),
        devices=devices,
        cuda_built=torch.version.cuda is not None,
        triton=importlib.util.find_spec("triton") is not None,
    )


def check_backends(built: Built, local_workers: int = 1) -> list[Finding]:
    """Whether workers can talk, and over what."""
    return [_gloo(built), _cuda(built, local_workers), _triton(built)]


def _gloo(built: Built) -> Finding:
    if not built.gloo:
        return problem("gloo", "this torch was built without gloo", "Install torch's own wheels: pip install torch.")
    return ok("gloo", f"gloo is there; NCCL is {'there' if built.nccl else 'not (it needs CUDA)'}")


def _cuda(built: Built, local_workers: int) -> Finding:
    if not built.devices:
        if built.cuda_built:
            return warning(
                "devices",
                "torch was built for CUDA and sees no device",
                "Check nvidia-smi, CUDA_VISIBLE_DEVICES and, in a container, --gpus all; or train on the CPU.",
            )
        return ok("devices", "no CUDA: models train on the CPU, over gloo")
    shown = ", ".join(f"{d.name} (sm_{d.capability[0]}{d.capability[1]})" for d in built.devices)
    if not built.nccl:
        return warning("devices", f"{shown}; no NCCL", "Without NCCL, gloo copies tensors through host memory.")
    if len(built.devices) < local_workers:
        return warning(
            "devices",
            f"{shown}: {len(built.devices)} for {local_workers} workers on this host",
            "NCCL wants a device for each worker. Start as many workers as devices.",
        )
    return ok("devices", shown)


def _triton(built: Built) -> Finding:
    if not built.devices:
        return ok("triton", f"{'there' if built.triton else 'absent'}, and not needed without CUDA")
    old = [d for d in built.devices if d.capability < TRITON_CAPABILITY]
    if not built.triton or old:
        why = "it is not installed" if not built.triton else f"{old[0].name} is below sm_70"
        return warning("triton", why, "laconic's fused kernels stay off, and the plain ones run: right, but slower.")
    return ok("triton", "there: fused kernels run on CUDA")


def torch_libraries() -> list[Path]:
    """Where gloo would be."""
    return sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))


def check_encryption(libraries: Sequence[Path], workers: int) -> Finding:
    """Whether gloo was built with TLS. It reads the library: gloo itself looks at its transport once a process."""
    if any(_holds(path, TLS_SYMBOL) for path in libraries):
        return ok(
            "encryption",
            "gloo was built with TLS",
            "It is off unless GLOO_DEVICE_TRANSPORT=TCP_TLS and its certificates are set on all workers.",
        )
    found = "gloo was built without TLS: gradients, weights and the store travel unencrypted, unauthenticated"
    way_out = "On any network that others share, join the hosts by a VPN such as WireGuard and use its interface."
    return warning("encryption", found, way_out) if workers > 1 else ok("encryption", found, way_out)


def _holds(path: Path, wanted: bytes) -> bool:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(wanted) >= 0
    except (OSError, ValueError):  # cannot be read, or is empty
        return False
