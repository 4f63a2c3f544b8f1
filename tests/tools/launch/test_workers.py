"""Workers in real processes: failures are named, and no process is left behind."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import laconic
from laconic.session.observers import VARIABLE
from laconic.tools.compare.runs import REPORTER, Goal, Script, TrainingRun, launch, report_variables
from laconic.tools.errors import UsageError
from laconic.tools.lab.tasks import Lab
from laconic.tools.launch.output import SHOWN_LINES, WorkerError, last_error, last_traceback, read_log, reason
from laconic.tools.launch.workers import LOCK, PREFIX, Stopped, run_folder, stoppable, worker_environ
from tests.tools.launch.processes import descendants, eventually, running

ROOT = Path(__file__).parents[2]
TINY = TrainingRun(laconic.ddp(), Lab(layers=1, width=16, context=16), workers=2, goal=Goal(steps=3))
LONG = [
    "compare",
    "--no-baselines",
    "--plan",
    "ddp()",
    "--workers",
    "2",
    "--steps",
    "100000",
    "--layers",
    "1",
    "--width",
    "16",
]

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc to find processes")


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path_factory, monkeypatch) -> None:
    """Keep the logs of failed runs within the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))


@pytest.fixture
def training() -> Iterator[subprocess.Popen[str]]:
    """A `laconic compare` that has begun to train and would go on for hours."""
    command = [sys.executable, "-m", "laconic", *LONG]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("ddp() step=")
            yield process
        finally:
            process.kill()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


def test_a_run_ends_with_an_outcome_and_no_processes(tmp_path):
    before, environ = descendants(os.getpid()), dict(os.environ)
    outcome = launch(TINY, tmp_path)
    assert (outcome.plan, outcome.steps, outcome.workers) == (laconic.ddp(), 3, 2)
    assert outcome.wire_bytes == 3 * 4 * outcome.parameters + 48  # 48 for the handshake
    assert outcome.loss_final < outcome.loss_start
    assert descendants(os.getpid()) <= before
    assert dict(os.environ) == environ


