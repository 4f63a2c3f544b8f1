"""Outcomes of a comparison over a slow link, without running one."""

import math
from dataclasses import replace

import laconic
from laconic.tools.compare.runs import Outcome, Point


def curve(steps: int, step_s: float, step_bytes: int) -> tuple[Point, ...]:
    return tuple(
        Point(step, step * step_s, 2.4 + 2.7 * math.exp(-step / 15), step * step_bytes) for step in range(1, steps + 1)
    )


DDP = Outcome(
    plan=laconic.ddp(),
    model="gpt",
    parameters=819_200,
    workers=4,
    steps=52,
    seconds=223.6,
    communication_seconds=219.0,
    tokens_per_s=119.0,
    wire_bytes=255_590_400,
    loss_start=4.949,
    loss_final=2.292,
    ended="loss",
    until_loss=2.6,
    link="10mbit",
    waiting_seconds=10.1,
    network_bytes=255_803_808,
    interface_bytes=256_366_566,
    level_bytes={"world": 255_590_400},
    curve=curve(52, 4.3, 4_915_200),
)
LOW_RANK = replace(
    DDP,
    plan=laconic.diloco(),
    steps=108,
    seconds=12.4,
    communication_seconds=5.0,
    waiting_seconds=1.4,
    wire_bytes=11_114_496,
    network_bytes=11_557_728,
    interface_bytes=11_653_230,
    loss_final=2.340,
    level_bytes={"world": 11_114_496},
    curve=curve(108, 0.115, 102_912),
)
LOCAL = replace(
    LOW_RANK,
    plan=laconic.post_local_sgd(period=16),
    steps=68,
    seconds=20.8,
    communication_seconds=16.2,
    waiting_seconds=0.3,
    wire_bytes=19_660_800,
    level_bytes={"world": 19_660_800},
    curve=tuple(replace(point, wire_bytes=point.step // 16 * 4_915_200) for point in curve(68, 0.306, 0)),
)
ALL = [DDP, LOW_RANK, LOCAL]
