"""train.py under Ray Train: workers that Ray places, checkpoints in Ray's storage, and a restart after a failure.

    LACONIC_PLAN="diloco(period=16)" python ray_train.py --workers 2 --storage /shared/ray

or, from outside the cluster,

    ray job submit --working-dir examples/cluster -- \
        env LACONIC_PLAN="diloco(period=16)" python ray_train.py --workers 2 --storage s3://bucket/ray
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import train

import laconic
from laconic import checkpoint


def load() -> dict[str, Any] | None:
    """Read this worker's own state from the checkpoint that Ray resumes from."""
    if (found := ray.train.get_checkpoint()) is None:
        return None
    with found.as_directory() as folder:
        return checkpoint.load(Path(folder, own_name()), worker=0, workers=1).state


def save(state: dict[str, Any], session: laconic.Session, loss: float) -> None:
    """Report this worker's own state. Ray merges the folders of all workers into one checkpoint."""
    metrics = {"step": session.step, "loss": loss, "sent_bytes": session.ledger.wire_bytes, "plan": repr(session.plan)}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(Path(folder, own_name()), state, step=session.step, worker=0, workers=1)
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def own_name() -> str:
    """A folder's name for each worker. With the number of workers in it, another number is never resumed by mistake."""
    context = ray.train.get_context()
    return f"worker-{context.get_world_rank()}-of-{context.get_world_size()}"


def work(options: dict[str, Any]) -> None:
    """Check the set-up together with all other workers, and train."""
    # Ray's worker 0 already serves the store at MASTER_ADDR and MASTER_PORT, as torchrun's agents do.
    served = {**os.environ, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    subprocess.run([sys.executable, "-m", "laconic", "doctor"], env=served, check=True)
    # Ray runs this function in a thread, where Python sets no signal handlers: Ray itself ends and restarts workers.
    train.train(**options, wrap=ray.train.torch.prepare_model, load=load, save=save, stop_on_sigterm=False)


def main() -> None:
    """Start the workers, and wait for them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--storage", required=True, help="a folder or an address that all machines reach")
    parser.add_argument("--name", default="laconic", help="a run of the same name goes on where it ended")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=50)
    options = parser.parse_args()

    passed_on = {name: value for name, value in os.environ.items() if name.startswith(("LACONIC_", "GLOO_", "NCCL_"))}
    ray.init(runtime_env={"env_vars": passed_on})
    trainer = ray.train.torch.TorchTrainer(
        work,
        train_loop_config={"steps": options.steps, "save_every": options.save_every},
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=ray.train.RunConfig(
            name=options.name,
            storage_path=options.storage,
            failure_config=ray.train.FailureConfig(max_failures=3),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=3),
        ),
    )
    end = trainer.fit().metrics or {}
    print(f"{end['plan']}: step {end['step']}, loss {end['loss']:.4f}, sent {end['sent_bytes']:,} bytes")


if __name__ == "__main__":
    main()