@pytest.mark.slow
def test_a_worker_that_fails_at_start_is_named_with_its_error(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuchlink")
    before = descendants(os.getpid())
    words = r"worker \d of 2 of the lab's training failed at start, with plan ddp\(\): .*nosuchlink"
    with pytest.raises(WorkerError, match=words):
        launch(TINY, tmp_path)
    assert descendants(os.getpid()) <= before


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything(training, number):
    family = descendants(training.pid)
    assert len(family) >= 2
    training.send_signal(number)
    _, errors = training.communicate(timeout=60)
    assert training.returncode == 128 + number
    assert errors == f"laconic: stopped by {number.name}; no worker is left behind.\n"
    assert eventually(lambda: not running(family))


@needs_proc
@pytest.mark.slow
def test_workers_do_not_outlive_a_killed_launcher(training):
    family = descendants(training.pid)
    assert len(family) >= 2
    training.kill()
    training.communicate(timeout=60)
    assert eventually(lambda: not running(family))


@needs_proc
@pytest.mark.slow
def test_a_worker_killed_in_training_is_named_and_the_others_are_stopped(training):
    family = descendants(training.pid)
    os.kill(max(family), signal.SIGKILL)  # the newest process is a worker
    _, errors = training.communicate(timeout=60)
    assert training.returncode == 1
    assert "of 2 of the lab's training failed after step" in errors
    assert "killed by SIGKILL. The other workers were stopped." in errors
    assert "Traceback" not in errors
    assert eventually(lambda: not running(family))


def test_a_script_that_fails_is_named_with_its_error(script, tmp_path):
    script.write_text(
        "import os\nif os.environ['RANK'] == '1': raise ValueError('no data here.')\nimport time\ntime.sleep(60)"
    )
    words = r"worker 1 of 2 of --script .*train.py failed at start, with plan ddp\(\): ValueError: no data here\. The"
    with pytest.raises(WorkerError, match=words) as caught:
        launch(TrainingRun(laconic.ddp(), Script(script), workers=2, goal=Goal()), tmp_path)
    _, title, place, *_, error, last = str(caught.value).splitlines()
    assert title == "  Traceback (most recent call last):"
    assert place.startswith(f'    File "{script}", line 2')
    assert error == "  ValueError: no data here."
    said = re.fullmatch(r"The output of all workers is in (.*)\.", last)
    assert said is not None
    shutil.rmtree(tmp_path)  # as the folder of a run
    log = Path(said[1]).read_text()
    assert "==> worker 0, stdout <==\n" in log and "ValueError: no data here." in log.partition("worker 1, stderr")[2]


END = """
import os, sys, torch, laconic, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = laconic.attach(laconic.plan_from_env(), model, optimizer)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
session.report(loss=1.0)
dist.barrier()
"""


@pytest.mark.slow
def test_a_script_that_is_aborted_after_its_end_is_not_a_failure(script, tmp_path, caplog):
    script.write_text("import atexit, os\natexit.register(os.abort)\n" + END)
    outcome = launch(TrainingRun(laconic.ddp(), Script(script), workers=2, goal=Goal(steps=1)), tmp_path)
    assert outcome.loss_final == 1.0
    assert re.search(r"worker \d was killed by SIGABRT after its end; its results are used", caplog.text)


@pytest.mark.slow
def test_a_script_that_is_aborted_before_its_end_is_a_failure(script, tmp_path):
    script.write_text(END + "os.abort()")
    with pytest.raises(WorkerError, match=r"failed after step 1, with plan ddp\(\): killed by SIGABRT"):
        launch(TrainingRun(laconic.ddp(), Script(script), workers=2, goal=Goal()), tmp_path)


@pytest.mark.slow
def test_a_worker_that_lost_its_peer_is_not_the_cause(script, tmp_path):
    """Worker 0 fails first, because worker 1, which has an error of its own, is slow to exit."""
    script.write_text(
        f"import os, sys, time\nsaid = {str(tmp_path / 'said')!r}\n"
        "if os.environ['RANK'] == '0':\n"
        "    while not os.path.exists(said): time.sleep(0.05)\n"  # the test has a timeout
        "    raise RuntimeError('Connection closed by peer')\n"
        "print('[rank1]: ValueError: no data\\n[rank1]:   here', file=sys.stderr, flush=True)\n"
        "open(said, 'w').close()\ntime.sleep(60)"
    )
    with pytest.raises(WorkerError, match=r"worker 1 of 2 .*: ValueError: no data here\. The other"):
        launch(TrainingRun(laconic.ddp(), Script(script), workers=2, goal=Goal()), tmp_path)


@pytest.mark.parametrize("how", ["return", pytest.param("sys.exit(0)", marks=pytest.mark.slow)])
def test_a_worker_that_ends_early_is_named_beside_the_one_that_lost_it(script, tmp_path, how):
    """Worker 1 ends without an error, while worker 0 waits for it in a collective."""
    script.write_text(
        "import os, sys, time\ndef main():\n"
        f"    if os.environ['RANK'] == '1': {how}\n"
        "    time.sleep(2); raise RuntimeError('Connection closed by peer')\nmain()"
    )
    words = (
        r"worker 0 of 2 .*: RuntimeError: Connection closed by peer\. Worker 1 had ended without an error at "
        r"start, with plan ddp\(\): do all workers take the same number of steps\? The other workers were stopped"
    )
    with pytest.raises(WorkerError, match=words):
        launch(TrainingRun(laconic.ddp(), Script(script), workers=2, goal=Goal()), tmp_path)


def test_a_script_that_prints_without_end_does_not_fill_the_memory_or_the_kept_log(script, tmp_path):
    script.write_text(
        "import os, sys\nfor _ in range(64): os.write(2, (b'y' * 99 + b'\\n') * 10_000)\nraise ValueError('no data')"
    )
    with pytest.raises(WorkerError, match=r"ValueError: no data\.") as caught:
        launch(TrainingRun(laconic.ddp(), Script(script), workers=1, goal=Goal()), tmp_path)
    said = re.search(r"The output of all workers is in (.*)\.", str(caught.value))
    assert said is not None and Path(said[1]).stat().st_size < 2 << 20
    assert len(read_log(tmp_path, 0)) < 11_000


@needs_proc
@pytest.mark.parametrize("end", ["", "raise ValueError('no data')", "os.kill(os.getpid(), 9)"])
def test_what_a_script_has_started_does_not_outlive_the_run(script, tmp_path, end):
    file = tmp_path / "pid"
    script.write_text(
        "import os, pathlib, subprocess\n"
        f"pathlib.Path({str(file)!r}).write_text(str(subprocess.Popen(['sleep', '300']).pid))\n{end}"
    )
    with pytest.raises((WorkerError, UsageError)):
        launch(TrainingRun(laconic.ddp(), Script(script), workers=1, goal=Goal()), tmp_path)
    assert eventually(lambda: not running({int(file.read_text())}))


def test_a_script_that_is_killed(script, tmp_path):
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(WorkerError, match=r"failed at start, with plan .*: killed by SIGKILL"):
        launch(TrainingRun(laconic.ddp(), Script(script), workers=1, goal=Goal()), tmp_path)


def test_a_script_that_does_not_report(script, tmp_path):
    script.write_text("print('trained')")
    with pytest.raises(UsageError, match=r"it ended without a report from every worker. .*session.report\(loss=...\)"):
        launch(TrainingRun(laconic.ddp(), Script(script), workers=2, goal=Goal()), tmp_path)


@pytest.mark.slow
def test_a_script_that_chooses_its_own_plan(script, tmp_path):
    script.write_text(
        "import torch, laconic\n"
        "model = torch.nn.Linear(2, 2)\n"
        "session = laconic.attach(laconic.ddp(), model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "session.report(loss=1.0)\n"
    )
    ran = r"power_sgd\(rank=2, bits=4\) and ran ddp\(\)"
    plan = laconic.power_sgd(rank=2)
    words = rf"it was started with plan {ran}. Attach laconic.plan_from_env"
    with pytest.raises(UsageError, match=words):
        launch(TrainingRun(plan, Script(script), workers=1, goal=Goal()), tmp_path)


def test_the_reason_is_the_last_error_of_a_log():
    traceback = ["Traceback (most recent call last):", "  File 'x', line 1"]
    assert reason(1, [*traceback, "KeyError: 'a'", "Exception ignored in: <f>"]) == "KeyError: 'a'"
    late = [*traceback, "laconic.errors.DesyncError: it", "  is late."]
    assert reason(1, late) == "DesyncError: it is late."
    assert reason(-9, late) == "killed by SIGKILL; its last line: DesyncError: it is late."
    assert last_error(["some/file.py:3: UserWarning: slow"]) == []


def test_a_warning_is_not_the_reason():
    cpp = "[W1116 17:05:01.5 socket.cpp:462] [c10d] waitForInput: poll failed"
    warnings = ["train.py:3: UserWarning: slow", "  warnings.warn('slow')", cpp]
    assert reason(1, ["Traceback (most recent call last):", "KeyError: 'a'", *warnings]) == "KeyError: 'a'"
    aborted = ["terminate called after throwing an instance of 'E'", "  what():  closed by peer"]
    assert reason(-6, [*aborted, *warnings]) == "killed by SIGABRT; its last line: what():  closed by peer"
    assert reason(3, ["no more data", *warnings]) == "no more data"
    assert reason(-9, warnings[:1]).endswith("UserWarning: slow")
    assert reason(3, []) == "it exited with code 3"


def test_a_long_traceback_is_shortened():
    start = "Traceback (most recent call last):"
    lines = last_traceback([start, *["  f()"] * 99, "KeyError: 'a'", "  more", "later"])
    assert len(lines) == SHOWN_LINES
    assert lines[:2] == [start, "  ..."] and lines[-2:] == ["KeyError: 'a'", "  more"]
    assert last_traceback(["KeyError: 'a'"]) == []


def test_observers_of_the_user_stay(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert report_variables(TINY, tmp_path)[VARIABLE] == REPORTER
    monkeypatch.setenv(VARIABLE, "mine:observer")
    assert report_variables(TINY, tmp_path)[VARIABLE] == f"mine:observer,{REPORTER}"


def test_the_environment_of_workers(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    environ = worker_environ(1, 1000, port=1234)
    wanted = {"RANK": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "mine", "MASTER_PORT": "1234"}
    assert wanted.items() <= environ.items()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert worker_environ(1, 2, port=1234)["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    assert "GLOO_SOCKET_IFNAME" not in worker_environ(1, 2, port=None)  # of the host that it enters


def signalled_twice() -> None:
    with stoppable():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_is_raised_once_and_the_handlers_are_restored():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match="SIGTERM") as caught:
        signalled_twice()
    assert caught.value.signal_number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


HOLD = """
import sys, time
from laconic.tools.launch.workers import run_folder
with run_folder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_removed_at_the_end_of_its_block(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with run_folder() as folder:
        (folder / "file").write_text("something")
        with run_folder() as other:
            assert folder.exists()  # its owner is this process
            assert other != folder
    assert list(tmp_path.iterdir()) == []


def test_the_next_run_removes_the_folder_of_a_killed_process(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {"TMPDIR": str(tmp_path), "PATH": "/usr/bin"}
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        held = owner.stdout.readline().strip()
        (tmp_path / f"{PREFIX}strange").mkdir()  # without a lock file: it may be in use
        with run_folder():
            assert held in map(str, tmp_path.iterdir())
        owner.kill()
    assert held in map(str, tmp_path.iterdir())
    with run_folder():
        assert held not in map(str, tmp_path.iterdir())
    assert [path.name for path in tmp_path.iterdir()] == [f"{PREFIX}strange"]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc to find processes")
def test_the_next_run_ends_the_processes_that_a_killed_run_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    abandoned, running = tmp_path / f"{PREFIX}a", tmp_path / f"{PREFIX}b"
    for folder in (abandoned, running):
        folder.mkdir()
    (abandoned / LOCK).touch()
    sleepers = [
        subprocess.Popen(["sleep", "60"], env={**os.environ, "LACONIC_RUN_FOLDER": str(folder)})
        for folder in (abandoned, running)
    ]
    try:
        with run_folder():
            assert sleepers[0].wait(timeout=30) == -signal.SIGKILL
            assert sleepers[1].poll() is None and not abandoned.exists() and running.exists()
    finally:
        for each in sleepers:
            each.kill()
            each.wait()
