"""Runs of a script: the recorder of exits, and the findings from how workers ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from laconic.tools.doctor.injection import Mark, faults
from laconic.tools.doctor.script import ScriptRun, WorkerExit, check_exit, check_handshake, check_injected, run_here

RUN = ScriptRun(Path(__file__), workers=3, faults=faults("stop:2@3,slow:1@4:1s"))
INJECTED = (Mark(2, 100.0, fault="stop:2@3"), Mark(1, 101.0, fault="slow:1@4:1s"))


def test_the_environment_of_a_run(monkeypatch, tmp_path):
    monkeypatch.setenv("LACONIC_OBSERVERS", "laconic.tools.doctor.injection:from_env,mine:make")
    environ = RUN.variables(tmp_path)
    assert environ["LACONIC_OBSERVERS"] == "mine:make,laconic.tools.doctor.injection:from_env"
    assert environ["LACONIC_INJECT"] == "stop:2@3,slow:1@4:1s"
    monkeypatch.delenv("LACONIC_OBSERVERS")
    dry = ScriptRun(Path(__file__)).variables(tmp_path)
    assert (dry["LACONIC_OBSERVERS"], dry["LACONIC_UNTIL"]) == ("laconic.tools.doctor.injection:from_env", "attach")


@pytest.fixture
def run(tmp_path):
    """Run a program as the only worker."""

    def run(program: str, limit_s: float = 60.0) -> WorkerExit:
        script = tmp_path / "script.py"
        script.write_text(program)
        return run_here(ScriptRun(script, workers=1, limit_s=limit_s))[0][0]

    return run


class TestEnds:
    def test_an_error(self, run):
        ended = run("raise ValueError('no')")
        assert (ended.code, ended.error_class, ended.killed) == (1, "ValueError", "")
        assert ended.reason == "ValueError: no"

    def test_a_script_that_does_not_end(self, run):
        ended = run("import time; time.sleep(60)", limit_s=0.5)
        assert (ended.code, ended.killed) == (-9, "killed at the time limit")

    def test_a_script_that_was_stopped_for_good(self, run):
        ended = run(
            "import json, os, pathlib, signal\n"
            "mark = json.dumps({'worker': 0, 'time_s': 1.0, 'fault': 'stop:0@1'})\n"
            "pathlib.Path(os.environ['LACONIC_MARKS'], 'marks-0.jsonl').write_text(mark)\n"
            "os.kill(os.getpid(), signal.SIGSTOP)"
        )
        assert (ended.code, ended.killed) == (-9, "stopped, and killed when all other workers had ended")


class TestFindings:
    def test_each_kind_of_end(self):
        exits = [
            WorkerExit(0, 1, ((99.0, "hello"), (104.5, "laconic.LostWorkerError: gone"), (104.6, "  Go on"))),
            WorkerExit(1, 1, ((104.0, "RuntimeError: boom"),)),
            WorkerExit(2, -9, (), "stopped, and killed when all other workers had ended"),
        ]
        first, second, third = (check_exit(each, INJECTED, 60.0) for each in exits)
        assert (first.severity, first.found) == (
            "ok",
            "exit code 1, 3.50 s after the fault: LostWorkerError: gone Go on",
        )
        assert second.severity == "warning"
        assert third.severity == "ok"
        assert third.found == "stopped, and killed when all other workers had ended, as the fault demands"

    def test_a_worker_that_hung_and_one_that_only_logged(self):
        exits = [
            WorkerExit(0, -9, (), "killed at the time limit"),
            WorkerExit(1, 0, ((100.5, "step 3: worker 2"),)),
            WorkerExit(2, 0, ()),
        ]
        hung, logged, silent = (check_exit(each, INJECTED, 60.0) for each in exits)
        assert hung.severity == "problem"
        assert logged.found == "exit code 0; it logged, 0.50 s after the fault: step 3: worker 2"
        assert (silent.severity, silent.found) == ("ok", "exit code 0")

    @pytest.mark.parametrize(
        ("timeout_s", "why", "way_out"),
        [
            (None, "or its timeout is longer.", "Give laconic.attach a timeout_s"),
            (3.0, "within its timeout_s of 3: it waits in code outside laconic.", "Look for a collective"),
            (90.0, "Its timeout_s is 90, longer than", "Raise --seconds above 90, or give laconic.attach a shorter"),
        ],
    )
    def test_the_advice_knows_the_timeout_that_the_script_has_given(self, timeout_s, why, way_out):
        hung = check_exit(WorkerExit(0, -9, (), "killed at the time limit", timeout_s=timeout_s), INJECTED, 60.0)
        assert why in hung.why
        assert hung.way_out.startswith(way_out)

    def test_a_warning_is_not_the_last_word(self):
        cpp = "[W1116 17:05:01.5 socket.cpp:462] [c10d] waitForInput: poll failed"
        logged = WorkerExit(1, 0, ((100.1, cpp), (100.5, "step 3: worker 2")))
        assert check_exit(logged, INJECTED, 60.0).found.endswith("0.50 s after the fault: step 3: worker 2")

    def test_faults_that_were_injected_and_not(self):
        done, missed = check_injected(RUN, INJECTED[:1])
        assert (done.severity, missed.severity) == ("ok", "problem")

    def test_handshakes(self):
        line = (1.0, "attach: the first weights of workers [1] are not those of the others")
        well = [WorkerExit(worker, 0, (line,), plan="ddp()") for worker in range(2)]
        fine, caution = check_handshake(well)
        assert (fine.severity, caution.severity, caution.way_out) == ("ok", "warning", "Seed all workers alike.")
        assert check_handshake([well[0], WorkerExit(1, 0, plan="qsr()")])[0].severity == "problem"
        [found] = check_handshake([WorkerExit(0, 0), WorkerExit(1, 0)])
        assert found.found == "workers 0, 1 ended without laconic.attach"
        [found] = check_handshake([WorkerExit(0, 1, ((1.0, "NameError: x"),)), well[1]])
        assert found.found == "worker 0 did not complete laconic.attach: NameError: x"
