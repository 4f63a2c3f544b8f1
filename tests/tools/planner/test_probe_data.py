"""The file of a probe, its refusals, and the fit of a collective."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from laconic.tools.planner.fit import fit, interpolated
from laconic.tools.planner.probe_data import (
    CodecTiming,
    CopyTiming,
    LinkTiming,
    ModelShapes,
    Probe,
    ProbeError,
    StepTiming,
    Timing,
)

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
    memory=CopyTiming(1 << 20, (1e-3, 2e-3, 4e-3)),
    model=ModelShapes("m", {"a": (3, 4), "b": (), "c": (5,)}),
    step=StepTiming((0.1, 0.2), (0.02, 0.05), (0.06, 0.12), (0.02, 0.03), (0.15,) * 4),
    links=(LinkTiming(0, 1, 1e-3, 1e8), LinkTiming(1, 0, 1e-3, 9e7)),
    link="100mbit",
    versions={"laconic": "1"},
)


def test_round_trip(tmp_path):
    assert Probe.from_json(PROBE.to_json()) == PROBE
    bare = replace(PROBE, step=None, link=None, links=(), timings=())
    bare.write(tmp_path / "probe.json")
    assert Probe.read(tmp_path / "probe.json") == bare
    assert json.loads(PROBE.to_json())["format"] == 1


def test_what_it_derives():
    assert PROBE.levels == {"machine": 2, "world": 4}
    assert PROBE.model.parameters == 18
    assert PROBE.memory.bandwidth_bps == pytest.approx(16 * (1 << 20) / 2e-3)
    assert PROBE.step is not None
    assert PROBE.step.backward_share == pytest.approx(0.09 / 0.15)
    assert StepTiming((0.1,)).backward_share is None
    assert PROBE.codec_seconds("ddp()") == 1e-4
    assert PROBE.codec_seconds("power_sgd()") is None
    assert PROBE.seconds("all_reduce", 1_000_000) == 0.12
    with pytest.raises(ValueError, match=r"all_gather of 'world' was not measured. Measured: all_reduce of 'machine',"):
        PROBE.fit("all_gather")


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
        (changed("format", 2), "format 2 of a probe: this laconic reads 1. Run laconic probe again."),
        (changed("workers", ...), "workers: it is missing"),
        (changed("more", 1), "more: there is no such field; known are workers, hosts"),
        (changed("workers", "4"), "workers: it is '4', and must be a whole number"),
        (changed("workers", 3), r"hosts is \(\(0, 1\), \(2, 3\)\), and must have each of the workers 0 to 2 once"),
        (changed("hosts", 4), "hosts: it is 4, and must be a list"),
        (changed("timings.1.samples.2", "x"), r"timings\[1\].samples\[2\]: it is 'x', and must be a finite number"),
        (changed("timings.1.samples.2", float("nan")), r"timings\[1\].samples\[2\]: it is nan, and must be a finite"),
        (changed("timings.0.samples", []), r"timings\[0\]: samples is \[\], and must have seconds above 0"),
        (changed("timings.0.samples.0", 0), r"timings\[0\]: samples is \[0.0, 0.0002\], and must have seconds"),
        (changed("timings.0.op", "sum"), r"timings\[0\]: op is 'sum', and must be one of all_reduce, all_gather"),
        (changed("timings.0.workers", 1), r"timings\[0\]: 1 workers and 1024 bytes"),
        (changed("links.0.bandwidth_bps", -1), r"links\[0\]: a latency of 0.001 s and -1.0 bit/s"),
        (changed("links.0.sender", 7), "links has 7 to 1, and there are 2 hosts"),
        (changed("model.shapes.a", "3x4"), "model.shapes.a: it is '3x4', and must be a list"),
        (changed("links_together", 1), "links_together: it is 1, and must be true or false"),
        (changed("versions", None), "versions: it is None, and must be an object"),
    ],
)
def test_refuses_what_is_no_probe(text, words):
    with pytest.raises(ProbeError, match=words):
        Probe.from_json(text)


def test_an_error_names_the_file(tmp_path):
    with pytest.raises(ProbeError, match=r"no.json: No such file"):
        Probe.read(tmp_path / "no.json")
    (tmp_path / "bad.json").write_bytes(b"\xff")
    with pytest.raises(ProbeError, match=r"bad.json: .*invalid start byte"):
        Probe.read(tmp_path / "bad.json")


def timings(op: str, seconds: dict[int, float], workers: int = 4) -> list[Timing]:
    return [Timing(op, "world", workers, size, (s,)) for size, s in seconds.items()]


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
