"""Digits: the optional dependency, and the split."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import numpy
import pytest
import torch

from laconic.tools.errors import UsageError
from laconic.tools.lab.tasks import Lab, digits, loss_of, make_task, validation_loss


@pytest.fixture
def embedded_digits(monkeypatch):
    """A substitute for scikit-learn with the shapes and the range of its digits."""
    random = numpy.random.default_rng(0)
    target = random.integers(0, 10, 160)
    images = (random.random((160, 8, 8)) + target[:, None, None]) * 16 / 11
    found = SimpleNamespace(images=images, target=target)
    for name in ("sklearn", "sklearn.datasets"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)  # other packages look for it
        monkeypatch.setattr(module, "load_digits", lambda: found, raising=False)
        monkeypatch.setitem(sys.modules, name, module)


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UsageError, match=r'--model resnet: .* "laconic-train\[digits\]", or use --model gpt'):
        digits()


def test_split_and_ranges(embedded_digits):
    (images, labels), (validation_images, _) = digits()
    assert images.shape == (140, 1, 8, 8)
    assert validation_images.shape == (20, 1, 8, 8)
    assert 0 <= images.min() <= images.max() <= 1
    assert labels.dtype == torch.long


def test_the_resnet_learns_them(embedded_digits):
    task = make_task(Lab(model="resnet", layers=1, width=8, batch=16))
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-2)
    start = validation_loss(task.model, task.validation)
    for step in range(30):
        loss_of(task.model, task.draw(0, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert validation_loss(task.model, task.validation) < start


def test_real_digits():
    pytest.importorskip("sklearn")
    (_, labels), (_, validation_labels) = digits()
    assert len(labels) + len(validation_labels) == 1797
