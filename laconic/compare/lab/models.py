"""Two small models: a byte-level GPT and a ResNet for 8×8 digits.

They are small enough for a laptop and shaped like the real ones: all that they learn sits in matrices,
which is what a low-rank codec wants. Neither has biases, trained norms or buffers, so the weights
are the whole state, and any plan can be compared on them without special cases.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BYTES = 256  # the vocabulary of the GPT
DIGITS = 10  # the classes of the ResNet


@dataclass(frozen=True)
class GPTShape:
    """The sizes of a GPT.

    >>> model = GPTShape(layers=2, width=64, heads=2, context=32).build(seed=0)
    >>> model(torch.zeros(1, 5, dtype=torch.long)).shape
    torch.Size([1, 5, 256])
    """

    layers: int
    width: int
    heads: int
    context: int

    def build(self, seed: int) -> "GPT":
        """A fresh model, the same for the same seed."""
        model = GPT(self)
        draw_weights(model, seed)
        return model


@dataclass(frozen=True)
class ResNetShape:
    """The sizes of a ResNet: residual blocks, and channels in each.

    >>> ResNetShape(layers=2, width=8).build(seed=0)(torch.zeros(3, 1, 8, 8)).shape
    torch.Size([3, 10])
    """

    layers: int
    width: int

    def build(self, seed: int) -> "ResNet":
        """A fresh model, the same for the same seed."""
        model = ResNet(self)
        draw_weights(model, seed)
        return model


class GPT(nn.Module):
    """A transformer over bytes: rotary positions, RMS norms without gain, squared ReLU, tied head."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(BYTES, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))

    def forward(self, ids: Tensor) -> Tensor:
        """Bytes [batch, time] to scores of the next byte [batch, time, 256]."""
        cos, sin = rotary_angles(ids.shape[1], self.shape.width // self.shape.heads)
        x = norm(self.embed(ids))  # [batch, time, width]
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.linear(norm(x), self.embed.weight)  # the embedding is the head, transposed


class Block(nn.Module):
    """Attention, then two matrices, each added to what came in."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.merge = nn.Linear(shape.width, shape.width, bias=False)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, time, width] to the same shape."""
        x = x + self.merge(self._attend(norm(x), cos, sin))
        out: Tensor = x + self.down(F.relu(self.up(norm(x))).square())
        return out

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, width = x.shape
        split = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)  # each [batch, heads, time, width / heads]
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return out.transpose(1, 2).reshape(batch, time, width)


class ResNet(nn.Module):
    """Pre-activation residual blocks of two 3×3 convolutions at one resolution, then a linear head."""

    def __init__(self, shape: ResNetShape) -> None:
        super().__init__()
        self.shape = shape
        self.stem = nn.Conv2d(1, shape.width, kernel_size=3, padding=1, bias=False)
        self.blocks = nn.ModuleList(ConvBlock(shape.width) for _ in range(shape.layers))
        self.head = nn.Linear(shape.width, DIGITS, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Images [batch, 1, 8, 8] to scores [batch, 10]."""
        x = self.stem(images)  # [batch, width, 8, 8]
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(image_norm(x).mean(dim=(2, 3)))
        return scores


class ConvBlock(nn.Module):
    """Two convolutions, added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width, 8, 8] to the same shape."""
        inner = self.first(F.relu(image_norm(x)))
        out: Tensor = x + self.second(F.relu(image_norm(inner)))
        return out


def norm(x: Tensor) -> Tensor:
    """RMS norm over the last dimension, without gain."""
    return F.rms_norm(x, (x.shape[-1],))


def image_norm(x: Tensor) -> Tensor:
    """Layer norm over channels and pixels [batch, channels, 8, 8]: no gain, no running averages."""
    return F.group_norm(x, 1)


def rotary_angles(time: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [time, head_width / 2] of rotary positions (Su et al. 2021, arXiv:2104.09864)."""
    frequency = 10_000.0 ** (-torch.arange(0, head_width, 2) / head_width)
    angle = torch.outer(torch.arange(time), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair of numbers of [batch, heads, time, head_width] by its position's angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def draw_weights(model: nn.Module, seed: int) -> None:
    """Draws every weight anew, from its own generator: the same seed gives the same model on every worker.

    The embedding starts small, so the first guess is close to uniform; a matrix that writes into the residual
    stream starts smaller still.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        fan_in = weight[0].numel()
        std = 0.02 if name == "embed.weight" else fan_in**-0.5
        if name.endswith(("merge.weight", "down.weight", "second.weight")):
            std /= 4
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)
