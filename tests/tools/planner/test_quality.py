"""What plans keep: families, the fitted line, its interval, and where nothing is predicted."""

from __future__ import annotations

import math

import pytest
import torch

import laconic
from laconic.plans.targets import width_of
from laconic.tools.planner.quality import SOFT, Cell, Kept, TrainingFacts, family_of, fit, measured_cells, predict

PLANS = ("power_sgd(rank=32)", "power_sgd(rank=8)", "power_sgd(rank=2)")


def _rank(plan: str) -> int:
    found = family_of(laconic.plan(plan))
    assert found is not None
    return int(found[1])


def _lost(rank: int, steps: int) -> float:
    """A known law: four times the rank, or the steps, loses half as much, but for SOFT."""
    return 0.4 * math.sqrt(8 / rank * 300 / steps) - SOFT


def _cells(noise: float = 0.0, trainings: int = 12, plans=PLANS) -> list[Cell]:
    """Cells of the known law, with an error of each training."""
    torch.manual_seed(0)
    found = []
    for index in range(trainings):
        training = TrainingFacts(width=(200.0, 400.0)[index % 2], steps=(300, 600, 1200)[index % 3])
        of_training = noise * torch.randn(()).item()
        for plan in plans:
            lost = (_lost(_rank(plan), training.steps) + SOFT) * math.exp(of_training) - SOFT
            found.append(Cell(f"training {index}", training, plan, 1 - lost))
    return found


@pytest.mark.parametrize(
    ("plan", "family"),
    [
        ("quantized_ddp()", ("few bits", 1.0)),
        ("quantized_ddp(bits=2)", None),
        ("power_sgd(rank=8)", ("low rank", 8.0)),
        ("power_sgd(rank=64)", ("few bits", 1.0)),  # too high for matrices of width 128
        ("power_sgd(rank=8, rounds='alternating')", None),
        ("power_sgd(rank=8, feedback=False)", None),
        ("streaming_diloco(period=4)", ("deltas", 4.0)),
        ("diloco()", ("deltas", 16.0)),
        ("post_local_sgd(period=4)", ("deltas", 4.0)),
        ("diloco(lr=0.7, momentum=0.9)", None),
        ("diloco(group=2)", None),
        ("streaming_diloco(mix=0.5)", None),
        ("hierarchical_sgd({2: 4, 4: 8})", None),
        ("qsr(growth=0.1)", None),
        ("sparse_loco()", ("sparse deltas", 4.0)),
        ("alone()", None),
    ],
)
def test_families(plan, family):
    assert family_of(laconic.plan(plan), width=128) == family


def test_a_known_law_is_found():
    cells = _cells(trainings=60)
    for rank, steps in ((8, 300), (16, 300), (8, 600), (4, 300)):
        found = predict(laconic.power_sgd(rank), TrainingFacts(300.0, steps), cells)
        assert found is not None and found.value == pytest.approx(1 - _lost(rank, steps), abs=0.02)
        assert found.low <= found.value <= found.high


def test_the_interval_has_nine_of_ten_trainings():
    cells = _cells(noise=0.3, trainings=60)
    law = fit("low rank", cells[: 3 * 30])
    assert law is not None
    inside = [
        found.low <= each.kept <= found.high
        for each in cells[3 * 30 :]
        if (found := law.kept(_rank(each.plan), each.training)) is not None
    ]
    assert 0.75 <= sum(inside) / len(inside) < 1  # of thirty trainings that had no part in the fit


def test_nothing_is_predicted_far_from_what_was_measured():
    cells = _cells()
    power = laconic.power_sgd(rank=8)
    assert predict(power, TrainingFacts(400.0 * 4.9, 300), cells) is not None
    assert predict(power, TrainingFacts(400.0 * 5.1, 300), cells) is None
    assert predict(power, TrainingFacts(300.0, 1200 * 6), cells) is None
    assert predict(power, TrainingFacts(300.0, 300, "sgd"), cells) is None
    assert predict(laconic.power_sgd(rank=200), TrainingFacts(1900.0, 300), cells) is None
    assert predict(laconic.diloco(), TrainingFacts(300.0, 300), cells) is None  # of another family
    assert predict(power, TrainingFacts(300.0, 300), cells[:9]) is None  # three trainings are too few


def test_what_needs_no_measurement():
    training = TrainingFacts(1e6, 10**9, "muon")
    assert predict(laconic.ddp(), training) == Kept(1.0, 1.0, 1.0)
    assert predict(laconic.alone(), training) == Kept(0.0, 0.0, 0.0)


def test_the_width_is_that_of_the_matrices():
    tensors = {"conv": torch.empty(32, 16, 3, 3), "bias": torch.empty(10_000), "scalar": torch.empty(())}
    assert width_of(tensors) == pytest.approx(32)
    assert width_of({"bias": torch.empty(3)}) == 1


def test_the_file_has_what_the_named_plans_need():
    names = {each.name for each in measured_cells()}
    assert len(names) >= 8
    for plan in ("quantized_ddp()", "power_sgd()", "frugal('60x')", "diloco()", "sparse_loco()"):
        for kind in ("adaptive", "sgd"):
            found = predict(laconic.plan(plan), TrainingFacts(128.0, 600, kind))
            assert found is not None and found.low <= found.value <= found.high
