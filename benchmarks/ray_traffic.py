"""What Ray itself sends between two nodes while the workers of a Ray Train run are silent: bytes a second at eth0.

    sudo -E env PATH="$PATH" python benchmarks/ray_traffic.py        # needs laconic-train[ray], root and iproute2

Each node runs in a network namespace of its own. Each worker counts what its interface sends, first without a training,
then during steps in which the plan sends nothing, then during steps that report metrics to Ray, then under ddp().
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import laconic
from tests.namespaces import hosts

SECONDS = 15.0
MODEL_NUMBERS = 512 * 512


def sent() -> int:
    """Bytes that eth0 of this process's namespace has sent."""
    [line] = [line for line in Path("/proc/self/net/dev").read_text().splitlines() if "eth0:" in line]
    return int(line.split(":")[1].split()[8])


def work(config: dict[str, str]) -> None:
    import ray.train
    import ray.train.torch
    import torch

    model = ray.train.torch.prepare_model(torch.nn.Linear(512, 512, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = {}

    def measure(name: str, plan: str | None, report: bool = False, steps: int = 0) -> None:
        session = None if plan is None else laconic.attach(laconic.plan(plan), model, optimizer, sync_initial=True)
        torch.distributed.barrier()
        start, before, wire, count = time.monotonic(), sent(), session.ledger.wire_bytes if session else 0, 0
        while count < steps if steps else time.monotonic() - start < SECONDS:
            if session is None:
                time.sleep(0.1)
                continue
            model(torch.randn(8, 512)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.02)
            count += 1
            if report:
                ray.train.report({"step": count})
        took, bytes_sent = time.monotonic() - start, sent() - before
        ledger = session.ledger.wire_bytes - wire if session else 0
        results[name] = {"steps": count, "seconds": took, "interface": bytes_sent, "ledger": ledger}
        if session is not None:
            session.detach()

    measure("no steps", None)
    measure("silent steps", "alone()")
    measure("silent steps, each reported", "alone()", report=True, steps=50)
    measure("ddp()", "ddp()", steps=100)
    rank = ray.train.get_context().get_world_rank()
    Path(config["results"], f"{rank}.json").write_text(json.dumps(results))


def drive(results: str) -> None:
    import ray
    import ray.train.torch

    ray.init(log_to_driver=False)
    ray.train.torch.TorchTrainer(
        work,
        train_loop_config={"results": results},
        scaling_config=ray.train.ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
        run_config=ray.train.RunConfig(name="traffic", storage_path=results),
    ).fit()


def main() -> None:
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = str(Path(__file__).parents[1])
    with hosts(2) as made, tempfile.TemporaryDirectory() as results, tempfile.TemporaryDirectory() as folder:
        head = f"{made[0][1]}:6379"
        options = "--num-cpus 1 --object-store-memory 104857600 --block --disable-usage-stats"
        places = (f"--head --port 6379 --include-dashboard false --temp-dir {folder}", f"--address {head}")
        nodes = []
        try:
            for (host, address), place in zip(made, places, strict=True):
                ray = f"ip netns exec {host} ray start {place} --node-ip-address {address} {options}"
                null = subprocess.DEVNULL
                nodes.append(subprocess.Popen(ray.split(), env={**os.environ, **variables}, stdout=null))
                time.sleep(8)
            driver = ["ip", "netns", "exec", made[0][0], sys.executable, __file__, "drive", results]
            environ = {**os.environ, **variables, "RAY_ADDRESS": head}
            subprocess.run(driver, env=environ, check=True, timeout=300)
        finally:
            for node in reversed(nodes):
                node.send_signal(signal.SIGTERM)
                node.wait(60)  # Ray drains a node for up to 30 s
        for rank in range(2):
            for name, found in json.loads(Path(results, f"{rank}.json").read_text()).items():
                rate = found["interface"] / found["seconds"]
                a_step = f", {found['interface'] / found['steps']:,.0f} a step" if found["steps"] else ""
                ledger = f"ledger {found['ledger']:,}"
                print(f"worker {rank}, {name}: {found['interface']:,} bytes ({rate:,.0f} a second{a_step}), {ledger}")


if __name__ == "__main__":
    drive(sys.argv[2]) if sys.argv[1:2] == ["drive"] else main()
