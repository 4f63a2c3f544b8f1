"""docs/codec.md: its codec keeps the laws of all codecs, and is as short as the page says."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic import ErrorFeedback
from tests.laws import test_codecs as laws
from tests.laws import test_state as state_laws
from tests.laws.codecs import WORLDS

PAGE = (Path(__file__).parents[2] / "docs" / "codec.md").read_text()
[BLOCK] = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
NAMES: dict[str, Any] = {}
exec(compile(BLOCK, "codec.md", "exec", dont_inherit=True), NAMES)  # noqa: S102 - the page's own code
CODECS = [NAMES["Stripes"](4), ErrorFeedback(NAMES["Stripes"](3))]
each = pytest.mark.parametrize("codec", CODECS, ids=repr)


def test_it_is_short():
    body = BLOCK.partition("class Stripes:")[2].partition("\nplan = ")[0]
    lines = [line for line in body.splitlines() if line.strip() and '"""' not in line]
    assert len(lines) <= 30


def test_its_error_is_shown():
    with pytest.raises(ValueError, match=r"Stripes\(every=0\): every must be at least 1. To send all, use Exact\(\)."):
        NAMES["Stripes"](0)


@each
@pytest.mark.parametrize(("workers", "dtype"), WORLDS, ids=str)
def test_the_laws_of_every_world(codec, workers, dtype):
    laws.test_every_worker_ends_with_the_same_bits(codec, False, workers, dtype)
    laws.test_own_parts_average_to_the_mean(codec, workers, dtype)


@each
def test_the_laws_of_memory_and_bytes(codec):
    for dtype in (torch.bfloat16, torch.float32):
        laws.test_inputs_are_not_changed(codec, dtype)
        laws.test_reusing_the_input_gives_the_same_means(codec, dtype)
        laws.test_collectives_may_reduce_in_place(codec, dtype)
        laws.test_planned_bytes_equal_the_recorded_bytes(codec, dtype)
    for workers in (2, 3):
        laws.test_equal_inputs_give_the_result_of_one_worker(codec, workers)
    laws.test_the_scale_of_the_input_does_not_matter(codec, 2.0**67)


def test_the_laws_of_feedback():
    codec = CODECS[1]
    for workers, dtype in WORLDS:
        laws.test_sent_plus_residual_equals_the_sum_of_inputs(codec, workers, dtype)
    laws.test_residuals_are_bounded_unless_the_mean_is_subtracted(codec, False)


@each
def test_the_laws_of_state(codec):
    for dtype in (torch.bfloat16, torch.float32):
        state_laws.test_a_resumed_run_repeats_the_bits(codec, False, dtype)
        state_laws.test_the_layout_of_buckets_does_not_matter(codec, dtype)
        state_laws.test_buckets_may_be_in_flight_at_once(codec, dtype)
    state_laws.test_a_nonfinite_step_does_not_change_the_state(codec, False, math.nan, 2)
    state_laws.test_one_nonfinite_tensor_voids_the_whole_step(codec, "bias")
    state_laws.test_a_nonfinite_first_step_does_not_change_later_steps(codec)
