"""The hierarchy that a probe proposes, from links made by hand."""

from __future__ import annotations

from itertools import chain, permutations

import pytest

from laconic.tools.planner.hierarchy import clusters, propose
from laconic.tools.planner.probe_data import CopyTiming, LinkTiming, ModelShapes, Probe, StepTiming
from laconic.tools.planner.probe_network import tournament


def probe(hosts: list[tuple[int, ...]], rates: dict[tuple[int, int], float], usual: float) -> Probe:
    """A probe whose links have these rates in both directions, and the others the usual one."""
    links = [
        LinkTiming(a, b, 1e-3, rates.get((min(a, b), max(a, b)), usual)) for a, b in permutations(range(len(hosts)), 2)
    ]
    return Probe(
        workers=sum(map(len, hosts)),
        hosts=tuple(hosts),
        device="cpu",
        backend="gloo",
        threads=1,
        timings=(),
        codecs=(),
        memory=CopyTiming(1, (1.0,)),
        model=ModelShapes("m", {"a": (1000, 1000)}),
        step=StepTiming((0.5,)),
        links=tuple(links),
    )


def test_two_sites():
    found = propose(probe([(0,), (1,), (2,), (3,)], {(0, 1): 2e8, (2, 3): 1.8e8}, usual=1e7))
    assert found is not None
    assert found.groups == ((0, 1), (2, 3))
    assert (found.inner_bps, found.outer_bps, found.group_workers) == (1.9e8, 1e7, 2)
    assert found.period == 58  # 3.2 s to average 4 MB: a tenth of 58 steps of 0.5 s and these 3.2 s
    assert found.words == (
        "groups of hosts 0 and 1 and hosts 2 and 3 (190mbit inside), connected by 10mbit: group=2, period=58"
    )


def test_the_slower_direction_counts():
    known = probe([(0,), (1,)], {}, usual=1e9)
    slow = Probe(**known.__dict__ | {"links": (known.links[0], LinkTiming(1, 0, 1e-3, 1e6))})
    found = propose(slow)
    assert found is not None
    assert found.groups == ((0, 1),)  # one link: nothing to compare it with


def test_no_groups_where_links_are_alike():
    found = propose(probe([(0,), (1,), (2,)], {(0, 1): 1.5e8}, usual=1e8))
    assert found is not None
    assert (found.groups, found.group_workers) == (((0, 1, 2),), None)
    assert found.words.startswith("no groups")


def test_machines_are_groups_where_links_are_alike():
    found = propose(probe([(0, 1), (2, 3), (4, 5)], {}, usual=1e8))
    assert found is not None
    assert (found.groups, found.group_workers, found.inner_bps) == (((0,), (1,), (2,)), 2, None)
    assert "connected by 100mbit: group=2, period=" in found.words


def test_workers_of_all_hosts_of_a_site_are_one_group():
    found = propose(probe([(0, 1), (2, 3), (4, 5), (6, 7)], {(0, 1): 1e9, (2, 3): 1e9}, usual=1e7))
    assert found is not None
    assert found.group_workers == 4


def test_groups_that_a_plan_cannot_use():
    found = propose(probe([(0,), (1,), (2,), (3,)], {(0, 2): 1e9, (1, 3): 1e9}, usual=1e7))
    assert found is not None
    assert (found.groups, found.group_workers) == (((0, 2), (1, 3)), None)
    assert "start the workers in that order" in found.words


def test_one_host_has_no_hierarchy():
    assert propose(probe([(0, 1)], {}, usual=1e8)) is None


def test_a_chain_of_fast_links_is_one_group():
    assert clusters(4, {(0, 1): 1e9, (1, 2): 1e9, (0, 2): 1e7, (0, 3): 1e7, (1, 3): 1e7, (2, 3): 1e7}) == [
        [0, 1, 2],
        [3],
    ]


@pytest.mark.parametrize("hosts", range(2, 12))
def test_in_a_tournament_each_pair_meets_once_and_nobody_twice_in_a_round(hosts):
    rounds = tournament(hosts)
    assert sorted(chain(*rounds)) == [(a, b) for a in range(hosts) for b in range(a + 1, hosts)]
    for pairs in rounds:
        players = list(chain(*pairs))
        assert len(players) == len(set(players))
