"""Every formula of a prediction, with its numbers."""

from __future__ import annotations

from laconic.tools.planner.collectives import Formula
from laconic.tools.planner.faults import checkpoint_every_s, slowest_of
from laconic.tools.planner.front import MEASURED_PARAMETERS, SOURCE
from laconic.tools.planner.predict import Prediction
from laconic.tools.planner.sent import Sent
from laconic.tools.planner.timeline import BACKWARD_SHARE
from laconic.tools.units import human_bytes, rate_text

SAVED_BYTES = 12
"""Of each parameter, in a checkpoint: weight and Adam's two moments in fp32."""
DISK_BYTES_S = 1e9


def explain(each: Prediction) -> list[str]:
    """Return the lines that explain one prediction."""
    s, now = each.scenario, each.now
    forward = 1 - BACKWARD_SHARE
    lines = [
        f"{each.plan!r}",
        f"  computing: {s.compute_s:.4g} s a step, {forward:.0%} forward and {BACKWARD_SHARE:.0%} backward",
        *_sends(each),
        f"  sent by each worker: {human_bytes(each.sent_bytes_per_step)} a step, on average over {each.cycle} steps",
        f"  step: {now.step_s:.4g} s = {s.compute_s:.4g} computing + {now.exposed_s:.4g} exposed",
        f"  utilisation: {s.compute_s:.4g} / {now.step_s:.4g} = {now.utilisation:.1%}",
    ]
    if s.jitter and each.sent:
        waits = f"{slowest_of(s.workers):.2f} x {s.jitter:g} x {s.compute_s:.4g} s / sqrt({each.meets_every})"
        lines.append(f"  in it, waiting for the slowest of {s.workers} workers: {waits}")
    return [*lines, *_loss(each), *_faults(each)]


def _sends(each: Prediction) -> list[str]:
    """Describe the first synchronisation of each kind, collective by collective."""
    lines: list[str] = []
    seen: set[tuple[str, bool, int]] = set()
    for sent in each.sent:
        kind = (sent.level, sent.before is None, len(sent.collectives))
        if kind in seen or not sent.collectives:
            continue
        seen.add(kind)
        alike = sum(1 for other in each.sent if other.step == sent.step and other.level == sent.level)
        lines += [f"  step {sent.step + 1} of a cycle, {alike} such in it, {_when(sent)}:"]
        lines += [f"    {_collective(each, sent, *one)}" for one in sent.collectives]
        if each.codec_s and sent.encoded:
            lines.append(f"    encoding and decoding: {each.codec_s * sent.share:.4g} s (measured)")
    return lines


def _when(sent: Sent) -> str:
    release = "after the step" if sent.before is None else f"after {1 - sent.before:.0%} of the backward pass"
    return release if not sent.delay else f"{release}, due {sent.delay} steps later"


def _collective(each: Prediction, sent: Sent, op: str, payload: float, wire: float) -> str:
    network = each.scenario.network
    seconds = network.seconds(op, payload, sent.workers)
    start = f"{op} of {human_bytes(payload)} among {sent.workers}: {human_bytes(wire)} sent, {seconds:.4g} s"
    if not isinstance(network, Formula):
        return f"{start} (measured)"
    p, rate = sent.workers, rate_text(network.link.inside(sent.workers).slowest_bps)
    if op != "all_reduce":
        return f"{start} = {p - 1} x {network.latency_s:g} s + {human_bytes(wire)} / {rate}"
    return f"{start} by {network.algorithm}, at {rate} and {network.latency_s:g} s of latency"


def _loss(each: Prediction) -> list[str]:
    if each.kept is None or each.measured is None:
        return ["  the loss under this plan was not measured: it cannot be ranked (docs/quality.md has what was)"]
    gain, factor = each.scenario.gain, each.steps_factor
    size = each.scenario.shapes.parameters / MEASURED_PARAMETERS
    return [
        f"  kept {each.kept:.0%} ({SOURCE}; your model has {size:.3g} times as many parameters)",
        f"  steps to the same loss: 1 / (kept + (1 - kept) / {gain:.3g}) = {factor:.3f} times those of ddp(); "
        f"a worker by itself is taken to need {gain:.3g} times",
    ]


def _faults(each: Prediction) -> list[str]:
    s = each.scenario
    if s.between_faults_s is None:
        return []
    save_s = SAVED_BYTES * s.shapes.parameters / DISK_BYTES_S
    every = checkpoint_every_s(save_s, s.between_faults_s)
    return [
        f"  goodput: exp(-{each.step_s * each.meets_every:.4g} s / {s.between_faults_s:g} s) = {each.goodput:.1%}, if "
        "survivors go on; a checkpoint every "
        f"{every:.0f} s = sqrt(2 x {save_s:.2g} s to save x {s.between_faults_s:g} s)",
    ]
