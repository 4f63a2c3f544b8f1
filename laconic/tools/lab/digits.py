"""The 1,797 handwritten digits of 8×8 pixels that come with scikit-learn, for the ResNet."""

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.tools.distribution import pip_install
from laconic.tools.errors import UsageError
from laconic.tools.lab.text import generator

VALIDATION_EVERY = 8

Digits = tuple[Tensor, Tensor]  # images [count, 1, 8, 8] with values from 0 to 1, and their labels [count]


def load() -> tuple[Digits, Digits]:
    """Load the digits for training, and every eighth for validation."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError(
            f"--model resnet: its digits come with scikit-learn, which cannot be imported ({error}). "
            f"Install it with {pip_install('digits')}, or use --model gpt."
        ) from error
    found = load_digits()
    images = torch.from_numpy(found.images).float()[:, None] / 16
    labels = torch.from_numpy(found.target).long()
    held_out = torch.arange(len(labels)) % VALIDATION_EVERY == 0
    return (images[~held_out], labels[~held_out]), (images[held_out], labels[held_out])


def batch(source: Digits, size: int, seed: Sequence[int]) -> Digits:
    """Random images and their labels; the same for the same `seed`, such as (seed, worker, step)."""
    images, labels = source
    rows = torch.randint(len(labels), (size,), generator=generator(seed))
    return images[rows], labels[rows]
