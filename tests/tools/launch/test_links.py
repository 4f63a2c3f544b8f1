"""Links: parsing, and the time and the headers of a collective."""

from __future__ import annotations

import pytest

from laconic.tools.doctor.diagnosis import measure_link
from laconic.tools.errors import UsageError
from laconic.tools.launch.links import Level, Link, framing_bytes, link
from laconic.tools.planner.network import collective_s
from laconic.tools.units import rate_text
from tests.workers import run_workers


@pytest.mark.parametrize(
    ("text", "rate_bps"),
    [
        ("100mbit", 1e8),
        ("1.5gbit", 1.5e9),
        ("50Mb/s", 5e7),
        ("300GB/s", 2.4e12),
        ("8kbit", 8e3),
        ("10 Mbit/s", 1e7),
        ("1Gbps", 1e9),
    ],
)
def test_rates(text, rate_bps):
    assert link(text, workers=3) == Link((Level(3, rate_bps),))


def test_levels_are_innermost_first_and_read_back():
    slow = link("2 @ 1gbit, 3 @ 50mbit")
    assert slow.levels == (Level(2, 1e9), Level(3, 5e7))
    assert slow.workers == 6
    assert link(str(slow)) == slow
    assert str(link("100mbit", workers=4)) == "100mbit"


def test_a_level_of_one_is_never_crossed():
    assert link("1 @ 1mbit, 2 @ 1gbit").slowest_bps == 1e9
    assert link("4 @ 1gbit, 1 @ 1mbit").slowest_bps == 1e9


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fast", r"--link fast: write a rate of at least 1kbit: .* such as 100mbit"),
        ("10", "--link 10: write a rate"),
        ("0mbit", "--link 0mbit: write a rate"),
        ("-5mbit", "--link -5mbit: write a rate"),
        ("", "--link : write a rate"),
        ("2 @ 1gbit, 50mbit", "--link 50mbit: write a number of at least 1, an @, and a rate"),
        ("0 @ 1gbit", "--link 0 @ 1gbit: write a number of at least 1"),
        ("two @ 1gbit", "--link two @ 1gbit: write a number of at least 1"),
    ],
)
def test_errors_quote_what_was_written(text, words):
    with pytest.raises(UsageError, match=words):
        link(text, workers=2)


def test_levels_must_hold_the_workers():
    with pytest.raises(UsageError, match=r"these levels hold 2 x 2 = 4 workers, and 8 were asked for"):
        link("2 @ 1gbit, 2 @ 50mbit", workers=8)


def test_seconds_of_a_ring():
    slow = link("8mbit", workers=4)  # a megabyte a second
    assert collective_s("all_reduce", 1_000_000, 4, slow) == pytest.approx(1.5)
    assert collective_s("all_gather", 1_000_000, 4, slow) == pytest.approx(3.0)
    assert collective_s("all_reduce", 0, 4, slow, latency_s=0.01) == pytest.approx(0.06)
    assert collective_s("all_reduce", 1_000_000, 1, slow) == 0.0


def test_the_slowest_level_decides():
    sites = link("2 @ 1gbit, 2 @ 8mbit")
    assert collective_s("all_reduce", 1_000_000, 4, sites) == pytest.approx(1.5)


def test_framing_grows_with_messages_and_not_with_bytes():
    assert framing_bytes("all_reduce", 10_000, 4) == framing_bytes("all_reduce", 4_000_000, 4)
    assert framing_bytes("all_reduce", 32 << 20, 4) == 4 * framing_bytes("all_reduce", 10_000, 4)
    assert framing_bytes("all_gather", 10_000, 1) == 0


def test_rates_as_text():
    assert [rate_text(rate) for rate in (1e3, 2.5e9, 500)] == ["1kbit", "2.5gbit", "500bit"]


def _measure(worker: int) -> tuple[float, float]:
    return measure_link(worker, 3)


def test_measured_links_between_real_workers():
    links = run_workers(_measure, 3)
    assert len(links) == 3
    assert all(bits_per_s > 0 and round_trip_s > 0 for round_trip_s, bits_per_s in links)
