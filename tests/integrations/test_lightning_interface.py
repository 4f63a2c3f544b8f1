"""What the network interface sends under Lightning in steps in which the plan sends nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.namespaces import hosts, needs_root

pytest.importorskip("lightning")

pytestmark = [pytest.mark.frameworks, needs_root[1]]


def test_the_interface_sends_nothing_in_local_steps(tmp_path):
    code = "import sys; from tests.integrations.lightning_runs import count_silent_steps as c; c(*sys.argv[1:])"
    environment = f"env GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 {sys.executable} -W ignore -c"
    with hosts(2) as made:
        processes = [
            subprocess.Popen(
                [*f"ip netns exec {name} {environment}".split(), code, str(index), made[0][1], str(tmp_path)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index, (name, _) in enumerate(made)
        ]
        try:
            outputs = [process.communicate(timeout=120) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    for out, err in outputs:
        assert out, err[-3000:]
        for what, (interface, ledger) in json.loads(out).items():
            assert ledger == 0, what
            # Lightning 2.6 broadcasts 8 bytes in each batch: a packet and its acknowledgement, with their headers.
            # Without it there is not even one empty packet a step; ARP may send one at any time.
            assert interface < 3 * (66 if what.endswith("quiet") else 300), what
