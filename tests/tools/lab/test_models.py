"""The models: shapes, the same weights for the same seed, no buffers."""

import math
from functools import partial

import pytest
import torch

from laconic.tools.lab.models import GPT, ResNet, rotary_angles, rotate


@pytest.fixture
def gpt() -> GPT:
    return GPT(layers=2, width=32, heads=2, seed=0)


@pytest.fixture
def resnet() -> ResNet:
    return ResNet(layers=2, width=8, seed=0)


def test_gpt_shapes(gpt):
    assert gpt(torch.zeros(3, 16, dtype=torch.long)).shape == (3, 16, 256)
    assert gpt(torch.zeros(1, 1, dtype=torch.long)).shape == (1, 1, 256)


def test_resnet_shapes(resnet):
    assert resnet(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_gpt_cannot_see_the_future(gpt):
    ids = torch.arange(16)[None]
    changed = ids.clone()
    changed[0, 10:] = 99
    assert torch.allclose(gpt(ids)[:, :10], gpt(changed)[:, :10], atol=1e-6)
    assert not torch.allclose(gpt(ids)[:, 10:], gpt(changed)[:, 10:], atol=1e-3)


def test_gpt_starts_close_to_a_uniform_guess(gpt):
    ids = torch.randint(256, (8, 16), generator=torch.Generator().manual_seed(0))
    loss = torch.nn.functional.cross_entropy(gpt(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.5)


@pytest.mark.parametrize("build", [partial(GPT, 2, 32, 2), partial(ResNet, 2, 8)], ids=["gpt", "resnet"])
def test_the_seed_determines_every_weight(build):
    torch.manual_seed(123)  # the global generator has no effect
    one = build(seed=5).state_dict()
    two = build(seed=5).state_dict()
    other = build(seed=6).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("model", ["gpt", "resnet"])
def test_all_that_is_learned_is_in_matrices(model, request):
    module = request.getfixturevalue(model)
    assert all(p.ndim >= 2 for p in module.parameters())
    assert not list(module.buffers())


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    cos, sin = rotary_angles(time=8, head_width=4, device=torch.device("cpu"))
    q, k = torch.randn(4), torch.randn(4)
    turned_q = rotate(q.expand(1, 1, 8, 4), cos, sin)[0, 0]
    turned_k = rotate(k.expand(1, 1, 8, 4), cos, sin)[0, 0]
    assert torch.allclose(turned_q.norm(dim=-1), q.norm().expand(8), atol=1e-5)
    assert (turned_q[3] @ turned_k[1]).item() == pytest.approx((turned_q[7] @ turned_k[5]).item(), abs=1e-5)
