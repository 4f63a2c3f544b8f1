"""The parameter shapes of well-known models."""

from __future__ import annotations

Shapes = list[tuple[int, ...]]


def resnet50() -> Shapes:
    """25.6 M parameters (He et al. 2015, arXiv:1512.03385)."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    width_in = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for shape in ((width, width_in, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                shapes += [shape, (shape[0],), (shape[0],)]
            if block == 0:
                shapes += [(4 * width, width_in, 1, 1), (4 * width,), (4 * width,)]
            width_in = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def bert_large() -> Shapes:
    """334 M parameters (Devlin et al. 2018, arXiv:1810.04805): 24 layers, width 1024, without the pooler."""
    width = 1024
    shapes: Shapes = [(30522, width), (512, width), (2, width), (width,), (width,)]
    for _ in range(24):
        shapes += [(width, width), (width,)] * 4 + [(width,), (width,)]
        shapes += [(4 * width, width), (4 * width,), (width, 4 * width), (width,), (width,), (width,)]
    return shapes


def gpt2_medium() -> Shapes:
    """355 M parameters (Radford et al. 2019): 24 layers, width 1024, tied head."""
    width = 1024
    shapes: Shapes = [(50257, width), (1024, width)]
    for _ in range(24):
        shapes += [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [*shapes, (width,), (width,)]


MODELS = {"ResNet-50": resnet50, "BERT-large": bert_large, "GPT-2 medium": gpt2_medium}
