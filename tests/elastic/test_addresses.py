"""Addresses: the one that gloo takes is the one that we take."""

from __future__ import annotations

import socket

import pytest

from laconic import addresses
from laconic.elastic.addresses import can_bind, gloos_address


def test_the_interface_that_gloo_is_told_to_take():
    assert gloos_address({"GLOO_SOCKET_IFNAME": "lo"}) == "127.0.0.1"
    assert gloos_address({"GLOO_SOCKET_IFNAME": "lo,none7"}) == "127.0.0.1"
    assert gloos_address({"GLOO_SOCKET_IFNAME": "none7"}) is None


@pytest.mark.parametrize(
    ("leads_to", "right"),
    [(["203.0.113.9", "127.0.0.1"], "127.0.0.1"), (["203.0.113.9"], "127.0.0.1"), ([], "127.0.0.1")],
)
def test_else_where_the_name_of_the_host_leads(monkeypatch, leads_to, right):
    monkeypatch.setattr(addresses, "resolve", lambda name: leads_to if name == socket.gethostname() else [])
    assert gloos_address({}) == right


def test_here_it_can_be_bound():
    address = gloos_address({})
    assert address is not None and can_bind(address)
