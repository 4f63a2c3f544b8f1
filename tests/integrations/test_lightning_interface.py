"""What the network interface sends under Lightning in steps in which the plan sends nothing."""

from __future__ import annotations

import json

import pytest

from tests.namespaces import needs_root, run_on_hosts

pytest.importorskip("lightning")

pytestmark = [pytest.mark.frameworks, needs_root[1]]


def test_the_interface_sends_nothing_in_local_steps(tmp_path):
    code = "import sys; from tests.integrations.lightning_runs import count_local_steps as c; c(*sys.argv[1:])"
    for out in run_on_hosts(2, code, "{rank}", "{leader}", str(tmp_path)):
        for what, (interface, ledger) in json.loads(out).items():
            assert ledger == 0, what
            # Lightning 2.6 broadcasts 8 bytes in each batch: a packet and its acknowledgement, with their headers.
            # Without it there is not even one empty packet a step; ARP may send one at any time.
            assert interface < 3 * (66 if what.endswith("quiet") else 300), what
