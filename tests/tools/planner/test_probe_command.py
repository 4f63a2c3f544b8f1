"""`laconic probe` as a user runs it."""

from __future__ import annotations

import pytest

from laconic.tools.planner.network import fit
from laconic.tools.planner.probe_data import Probe
from tests.cli.conftest import here, outside  # noqa: F401 - fixtures
from tests.namespaces import needs_root

SMALL = ["--model", "tests.tools.planner.test_probe:a_line"]
QUICK = [*SMALL, "--longest", "0.05"]


@pytest.mark.slow
def test_workers_here(outside, tmp_path):  # noqa: F811
    path = tmp_path / "probe.json"
    given = ["--workers", "2", "--plan", "power_sgd(rank=2)", "--out", str(path), *QUICK]
    ended = outside("-m", "laconic", "probe", *given)
    assert ended.code == 0, ended.err
    probe = Probe.read(path)
    assert probe.workers == 2
    assert {"ddp()", "diloco(period=16)", "power_sgd(rank=2, bits=4)"} <= {each.plan for each in probe.codecs}
    assert ended.out.startswith("2 workers on 1 host, gloo, computing on cpu with ")
    assert "all_to_all" in ended.out
    assert f"written to {path}" in ended.out
    assert "  0% a training step of " in ended.err
    assert "100% done" in ended.err


@pytest.mark.nightly
def test_under_torchrun(outside, tmp_path):  # noqa: F811
    path = tmp_path / "probe.json"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = outside(*torchrun, "-m", "laconic", "probe", "--out", str(path), *QUICK)
    assert ended.code == 0, ended.err
    assert Probe.read(path).workers == 2
    assert ended.out.count("written to") == 1


@pytest.mark.slow
def test_an_error_of_a_worker(outside, tmp_path):  # noqa: F811
    path = tmp_path / "probe.json"
    ended = outside("-m", "laconic", "probe", "--workers", "2", "--model", "math:sqrt", "--out", str(path))
    assert ended.code == 1
    assert "of the probe failed: laconic: --model math:sqrt: TypeError: " in ended.err
    assert not path.exists()


@pytest.mark.slow
class TestAsRoot:
    pytestmark = needs_root

    def test_two_sites(self, outside, tmp_path):  # noqa: F811
        path = tmp_path / "probe.json"
        given = ["--link", "2 @ 200mbit, 2 @ 10mbit", "--groups", "2", "--out", str(path), *SMALL, "--longest", "0.3"]
        ended = outside("-m", "laconic", "probe", *given)
        assert ended.code == 0, ended.err
        probe = Probe.read(path)
        assert probe.hosts == ((0,), (1,), (2,), (3,))
        # On a busy machine a rate is off by tens of percent; the two are 20 x apart.
        assert 1e7 / 4 < fit(probe.of("all_reduce")).bandwidth_bps < 1e7 * 4
        assert 2e8 / 4 < fit(probe.of("all_reduce", "groups of 2")).bandwidth_bps < 2e8 * 4
        assert "groups of 2 (2)" in ended.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--groups", "3"], "--groups 3: 4 workers cannot be divided into groups of 3."),
        (["--link", "fast"], "--link fast: write a rate"),
        (["--model", "bert"], "--model bert: write module:function."),
        (["--plan", "dpp()"], "dpp"),
        (["--out", "."], "--out .: that is a folder."),
    ],
)
def test_mistakes(here, arguments, words):  # noqa: F811
    ended = here("probe", *arguments)
    assert ended.code == 2
    assert words in ended.err
    assert "Traceback" not in ended.err


def test_torchrun_has_started_the_workers(here, monkeypatch, tmp_path):  # noqa: F811
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    ended = here("probe", "--link", "1gbit", "--out", str(tmp_path / "probe.json"))
    assert ended.code == 2
    assert "--link: torchrun has already started the workers" in ended.err


def test_no_link_can_be_made(here, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.setenv("PATH", str(tmp_path))  # no ip, no tc
    ended = here("probe", "--link", "1gbit", "--workers", "2", "--out", str(tmp_path / "probe.json"))
    assert ended.code == 2
    assert "--link 1gbit: no real link can be made here (the command ip of iproute2 is not installed)" in ended.err
