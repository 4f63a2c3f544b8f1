"""Each check of one machine, shown machines that we do not have."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from laconic.doctor import backends, data, limits, network, sockets, versions
from laconic.doctor.backends import Built, Device
from laconic.doctor.finding import Finding, from_json, has_problem, merged, ok, problem
from laconic.doctor.network import Host
from laconic.elastic.addresses import Card, can_bind, ipv6_cards, is_loopback, resolve

HERE = {"python": "3.12.1", "torch": "2.13.0+cpu", "laconic": "0.1.0"}
LO, ETH = Card("lo", "127.0.0.1"), Card("eth0", "10.0.0.7")


def host(addresses: dict[str, list[str]], cards: tuple[Card, ...] = (LO, ETH)) -> Host:
    own = {card.address for card in cards} | {"127.0.1.1"}
    return Host("node7", cards, lambda name: addresses.get(name, []), lambda address: address in own)


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


class TestVersions:
    @pytest.mark.parametrize(
        ("changed", "verdict"),
        [
            ({}, "ok"),
            ({"torch": "2.9.1"}, "problem"),
            ({"torch": "3.0.0a0"}, "warning"),
            ({"python": "3.10.4"}, "problem"),
        ],
    )
    def test_ranges(self, changed, verdict):
        assert versions.check_versions(HERE | changed, "2.11", "3").verdict == verdict

    def test_the_range_is_the_packages_own(self):
        assert versions.torch_range() == ("2.11", "3")
        assert versions.check_versions(versions.versions_here(), *versions.torch_range()).verdict == "ok"

    def test_workers_differ(self):
        assert versions.compare_versions([HERE] * 3)[0].verdict == "ok"
        [found] = versions.compare_versions([HERE, HERE | {"torch": "2.12.0"}, HERE])
        assert found.verdict == "problem"
        assert found.found == "torch 2.12.0 on worker 1, 2.13.0+cpu on the others"
        assert found.way_out == "Install the same torch on all hosts."
        [found] = versions.compare_versions([HERE, HERE, HERE | {"python": "3.11.0"}])
        assert found.verdict == "warning"


class TestBackends:
    @pytest.mark.parametrize(
        ("built", "verdicts"),
        [
            (Built(True, False, (), False, False), ["ok", "ok", "ok"]),
            (Built(False, False, (), False, False), ["problem", "ok", "ok"]),
            (Built(True, True, (), True, True), ["ok", "warning", "ok"]),
            (Built(True, True, (Device("H", (9, 0)),) * 2, True, True), ["ok", "ok", "ok"]),
            (Built(True, True, (Device("H", (9, 0)),), True, False), ["ok", "warning", "warning"]),
            (Built(True, True, (Device("P", (6, 1)),) * 2, True, True), ["ok", "ok", "warning"]),
        ],
    )
    def test_verdicts(self, built, verdicts):
        assert [each.verdict for each in backends.check_backends(built, local_workers=2)] == verdicts

    def test_encryption(self, tmp_path):
        bare, tls = tmp_path / "bare.so", tmp_path / "tls.so"
        bare.write_bytes(b"\0gloo9transport3tcp6Device\0")
        tls.write_bytes(b"\0N4gloo9transport3tcp3tls6DeviceE\0")
        assert "was built with TLS" in backends.check_encryption([bare, tls], 2).found
        found = backends.check_encryption([bare, tmp_path / "none.so"], 2)
        assert found.verdict == "warning"
        assert "WireGuard" in found.way_out
        assert backends.check_encryption([bare], 1).verdict == "ok"


class TestNetwork:
    @pytest.mark.parametrize(
        ("leads_to", "several", "verdict", "words"),
        [
            (["10.0.0.7"], True, "ok", "eth0 10.0.0.7"),
            (["127.0.1.1"], True, "problem", "leads to 127.0.1.1: gloo would tell the others to reach it there"),
            (["127.0.1.1"], False, "warning", "That serves for workers on one host"),
            (["10.9.9.9"], True, "problem", "leads to no address of its own"),
            ([], True, "problem", "leads to no address of its own"),
        ],
    )
    def test_where_gloo_would_bind(self, leads_to, several, verdict, words):
        _, found = network.check_interfaces(host({"node7": leads_to}), {}, several)
        assert found.verdict == verdict
        assert words in found.found
        if verdict != "ok":
            assert "GLOO_SOCKET_IFNAME=eth0" in found.way_out

    @pytest.mark.parametrize(
        ("name", "several", "verdict"),
        [("eth0", True, "ok"), ("lo", True, "problem"), ("lo", False, "ok"), ("wg0", False, "problem")],
    )
    def test_the_chosen_interface(self, name, several, verdict):
        _, found = network.check_interfaces(host({}), {"GLOO_SOCKET_IFNAME": name}, several)
        assert found.verdict == verdict

    def test_a_host_that_is_not_connected(self):
        first, _ = network.check_interfaces(host({}, (LO,)), {}, several_hosts=True)
        assert first.verdict == "problem"

    @pytest.mark.parametrize(
        ("addresses", "several", "verdict"),
        [
            (["10.0.0.1"], True, "ok"),
            (["127.0.0.1"], True, "problem"),
            (["127.0.0.1"], False, "ok"),
            ([], True, "problem"),
        ],
    )
    def test_the_meeting_point(self, addresses, several, verdict):
        environ = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
        [found] = network.check_master(host({"node0": addresses}), environ, several)
        assert found.verdict == verdict
        assert "MASTER_ADDR=node0" in found.found
        assert network.check_master(host({}), {}, several) == []

    def test_own_name(self):
        assert network.check_name(host({"node7": ["10.0.0.7"]})).verdict == "ok"
        assert network.check_name(host({})).verdict == "warning"

    def test_ipv6_from_the_kernels_file(self, tmp_path):
        addresses = ("fd000000000000000000000000000002", "fe80000000000000000000000000abcd")
        file = write(tmp_path, if_inet6="".join(f"{each} 04 40 00 82 eth0\n" for each in addresses))
        assert ipv6_cards(file / "if_inet6") == [Card("eth0", "fd00::2")]
        assert ipv6_cards(file / "none") == []

    def test_the_real_machine(self):
        here = network.host_here()
        assert any(is_loopback(card.address) for card in here.cards)
        assert resolve("no-such-host.invalid") == []
        assert can_bind("127.0.0.1")
        assert not can_bind("203.0.113.9")


class TestSockets:
    TCP = (
        "  sl  local_address rem_address   st\n"
        "   0: 0100007F:1F90 00000000:0000 0A 0\n   1: 00000000:733C 00000000:0000 0A 0\n"
        "   2: 0700000A:0016 0100000A:D431 01 0\n"
    )
    TCP6 = (
        "  sl  local_address\n   0: 00000000000000000000000000000000:733C 00000000000000000000000000000000:0000 0A 0\n"
    )

    def test_who_listens(self, tmp_path):
        found = sockets.listeners(write(tmp_path, tcp=self.TCP, tcp6=self.TCP6))
        assert [(each.address, each.port) for each in found] == [("0.0.0.0", 29500), ("127.0.0.1", 8080), ("::", 29500)]
        told = sockets.check_sockets(found, (LO, ETH), {"MASTER_PORT": "29500"})
        assert told.verdict == "ok"
        assert "the store is at 29500, on all interfaces" in told.found
        assert "without authentication" in told.way_out
        told = sockets.check_sockets(found, (LO, Card("eth0", "8.8.8.8")), {})
        assert told.verdict == "warning"
        assert "8.8.8.8 is a public address" in told.found

    def test_no_tables(self, tmp_path):
        assert sockets.listeners(tmp_path) == []


class TestLimits:
    def test_open_files(self):
        assert limits.check_files(None, 500).verdict == "ok"
        assert limits.check_files(1024, 4).verdict == "ok"
        found = limits.check_files(256, 4)
        assert (found.verdict, found.way_out) == ("warning", "Raise it before the run: ulimit -n 65536.")
        assert limits.check_files(1024, 100).verdict == "warning"

    def test_memory(self, tmp_path):
        assert limits.check_memory(tmp_path).found.startswith("unknown")
        root = write(tmp_path, proc__meminfo="MemTotal: 9000000 kB\nMemAvailable:    8388608 kB\n")
        assert limits.check_memory(root).found == "8.0 GiB available"
        (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
        (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
        assert limits.check_memory(root).found == "8.0 GiB available"
        (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{2**29}\n")
        found = limits.check_memory(root)
        assert found.verdict == "warning"
        assert "this container may use 0.5 GiB" in found.found

    def test_shared_memory(self, tmp_path, monkeypatch):
        assert limits.check_shared(tmp_path).verdict == "ok"
        (tmp_path / "dev/shm").mkdir(parents=True)
        monkeypatch.setattr(shutil, "disk_usage", lambda place: type("Usage", (), {"total": 64 * 2**20}))
        found = limits.check_shared(tmp_path)
        assert found.verdict == "warning"
        assert "--shm-size" in found.way_out

    @pytest.mark.parametrize(
        ("environ", "workers", "quota", "verdict", "words"),
        [
            ({"OMP_NUM_THREADS": "2"}, 4, None, "ok", ""),
            ({}, 1, None, "ok", ""),
            ({}, 4, None, "warning", "Set OMP_NUM_THREADS=2."),
            ({"OMP_NUM_THREADS": "8"}, 2, None, "warning", "Set OMP_NUM_THREADS=4."),
            ({"OMP_NUM_THREADS": "1"}, 16, None, "warning", "More workers than cores"),
            ({"OMP_NUM_THREADS": "2"}, 2, 2.0, "warning", "Set OMP_NUM_THREADS=1."),
        ],
    )
    def test_threads(self, environ, workers, quota, verdict, words):
        found = limits.check_threads(environ, workers, 8, quota)
        assert found.verdict == verdict
        assert words in found.way_out

    def test_the_containers_cores(self, tmp_path):
        assert limits.cgroup_cores(tmp_path) is None
        base = tmp_path / "sys/fs/cgroup"
        base.mkdir(parents=True)
        (base / "cpu.max").write_text("max 100000\n")
        assert limits.cgroup_cores(tmp_path) is None
        (base / "cpu.max").write_text("150000 100000\n")
        assert limits.cgroup_cores(tmp_path) == 1.5


class TestData:
    @pytest.fixture
    def folder(self, tmp_path):
        return write(tmp_path / "data", a="aaaa", sub__b="b" * 20_000)

    def same(self, one: data.Data, other: data.Data) -> Finding:
        return data.compare_data([vars(one), vars(other)])

    def test_a_copy_is_the_same(self, folder, tmp_path):
        copy = write(tmp_path / "copy", a="aaaa", sub__b="b" * 20_000)
        assert self.same(data.look_at(folder), data.look_at(copy)).verdict == "ok"
        assert data.check_data(folder, data.look_at(folder)).verdict == "ok"
        assert data.look_at(folder / "a").files == 1

    @pytest.mark.parametrize(
        ("name", "text", "part"),
        [("c", "", "number of files"), ("a", "aaa", "sizes"), ("a", "aaab", "sampled bytes")],
    )
    def test_what_differs(self, folder, name, text, part):
        before = data.look_at(folder)
        write(folder, **{name: text})
        found = self.same(before, data.look_at(folder))
        assert found.verdict == "problem"
        assert f"the {part} differ" in found.found

    def test_another_name(self, folder):
        before = data.look_at(folder)
        (folder / "a").rename(folder / "z")
        assert "the names differ" in self.same(before, data.look_at(folder)).found

    def test_nothing_there(self, tmp_path):
        found = data.check_data(tmp_path / "none", data.look_at(tmp_path / "none"))
        assert found.verdict == "problem"
        assert "No such file" in found.found
        assert data.check_data(tmp_path, data.look_at(tmp_path)).verdict == "problem"


class TestFindings:
    def test_the_same_of_all_is_said_once(self):
        one, other = ok("memory", "8 GiB"), problem("memory", "1 GiB", "Buy.")
        assert merged([[one], [one]]) == [one]
        assert [each.workers for each in merged([[one], [other], [one]])] == [(0, 2), (1,)]
        assert has_problem([one, other])
        assert not has_problem([one])

    def test_what_comes_from_the_network_is_taken_as_text(self):
        said = from_json({"name": "x", "verdict": "evil", "found": ["list"]}, 3)
        assert said == Finding("x", "problem", "['list']", "", (3,))
