"""A user's own training, run once for each plan.

Any script that torchrun could start will do, if it takes its plan from `laconic.plan_from_env()` and tells its losses
with `session.report(loss=...)`. Its workers are started by the same launcher as the lab's, end with it in the same
ways, and are read through the same files; what they print goes to a log, of which a failure shows the last line.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

import laconic
from laconic.compare.lab.training import Outcome
from laconic.compare.launch import Network, WorkerError, environment, killed_by, run_elastic
from laconic.compare.progress import Tail
from laconic.compare.records import curve
from laconic.compare.reporter import FOLDER, about_file, goal_file, progress_file
from laconic.compare.reporting import Goal
from laconic.compare.settings import LabError, check_goal
from laconic.compare.slow_link import PROGRAM


@dataclass(frozen=True)
class Script:
    """One run of a user's script."""

    plan: str
    script: Path
    arguments: tuple[str, ...] = ()
    workers: int = 4
    steps: int | None = None
    seconds: float | None = None
    until_loss: float | None = None

    def __post_init__(self) -> None:
        laconic.plan(self.plan)
        check_goal(self.seconds, self.until_loss)
        for name, value in (("workers", self.workers), ("steps", self.steps)):
            if value is not None and value < 1:
                raise LabError(f"--{name} {value}: there must be at least 1. Use --{name} 1 or more.")
        if not self.script.is_file():
            raise LabError(f"--script {self.script}: there is no such file. Give the path of a training script.")

    @property
    def goal(self) -> Goal:
        """When the script is told that it is enough."""
        return Goal(self.steps, self.seconds, self.until_loss)


def launch_script(run: Script, folder: Path, network: Network) -> Outcome:
    """Runs the script to its end, and says how it went."""
    computed = None if network.computed is None else str(network.computed)
    goal_file(folder).write_text(json.dumps(asdict(run.goal) | {"computed": computed}))
    hosts = json.dumps(None if network.hosts is None else asdict(network.hosts))
    command = (str(PROGRAM), "enter", hosts, sys.executable, str(run.script), *run.arguments)
    try:
        changes = {"LACONIC_PLAN": run.plan, FOLDER: str(folder)}
        with environment(changes, run.workers, hosts=hosts != "null"):
            run_elastic(run.workers, folder, network.port, sys.executable, *command)
    except ChildFailedError as error:
        raise _script_error(error, run, folder) from None
    return _outcome(run, folder)


def _outcome(run: Script, folder: Path) -> Outcome:
    told = [Tail(progress_file(folder, worker)).news() for worker in range(run.workers)]
    if not all(told):
        raise LabError(
            f"--script {run.script}: it ended without a report from every worker. After each step, let every worker "
            "call session.report(loss=...), where session = laconic.attach(laconic.plan_from_env(), model, optimizer)."
        )
    about = json.loads(about_file(folder).read_text())
    plan = laconic.plan(run.plan)
    if about["plan"] != repr(plan):
        raise LabError(
            f"--script {run.script}: it was to run {plan} and ran {about['plan']}. "
            "Let it attach laconic.plan_from_env()."
        )
    points, last = curve(told), told[0][-1]
    return Outcome(
        plan=str(plan),
        model=run.script.name,
        parameters=about["parameters"],
        workers=run.workers,
        steps=last.step,
        seconds=last.seconds,
        talking_seconds=last.talking_s,
        tokens_per_s=sum(lines[-1].tokens_per_s for lines in told),
        sent_bytes=last.sent_bytes,
        wire_bytes=last.wire_bytes,
        network_bytes=last.wire_bytes + last.framing_bytes,
        loss_start=points[0].loss,
        loss_final=points[-1].loss,
        loss_of="training",
        ended=last.ended or "steps",
        until_loss=run.until_loss,
        level_bytes=last.level_bytes,
    )


def _script_error(error: ChildFailedError, run: Script, folder: Path) -> WorkerError:
    worker, failure = error.get_first_failure()
    logs = sorted(folder.glob(f"*/attempt_0/{failure.local_rank}/stderr.log"))
    lines = [line.strip() for log in logs for line in log.read_text(errors="replace").splitlines() if line.strip()]
    words = lines[-1] if lines and failure.exitcode >= 0 else killed_by(failure.exitcode)
    return WorkerError(
        f"worker {worker} of {run.workers} of {run.script} failed, with plan {run.plan}: {words.rstrip('.')}. "
        "The other workers were stopped."
    )
