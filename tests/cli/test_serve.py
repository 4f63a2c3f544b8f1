"""`laconic serve`: a store that workers and torchrun's agents find each other through."""

import re
import signal
import subprocess
import sys

from torch._C._distributed_c10d import TCPStore


def test_it_serves_until_it_is_stopped():
    command = [sys.executable, "-u", "-m", "laconic", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as host:
        try:
            assert host.stdout is not None
            said = re.fullmatch(
                r"the store of elastic runs listens on port (\d+) of this machine.*\n", host.stdout.readline()
            )
            assert said is not None
            store = TCPStore("127.0.0.1", int(said[1]), is_master=False)
            store.set("key", "value")
            assert store.get("key") == b"value"
            host.send_signal(signal.SIGTERM)
            assert host.wait(30) == 128 + signal.SIGTERM
        finally:
            host.kill()


def test_mistakes(here):
    ended = here("serve", "--port", "70000")
    assert ended.code == 2 and "--port 70000: a port is between 1 and 65535" in ended.err
