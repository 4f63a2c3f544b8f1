"""Two small models: a byte-level GPT and a ResNet for 8×8 digits.

All their parameters are matrices, as almost all parameters of large models are. They have no biases, trained norms or
buffers, so all plans can be compared on them. The same seed gives the same weights on every worker.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BYTES = 256  # vocabulary of the GPT
DIGITS = 10  # classes of the ResNet


class GPT(nn.Module):
    """A transformer over bytes: rotary positions, RMS norms without gain, squared ReLU, tied embedding.

    >>> GPT(layers=2, width=64, heads=2, seed=0)(torch.zeros(1, 5, dtype=torch.long)).shape
    torch.Size([1, 5, 256])
    """

    def __init__(self, layers: int, width: int, heads: int, seed: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.embed = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        draw_weights(self, seed)

    def forward(self, ids: Tensor) -> Tensor:
        """Bytes [batch, time] to logits of the next byte [batch, time, 256]."""
        cos, sin = rotary_angles(ids.shape[1], self.head_width, ids.device)
        x = norm(self.embed(ids))  # [batch, time, width]
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.linear(norm(x), self.embed.weight)


class Block(nn.Module):
    """Attention and an MLP, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.merge = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

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
    """Pre-activation residual blocks of two 3×3 convolutions at one resolution, then a linear head.

    >>> ResNet(layers=2, width=8, seed=0)(torch.zeros(3, 1, 8, 8)).shape
    torch.Size([3, 10])
    """

    def __init__(self, layers: int, width: int, seed: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, kernel_size=3, padding=1, bias=False)
        self.blocks = nn.ModuleList(ConvBlock(width) for _ in range(layers))
        self.head = nn.Linear(width, DIGITS, bias=False)
        draw_weights(self, seed)

    def forward(self, images: Tensor) -> Tensor:
        """Images [batch, 1, 8, 8] to logits [batch, 10]."""
        x = self.stem(images)  # [batch, width, 8, 8]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(image_norm(x).mean(dim=(2, 3)))
        return logits


class ConvBlock(nn.Module):
    """Two convolutions with a residual connection."""

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


def rotary_angles(time: int, head_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [time, head_width / 2] of rotary positions (Su et al. 2021, arXiv:2104.09864)."""
    frequency = 10_000.0 ** (-torch.arange(0, head_width, 2, device=device) / head_width)
    angle = torch.outer(torch.arange(time, device=device), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of numbers of [batch, heads, time, head_width] by the angle of its position."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def draw_weights(model: nn.Module, seed: int) -> None:
    """Initialise every weight, without the global generator.

    A small embedding makes the first prediction almost uniform. Matrices that write into the residual stream start
    smaller by a factor of 4.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        fan_in = weight[0].numel()
        std = 0.02 if name == "embed.weight" else fan_in**-0.5
        if name.endswith(("merge.weight", "down.weight", "second.weight")):
            std /= 4
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)
