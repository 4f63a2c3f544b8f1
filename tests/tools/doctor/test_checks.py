"""Each check of one machine, with descriptions of other machines."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from laconic.tools.doctor import checks
from laconic.tools.doctor.checks import Finding, has_problem, merged
from laconic.tools.doctor.diagnosis import check_links
from laconic.tools.machine import versions

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
HERE = {"python": "3.12.1", "torch": "2.13.0+cpu", "laconic": "0.1.0"}
INTERFACES = ("lo", "eth0", "wg0")


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_every_finding_of_this_machine_is_complete():
    found = checks.check_machine({}, workers=1000, local_workers=1000, several_hosts=True)
    assert {"versions", "gloo", "devices", "open files", "shared memory", "threads"} <= {each.name for each in found}
    for each in found:
        assert each.found
        assert bool(each.why) == bool(each.way_out) == (each.severity != "ok")


class TestVersions:
    @pytest.mark.parametrize(
        ("torch", "severity"), [("2.13.0+cpu", "ok"), ("2.9.1", "problem"), ("3.0.0a0", "warning")]
    )
    def test_ranges(self, torch, severity):
        assert checks.check_versions(HERE | {"torch": torch}).severity == severity

    def test_the_range_is_that_of_the_package(self):
        assert f"torch>={checks.TORCH},<{checks.NEXT_TORCH}" in PROJECT["dependencies"]
        assert checks.check_versions(versions()).severity == "ok"

    def test_workers_differ(self):
        assert checks.compare_versions([HERE] * 3)[0].severity == "ok"
        [found] = checks.compare_versions([HERE, HERE | {"torch": "2.12.0"}, HERE])
        assert found.severity == "problem"
        assert found.found == "torch 2.12.0 on worker 1, 2.13.0+cpu on the others"
        assert found.way_out == "Install the same torch on all hosts."
        [found] = checks.compare_versions([HERE, HERE, HERE | {"python": "3.11.0"}])
        assert found.severity == "warning"


class TestBackends:
    def test_gloo(self):
        assert checks.check_gloo(True, False).severity == "ok"
        assert checks.check_gloo(False, False).severity == "problem"

    @pytest.mark.parametrize(
        ("devices", "nccl", "cuda_built", "severity"),
        [
            ([], False, False, "ok"),
            ([], True, True, "warning"),
            (["H100", "H100"], True, True, "ok"),
            (["H100"], True, True, "warning"),
            (["H100", "H100"], False, True, "warning"),
        ],
    )
    def test_devices(self, devices, nccl, cuda_built, severity):
        assert checks.check_devices(devices, nccl, cuda_built, local_workers=2).severity == severity


class TestAddresses:
    @pytest.mark.parametrize(
        ("address", "several", "severity", "words"),
        [
            ("10.0.0.7", True, "ok", "the one with 10.0.0.7, to which this host's name, node7, resolves"),
            ("127.0.1.1", True, "problem", "this host's name, node7, resolves to 127.0.1.1"),
            ("127.0.1.1", False, "warning", "resolves to 127.0.1.1"),
            (None, True, "problem", "resolves to no address of this host"),
        ],
    )
    def test_the_address_that_gloo_announces(self, address, several, severity, words):
        found = checks.check_host_name("node7", address, INTERFACES, several)
        assert (found.name, found.severity) == ("gloo's interface", severity)
        assert words in found.found
        if severity != "ok":
            assert "Set GLOO_SOCKET_IFNAME to the interface that joins the hosts (eth0, wg0)." in found.way_out

    @pytest.mark.parametrize(
        ("name", "several", "severity"),
        [
            ("eth0", True, "ok"),
            ("lo", True, "problem"),
            ("lo", False, "ok"),
            ("lo,eth0", True, "ok"),
            ("ib0", False, "problem"),
        ],
    )
    def test_the_chosen_interface(self, name, several, severity):
        assert checks.check_interface(name, INTERFACES, several).severity == severity

    @pytest.mark.parametrize(
        ("addresses", "several", "severity"),
        [
            (["10.0.0.1"], True, "ok"),
            (["127.0.0.1"], True, "problem"),
            (["127.0.0.1"], False, "ok"),
            ([], True, "problem"),
        ],
    )
    def test_the_master_address(self, addresses, several, severity):
        found = checks.check_master("node0", addresses, "29500", several)
        assert (found.name, found.severity) == ("master address", severity)
        assert "MASTER_ADDR=node0" in found.found

    def test_the_real_machine(self):
        environ = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "localhost"}
        assert [each.severity for each in checks.check_addresses(environ, several_hosts=False)] == ["ok", "ok"]
        assert checks.own_address("no-such-host.invalid") is None
        assert checks.own_address("127.0.0.1") == "127.0.0.1"
        assert checks.own_address("203.0.113.9") is None


class TestLimits:
    def test_open_files(self):
        assert checks.check_files(None, 500).severity == "ok"
        assert checks.check_files(1024, 4).severity == "ok"
        found = checks.check_files(256, 4)
        assert (found.severity, found.way_out) == ("warning", "Run ulimit -n 65536 before the run.")
        assert checks.check_files(1024, 100).severity == "warning"

    def test_shared_memory(self):
        assert checks.check_shared(None).severity == "ok"
        assert checks.check_shared(8 * 2**30).severity == "ok"
        found = checks.check_shared(64 * 2**20)
        assert (found.severity, found.found) == ("warning", "/dev/shm has 64 MiB")
        assert "--shm-size" in found.way_out

    @pytest.mark.parametrize(
        ("environ", "workers", "quota", "severity", "words"),
        [
            ({"OMP_NUM_THREADS": "2"}, 4, None, "ok", ""),
            ({}, 1, None, "ok", ""),
            ({}, 4, None, "warning", "Set OMP_NUM_THREADS=2."),
            ({"OMP_NUM_THREADS": "8"}, 2, None, "warning", "Set OMP_NUM_THREADS=4."),
            ({"OMP_NUM_THREADS": "1"}, 16, None, "warning", "Start fewer workers"),
            ({"OMP_NUM_THREADS": "2"}, 2, 2.0, "warning", "Set OMP_NUM_THREADS=1."),
        ],
    )
    def test_threads(self, environ, workers, quota, severity, words):
        found = checks.check_threads(environ, workers, 8, quota)
        assert found.severity == severity
        assert words in found.way_out


class TestData:
    @pytest.fixture
    def folder(self, tmp_path):
        return write(tmp_path / "data", a="aaaa", sub__b="b" * 20_000)

    def test_a_copy_is_the_same(self, folder, tmp_path):
        copy = write(tmp_path / "copy", a="aaaa", sub__b="b" * 20_000)
        assert checks.compare_data([checks.summarize(folder), checks.summarize(copy)]).severity == "ok"
        assert checks.check_data(folder)[0].found == f"{folder}: 2 files, 20,004 bytes"
        assert checks.summarize(folder / "a")["number of files"] == "1"

    @pytest.mark.parametrize(
        ("name", "text", "part"),
        [("c", "", "number of files"), ("a", "aaa", "total size"), ("a", "aaab", "sampled bytes")],
    )
    def test_what_differs(self, folder, name, text, part):
        before = checks.summarize(folder)
        write(folder, **{name: text})
        found = checks.compare_data([before, before, checks.summarize(folder)])
        assert (found.severity, found.found) == ("problem", f"worker 2: not the same {part} as on the other workers")

    def test_another_name(self, folder):
        before = checks.summarize(folder)
        (folder / "a").rename(folder / "z")
        assert "not the same file names and sizes" in checks.compare_data([before, checks.summarize(folder)]).found

    def test_nothing_there(self, tmp_path):
        found, summary = checks.check_data(tmp_path / "none")
        assert (found.severity, summary) == ("problem", {})
        assert "No such file" in found.found
        assert checks.check_data(tmp_path)[0].severity == "problem"


class TestLinks:
    def test_one_slow_link(self):
        assert check_links([(0.001, 1e9)] * 4).severity == "ok"
        assert check_links([(0.001, 1e11)] * 4 + [(0.001, 2e9)]).severity == "ok", "too fast to compare"
        found = check_links([(0.001, 1e9), (0.001, 1e9), (0.2, 1e7), (0.001, 1e9)])
        assert found.severity == "warning"
        assert "slowest link 2-3 (10mbit, 200 ms)" in found.found


def test_equal_findings_are_merged():
    one, other = Finding("memory", "ok", "8 GiB"), Finding("memory", "problem", "1 GiB", "Too little.", "Buy.")
    assert has_problem([one, other])
    assert not has_problem([one])
    by_worker = [replace(each, workers=(worker,)) for worker, each in enumerate([one, other, one])]
    assert [each.workers for each in merged(by_worker, 3)] == [(0, 2), (1,)]
    assert merged([by_worker[0], replace(one, workers=(1,))], 2) == [one]
