"""The 1,797 handwritten digits of 8×8 pixels that come with scikit-learn, for the ResNet."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.compare.lab.text import generator
from laconic.compare.settings import LabError

VALIDATION_EVERY = 8  # every eighth digit is for validation


@dataclass(frozen=True)
class Digits:
    """Images [count, 1, 8, 8] with values from 0 to 1, and their labels [count]."""

    images: Tensor
    labels: Tensor


def load() -> tuple[Digits, Digits]:
    """Load the digits for training and those for validation."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise LabError(
            f"--model resnet: its digits come with scikit-learn, which cannot be imported ({error}). "
            'Install it with pip install "laconic[digits]", or use --model gpt.'
        ) from error
    found = load_digits()
    images = torch.from_numpy(found.images).float()[:, None] / 16
    return split(images, torch.from_numpy(found.target).long())


def split(images: Tensor, labels: Tensor) -> tuple[Digits, Digits]:
    """Split off every eighth digit for validation."""
    held_out = torch.arange(len(labels)) % VALIDATION_EVERY == 0
    return Digits(images[~held_out], labels[~held_out]), Digits(images[held_out], labels[held_out])


def batch(source: Digits, size: int, seed: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Random images and their labels; the same for the same `seed`, such as (seed, worker, step)."""
    rows = torch.randint(len(source.labels), (size,), generator=generator(seed))
    return source.images[rows], source.labels[rows]
