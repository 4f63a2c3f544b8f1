"""Scikit-learn's 1,797 handwritten digits of 8×8 pixels, for the ResNet.

They come with scikit-learn itself, so nothing is downloaded; laconic asks for that package only here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.compare.lab.text import generator
from laconic.compare.settings import LabError

VALIDATION_EVERY = 8  # every eighth digit validates


@dataclass(frozen=True)
class Digits:
    """Images [count, 1, 8, 8] from 0 to 1 and the digits that they show [count]."""

    images: Tensor
    labels: Tensor


def load() -> tuple[Digits, Digits]:
    """Digits to train on and digits to validate on."""
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
    """Deals every eighth digit into validation."""
    validates = torch.arange(len(labels)) % VALIDATION_EVERY == 0
    return Digits(images[~validates], labels[~validates]), Digits(images[validates], labels[validates])


def batch(source: Digits, size: int, seed: Sequence[int]) -> tuple[Tensor, Tensor]:
    """`size` random images and their labels; the same for the same (seed, worker, step)."""
    rows = torch.randint(len(source.labels), (size,), generator=generator(seed))
    return source.images[rows], source.labels[rows]
