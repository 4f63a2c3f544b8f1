"""The loop: its learning rate, and one worker's training from end to end in this process."""

import math

import pytest
import torch.distributed as dist

from laconic.compare.lab.training import lr_share, train
from laconic.compare.reporting import Progress
from laconic.compare.settings import Settings

TINY = Settings(plan="ddp()", workers=1, steps=6, layers=1, width=16, heads=1, context=16)


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 1000])
def test_the_learning_rate_rises_then_falls_and_is_never_zero(steps):
    shares = [lr_share(step, steps) for step in range(1, steps + 1)]
    assert max(shares) == 1.0
    peak = shares.index(1.0)
    assert shares[: peak + 1] == sorted(shares[: peak + 1])
    assert shares[peak:] == sorted(shares[peak:], reverse=True)
    assert min(shares) > 0


def test_a_world_of_one_trains_and_reports_each_step(alone):
    seen: list[Progress] = []
    outcome = train(TINY, seen.append)
    assert [progress.step for progress in seen] == [1, 2, 3, 4, 5, 6]
    assert seen[-1].sent_bytes == outcome.sent_bytes
    assert math.isfinite(outcome.loss_final)
    assert outcome.loss_final < outcome.loss_start
    assert outcome.tokens_per_s == pytest.approx(6 * 4 * 16 / outcome.seconds)


def test_the_same_seed_gives_the_same_losses(alone):
    one, two = train(TINY, lambda _: None), train(TINY, lambda _: None)
    assert (one.loss_start, one.loss_final) == (two.loss_start, two.loss_final)
