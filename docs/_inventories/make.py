"""Make the inventories that let the site link to Python's and torch's documentation without a network.

    python docs/_inventories/make.py /usr/share/doc/python3.11/html/objects.inv

The argument is Python's own inventory, as Debian's package python3.11-doc has it: the names below are taken from it.
torch ships none, so its names are listed here with the page of torch's documentation that has them.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

HERE = Path(__file__).parent
PYTHON = [
    *("collections.abc.Callable", "collections.abc.Generator", "collections.abc.Iterable", "collections.abc.Iterator"),
    *("collections.abc.Mapping", "collections.abc.Sequence", "collections.OrderedDict", "os.PathLike", "pathlib.Path"),
    *("signal.Signals", "enum.Enum", "contextlib.AbstractContextManager", "typing.Any", "typing.Literal"),
    *("bool", "int", "float", "str", "bytes", "dict", "list", "tuple", "set", "object", "repr"),
    *("BaseException", "Exception", "RuntimeError", "ValueError", "TypeError"),
]

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
TORCH = {
    "torch.Tensor": "tensors.html#$",
    "torch.Size": "size.html#$",
    "torch.dtype": "tensor_attributes.html#$",
    "torch.save": "generated/$.html#$",
    "torch.load": "generated/$.html#$",
    "torch.nn.Module": "generated/$.html#$",
    "torch.nn.modules.module.Module": "generated/torch.nn.Module.html",
    "torch.nn.parameter.Parameter": "generated/$.html#$",
    "torch.nn.parallel.DistributedDataParallel": "generated/$.html#$",
    "torch.nn.parallel.distributed.DistributedDataParallel": "generated/torch.nn.parallel.DistributedDataParallel.html",
    "torch.optim.Optimizer": "optim.html#$",
    "torch.optim.optimizer.Optimizer": "optim.html#torch.optim.Optimizer",
    "torch.futures.Future": "futures.html#$",
    "torch.jit.Future": "futures.html#torch.futures.Future",
    "torch.distributed.distributed_c10d.ProcessGroup": "distributed.html",
    "torch.distributed.distributed_c10d.Store": "distributed.html",
    "torch.distributed.device_mesh.DeviceMesh": "distributed.html",
    "torch._C._distributed_c10d.TCPStore": "distributed.html",
    "torch.amp.grad_scaler.GradScaler": "amp.html",
    "torch.distributed.GradBucket": "ddp_comm_hooks.html#$",
    "torch._C._distributed_c10d.GradBucket": "ddp_comm_hooks.html#torch.distributed.GradBucket",
    "torch.distributed.optim.PostLocalSGDOptimizer": "distributed.optim.html#$",
    **{
        f"{_HOOKS}.{name}": "ddp_comm_hooks.html#$"
        for name in (
            "default_hooks.allreduce_hook",
            "default_hooks.fp16_compress_hook",
            "default_hooks.bf16_compress_hook",
            "default_hooks.fp16_compress_wrapper",
            "default_hooks.bf16_compress_wrapper",
            "powerSGD_hook.PowerSGDState",
            "powerSGD_hook.powerSGD_hook",
            "powerSGD_hook.batched_powerSGD_hook",
            "debugging_hooks.noop_hook",
        )
    },
}


def write(path: Path, project: str, version: str, lines: list[str]) -> None:
    """Write an inventory in Sphinx's format 2."""
    head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: {version}\n"
    head += "# The remainder of this file is compressed using zlib.\n"
    path.write_bytes(head.encode() + zlib.compress("\n".join([*sorted(lines), ""]).encode(), 9))


def read(path: Path) -> tuple[str, list[str]]:
    """Return the version and the lines of an inventory."""
    *head, body = path.read_bytes().split(b"\n", 4)
    return head[2].decode().removeprefix("# Version: "), zlib.decompress(body).decode().splitlines()


def main() -> None:
    """Write both files."""
    version, lines = read(Path(sys.argv[1]))
    wanted = [line for line in lines if line.split(" ")[0] in PYTHON and " py:" in line]
    missing = set(PYTHON) - {line.split(" ")[0] for line in wanted}
    if missing:
        raise SystemExit(f"{sys.argv[1]}: it has no {', '.join(sorted(missing))}.")
    write(HERE / "python.inv", "Python", version, wanted)
    functions = ("save", "load", "hook", "wrapper")
    roles = {name: "py:function" if name.endswith(functions) else "py:class" for name in TORCH}
    write(HERE / "torch.inv", "PyTorch", "stable", [f"{name} {roles[name]} 1 {uri} -" for name, uri in TORCH.items()])


if __name__ == "__main__":
    main()
