"""Addresses of this machine."""

from __future__ import annotations

import pytest

from laconic.elastic.addresses import Interface, can_bind, interfaces, own_address


@pytest.mark.parametrize(
    ("resolved", "expected"),
    [(["203.0.113.9", "127.0.0.1"], "127.0.0.1"), (["203.0.113.9"], None), ([], None)],
)
def test_the_first_address_of_a_host_name_that_belongs_to_this_machine(resolved, expected):
    assert own_address("node7", {"node7": resolved}.__getitem__, can_bind) == expected


def test_the_loopback_interface_is_found():
    assert Interface("lo", "127.0.0.1") in interfaces()
