"""One thread a process: the tests' matrices are small, and workers share the cores."""

import importlib.util

import torch

torch.set_num_threads(1)

collect_ignore_glob = []
if importlib.util.find_spec("triton") is None:  # only these files need it
    collect_ignore_glob += ["laconic/kernels/cuda/*.py"]
if importlib.util.find_spec("libcst") is None:
    collect_ignore_glob += ["laconic/migrate.py"]
packages = {"prometheus": "prometheus_client"}
for name in (
    "torchft",
    "lightning",
    "accelerate",
    "transformers",
    "ray",
    "tensorboard",
    "wandb",
    "mlflow",
    "prometheus",
):
    if importlib.util.find_spec(packages.get(name, name)) is None:  # integrations with packages that are not installed
        collect_ignore_glob += [f"laconic/integrations/{name}.py"]
if importlib.util.find_spec("opentelemetry") is None:
    collect_ignore_glob += ["laconic/integrations/opentelemetry.py"]
