"""The file of a probe, its refusals, and the fit of a collective."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from laconic.tools.errors import UsageError
from laconic.tools.planner.network import fit, interpolated
from laconic.tools.planner.probe_data import CodecTiming, ModelShapes, Probe, StepTiming, Timing

PROBE = Probe(
    workers=4,
    hosts=((0, 1), (2, 3)),
    device="cpu",
    backend="gloo",
    threads=1,
    timings=(
        Timing("all_reduce", "machine", 2, 1024, (1e-4, 2e-4)),
        Timing("all_reduce", "world", 4, 1024, (1e-3, 2e-3, 3e-3)),
        Timing("all_reduce", "world", 4, 1_000_000, (0.12, 0.13, 0.12)),
    ),
    codecs=(CodecTiming("ddp()", (1e-4,)),),
    model=ModelShapes("m", {"a": (3, 4), "b": (), "c": (5,)}),
    step=StepTiming((0.1, 0.2), (0.02, 0.05), (0.06, 0.12), (0.02, 0.03), (0.15,) * 4),
    link="100mbit",
    versions={"laconic": "1"},
)


def test_round_trip(tmp_path):
    assert Probe.from_json(PROBE.to_json()) == PROBE
    bare = replace(PROBE, step=None, link=None, timings=())
    bare.write(tmp_path / "probe.json")
    assert Probe.read(tmp_path / "probe.json") == bare
    assert json.loads(PROBE.to_json())["format"] == 2


def test_what_it_derives():
    assert PROBE.levels == {"machine": 2, "world": 4}
    assert PROBE.model.parameters == 18
    assert PROBE.codecs[0].seconds == 1e-4
    assert PROBE.timings[1].seconds == 2e-3
    assert PROBE.timings[1].spread == pytest.approx(0.25)
    assert PROBE.codecs[0].spread == 0.0


def changed(path: str, value: object) -> str:
    """The file with one value changed; `...` removes it."""
    fields: Any = json.loads(PROBE.to_json())
    *way, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    place = fields
    for key in way:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "this is not JSON"),
        ("[]", "this is not a probe: it has no field 'format'"),
        ("{}", "this is not a probe: it has no field 'format'"),
        (changed("format", 1), "format 1 of a probe: this laconic reads 2. Run laconic probe again."),
        (changed("workers", ...), "this probe is damaged: .*workers"),
        (changed("timings", ...), "this probe is damaged: 'timings'. Run laconic probe again."),
        (changed("more", 1), "damaged: .*more"),
        (changed("workers", "4"), "damaged: "),
        (changed("workers", 3), r"hosts is \(\(0, 1\), \(2, 3\)\), and must have each of the workers 0 to 2 once"),
        (changed("hosts", 4), "damaged: "),
        (changed("timings.1.samples.2", "x"), r"samples is \[0.001, 0.002, 'x'\], and must have seconds above 0"),
        (changed("timings.1.samples.2", float("nan")), r"samples is \[0.001, 0.002, nan\], and must have seconds"),
        (changed("timings.0.samples", []), r"samples is \[\], and must have seconds above 0"),
        (changed("timings.0.samples.0", 0), r"samples is \[0, 0.0002\], and must have seconds"),
        (changed("timings.0.op", "sum"), r"op is 'sum', and must be one of all_reduce, all_gather"),
        (changed("timings.0.workers", 1), r"1 workers and 1024 bytes"),
        (changed("model.shapes.a", "3x4"), "the shape of a is '3x4', and must be a list of whole numbers"),
    ],
)
def test_refuses_what_is_no_probe(text, words):
    with pytest.raises(UsageError, match=words):
        Probe.from_json(text)


def test_an_error_names_the_file(tmp_path):
    with pytest.raises(UsageError, match=r"no.json: No such file"):
        Probe.read(tmp_path / "no.json")
    (tmp_path / "bad.json").write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"bad.json: .*invalid start byte"):
        Probe.read(tmp_path / "bad.json")


def timings(op: str, seconds: dict[int, float], workers: int = 4) -> tuple[Timing, ...]:
    return tuple(Timing(op, "world", workers, size, (s,)) for size, s in seconds.items())


@pytest.mark.parametrize(
    ("op", "hops", "share"), [("all_reduce", 6, 1.5), ("all_gather", 3, 3), ("all_to_all", 3, 0.75)]
)
def test_the_fit_finds_latency_and_bandwidth(op, hops, share):
    seconds = {size: hops * 2e-4 + share * size * 8 / 5e7 for size in (1024, 16_384, 131_072, 1 << 20)}
    found = fit(timings(op, seconds))
    assert found.latency_s == pytest.approx(2e-4, rel=1e-3)
    assert found.bandwidth_bps == pytest.approx(5e7, rel=1e-3)
    # a burst: one size takes half of the time
    found = fit(timings(op, seconds | {16_384: seconds[16_384] / 2}))
    assert found.bandwidth_bps == pytest.approx(5e7, rel=0.05)


def test_the_fit_is_never_negative():
    only_latency = fit(timings("all_reduce", {1024: 0.01, 4096: 0.01, 65_536: 0.009}))
    assert only_latency.latency_s == pytest.approx(0.01 / 6, rel=0.1)
    assert only_latency.bandwidth_bps == float("inf")
    no_latency = fit(timings("all_gather", {1000: 1e-4, 10_000: 2.4e-3, 100_000: 2.4e-2}))
    assert no_latency.latency_s == 0
    assert no_latency.bandwidth_bps == pytest.approx(1e8, rel=0.1)
    assert fit(timings("all_gather", {1000: 2.4e-4})).bandwidth_bps > 0


def test_interpolation_passes_through_what_was_measured():
    measured = timings("all_reduce", {1024: 1e-3, 4096: 4e-3, 65_536: 3e-3})
    assert [interpolated(measured, each.bytes) for each in measured] == [1e-3, 4e-3, pytest.approx(4e-3)]
    assert interpolated(measured[:1], 1 << 30) == 1e-3
