"""`laconic doctor` as it is typed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from laconic.doctor.finding import problem
from laconic.doctor.injection import faults
from laconic.doctor.verdicts import check_faults_made, check_handshake, check_survivors, is_typed
from laconic.doctor.visit import Ended, Mark, Visit
from tests.cli.conftest import here

__all__ = ["here"]

# torch's launcher leaves the log files of a command to the garbage collector
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

TRAINING = """
import sys, torch, torch.distributed as dist, laconic
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
laconic.attach(laconic.plan_from_env(), model, optimizer, timeout_s=3)
for _ in range(int(sys.argv[1])):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
"""


def test_this_machine(here, tmp_path):
    path = tmp_path / "findings.json"
    ended = here("doctor", "--json", str(path), "--data", str(tmp_path))
    told = json.loads(path.read_text())
    assert {"versions", "gloo", "interfaces", "sockets", "open files", "memory"} <= {
        f["name"] for f in told["findings"]
    }
    assert set(told["versions"]) == {"laconic", "torch", "python"}
    assert ended.code == int(not told["ok"]) == 1
    assert f"problem: data: --data {tmp_path}: the folder holds no files\n    Is the disk mounted" in ended.out
    assert not ended.out.splitlines()[-1].startswith("no problem")


def test_a_table_in_a_terminal(capsys, monkeypatch):
    from laconic.cli import doctor

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    doctor._show([problem("clocks [x]", "far", "Mend.")], plain=False)
    said = capsys.readouterr().out
    assert "what to do" in said
    assert "clocks [x]" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--inject", "burn:1@2", "--script", "SCRIPT"], "--inject 'burn:1@2' is no fault"),
        (["--inject", "kill:1@2"], "--inject kill:1@2: faults need a training. Give one with --script train.py."),
        (["--inject", "kill:2@2", "--workers", "2", "--script", "SCRIPT"], "there is no worker 2 among 2"),
        (["--", "5"], "-- 5: these are for a script."),
        (["--script", "no/such.py"], "--script no/such.py: there is no such file."),
        (["--script", "SCRIPT", "--workers", "0"], "--workers 0: there must be at least 1."),
        (["--script", "SCRIPT", "--seconds", "0"], "--seconds 0: it must be a number above 0."),
        (["--timeout", "0"], "--timeout 0: it must be a number above 0."),
        (["--json", "."], "--json .: that is a folder."),
    ],
)
def test_mistakes(here, tmp_path, arguments, words):
    script = tmp_path / "train.py"
    script.touch()
    ended = here("doctor", *(str(script) if word == "SCRIPT" else word for word in arguments))
    assert (ended.code, ended.out) == (2, "")
    assert words in " ".join(ended.err.split())


def test_faults_are_not_for_workers_that_run_already(here, monkeypatch):
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    ended = here("doctor", "--inject", "kill:1@2")
    assert ended.code == 2
    assert "torchrun has already started the workers" in ended.err


def test_a_killed_worker_and_what_the_others_say(here, tmp_path):
    script, path = tmp_path / "train.py", tmp_path / "out.json"
    script.write_text(TRAINING)
    given = ["--script", str(script), "--workers", "2", "--seconds", "60", "--json", str(path)]
    ended = here("doctor", "--inject", "kill:1@3", "--inject", "nan:0@99", *given, "--", "20")
    found = {each["name"]: each for each in json.loads(path.read_text())["findings"]}
    assert found["fault kill:1@3"]["verdict"] == "ok"
    assert found["fault nan:0@99"]["found"] == "it was not made: worker 0 never came to step 99"
    assert found["worker 1"]["found"] == "killed by SIGKILL, as asked"
    assert found["worker 0"]["verdict"] == "ok", found["worker 0"]
    assert "s after the fault: laconic.comm.timeout.LostWorkerError: step 3" in found["worker 0"]["found"]
    assert ended.code == 1  # a fault was not made


class TestVerdicts:
    VISIT = Visit(Path(__file__), workers=3, faults=faults("stop:2@3,slow:1@4:1s"))
    MARKS = (Mark("stop:2@3", 100.0), Mark("slow:1@4:1s", 101.0))

    def test_each_kind_of_end(self):
        ended = [
            Ended(0, 1, 105.0, ((99.0, "hello"), (104.5, "laconic.LostWorkerError: gone"), (104.6, "  Go on"))),
            Ended(1, 1, 105.0, ((104.0, "RuntimeError: boom"),)),
            Ended(2, -9, 106.0, (), "it was stopped for good, and all others had ended"),
        ]
        first, second, third = check_survivors(self.VISIT, ended, self.MARKS)
        assert (first.verdict, first.found) == (
            "ok",
            "exit code 1, 3.50 s after the fault: laconic.LostWorkerError: gone",
        )
        assert second.verdict == "warning"
        assert (third.verdict, third.found.endswith("so it was ended, as asked")) == ("ok", True)

    def test_a_worker_that_hung_and_one_that_only_spoke(self):
        hung, spoke, silent = check_survivors(
            self.VISIT,
            [
                Ended(0, -9, 200.0, (), "it took too long"),
                Ended(1, 0, 200.0, ((100.5, "step 3: worker 2"),)),
                Ended(2, 0, 200.0, ()),
            ],
            self.MARKS,
        )
        assert hung.verdict == "problem"
        assert spoke.found == "ended well, and said 0.50 s after the fault: step 3: worker 2"
        assert (silent.verdict, silent.found) == ("ok", "ended well")

    def test_faults_made_and_not(self):
        made, missed = check_faults_made(self.VISIT, self.MARKS[:1])
        assert (made.verdict, missed.verdict) == ("ok", "problem")

    def test_handshakes(self):
        attached = {"plan": "ddp()", "workers": 2}
        well = [Ended(w, 0, 1.0, ((1.0, "attach: the first weights of workers [1] are not"),)) for w in range(2)]
        fine, caution = check_handshake(well, [attached, attached])
        assert (fine.verdict, caution.verdict) == ("ok", "warning")
        assert check_handshake(well, [attached, attached | {"plan": "qsr()"}])[0].verdict == "problem"
        [found] = check_handshake([Ended(0, 0, 1.0, ()), Ended(1, 0, 1.0, ())], [None, None])
        assert found.found == "workers 0, 1 ended without laconic.session.session"
        [found] = check_handshake([Ended(0, 1, 1.0, ((1.0, "NameError: x"),)), well[1]], [None, attached])
        assert found.found == "worker 0 did not come through laconic.session.session: NameError: x"

    def test_typed(self):
        assert is_typed("LostWorkerError")
        assert not is_typed("RuntimeError")
        assert not is_typed("Every")
