"""Runs of a script: the recorder of exits, and the findings from how workers ended."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from laconic.doctor import exit_recorder
from laconic.doctor.injection import faults
from laconic.doctor.script_findings import check_exits, check_handshake, check_injected, is_laconic_error
from laconic.doctor.script_run import InjectedFault, ScriptRun, WorkerExit, exit_from_json

RUN = ScriptRun(Path(__file__), workers=3, faults=faults("stop:2@3,slow:1@4:1s"))
INJECTED = (InjectedFault("stop:2@3", 100.0), InjectedFault("slow:1@4:1s", 101.0))


def test_the_environment_of_a_run(monkeypatch, tmp_path):
    monkeypatch.setenv("LACONIC_OBSERVERS", "laconic.doctor.injection:from_env,mine:make")
    environ = RUN.environ(tmp_path)
    assert environ["LACONIC_OBSERVERS"] == "mine:make,laconic.doctor.injection:from_env"
    assert environ["LACONIC_INJECT"] == "stop:2@3,slow:1@4:1s"
    monkeypatch.delenv("LACONIC_OBSERVERS")
    dry = ScriptRun(Path(__file__)).environ(tmp_path)
    assert (dry["LACONIC_OBSERVERS"], dry["LACONIC_UNTIL"]) == ("laconic.doctor.injection:from_env", "attach")


def _record(folder: Path, limit_s: float, program: str) -> WorkerExit:
    command = [sys.executable, exit_recorder.__file__, str(limit_s), str(folder), sys.executable, "-c", program]
    environ = {"RANK": "0", "WORLD_SIZE": "1"}
    subprocess.run(command, env=environ, check=True, capture_output=True, timeout=60)
    return exit_from_json(0, json.loads(exit_recorder.exit_file(folder, 0).read_text()) | {"plan": None})


class TestRecorder:
    def test_an_error(self, tmp_path):
        ended = _record(tmp_path, 60, "raise ValueError('no')")
        assert (ended.code, ended.error_class, ended.killed) == (1, "ValueError", "")
        assert ended.reason == "ValueError: no"

    def test_a_script_that_does_not_end(self, tmp_path):
        ended = _record(tmp_path, 0.5, "import time; time.sleep(60)")
        assert (ended.code, ended.killed) == (-9, "killed at the time limit")

    def test_a_script_that_was_stopped_for_good(self, tmp_path):
        exit_recorder.faults_file(tmp_path, 0).write_text('{"fault": "stop:0@1"}\n')
        ended = _record(tmp_path, 60, "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
        assert (ended.code, ended.killed) == (-9, "stopped, and killed when all other workers had ended")


class TestFindings:
    def test_each_kind_of_end(self):
        exits = [
            WorkerExit(0, 1, ((99.0, "hello"), (104.5, "laconic.LostWorkerError: gone"), (104.6, "  Go on"))),
            WorkerExit(1, 1, ((104.0, "RuntimeError: boom"),)),
            WorkerExit(2, -9, (), "stopped, and killed when all other workers had ended"),
        ]
        first, second, third = check_exits(RUN, exits, INJECTED)
        assert (first.verdict, first.found) == (
            "ok",
            "exit code 1, 3.50 s after the fault: laconic.LostWorkerError: gone",
        )
        assert second.verdict == "warning"
        assert third.verdict == "ok"
        assert third.found == "stopped, and killed when all other workers had ended, as the fault demands"

    def test_a_worker_that_hung_and_one_that_only_logged(self):
        exits = [
            WorkerExit(0, -9, (), "killed at the time limit"),
            WorkerExit(1, 0, ((100.5, "step 3: worker 2"),)),
            WorkerExit(2, 0, ()),
        ]
        hung, logged, silent = check_exits(RUN, exits, INJECTED)
        assert hung.verdict == "problem"
        assert logged.found == "exit code 0; it logged, 0.50 s after the fault: step 3: worker 2"
        assert (silent.verdict, silent.found) == ("ok", "exit code 0")

    def test_faults_that_were_injected_and_not(self):
        done, missed = check_injected(RUN, INJECTED[:1])
        assert (done.verdict, missed.verdict) == ("ok", "problem")

    def test_handshakes(self):
        line = (1.0, "attach: the first weights of workers [1] are not those of the others")
        well = [WorkerExit(worker, 0, (line,), plan="ddp()") for worker in range(2)]
        fine, caution = check_handshake(well)
        assert (fine.verdict, caution.verdict, caution.way_out) == ("ok", "warning", "Seed all workers alike.")
        assert check_handshake([well[0], WorkerExit(1, 0, plan="qsr()")])[0].verdict == "problem"
        [found] = check_handshake([WorkerExit(0, 0), WorkerExit(1, 0)])
        assert found.found == "workers 0, 1 ended without laconic.attach"
        [found] = check_handshake([WorkerExit(0, 1, ((1.0, "NameError: x"),)), well[1]])
        assert found.found == "worker 0 did not complete laconic.attach: NameError: x"

    def test_errors_of_laconic(self):
        assert is_laconic_error("LostWorkerError")
        assert not is_laconic_error("RuntimeError")
        assert not is_laconic_error("Every")
