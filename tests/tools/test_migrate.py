"""`laconic migrate`: imports change and nothing else does; misuses are found, and correct scripts have no findings."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import laconic.tools
from laconic.cli.migrate import migrate
from laconic.tools.migrate import ParsedScript, ScriptChange, ScriptError

TORCH, OURS, OPTIM = "torch.distributed.algorithms", "laconic.algorithms", "torch.distributed.optim"
HOOKS, AVERAGING = f"{TORCH}.ddp_comm_hooks", f"{TORCH}.model_averaging"


def rewritten(text: str) -> str:
    return ParsedScript(text.encode()).rewritten().decode()


def found(text: str, kind: str = "misuse") -> list[ScriptChange]:
    return [finding for finding in ParsedScript(text.encode()).findings if finding.kind == kind]


# --- imports

IN_PLACE = [  # here only the path changes: {T} becomes {L}
    "from {T}.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook\n",
    "from {T}.model_averaging.averagers import PeriodicModelAverager as P  # why\n",
    "from {T}.ddp_comm_hooks import default_hooks as default, powerSGD\n",
    "from {T}.ddp_comm_hooks import (  # note\n    DDPCommHookType,\n\n    register_ddp_comm_hook  ,  # end\n  )\n",
    "from {T}.ddp_comm_hooks.default_hooks import *\n",
    "import {T}.model_averaging.hierarchical_model_averager as hsgd, os\n",
    "é = 'ü'; from {T}.ddp_comm_hooks.debugging_hooks import noop_hook; ß = 2\n",
    "if x:\n\n    # why\n    from \\\n  {T}.model_averaging.averagers import PeriodicModelAverager\n",
    "from {T}.model_averaging import utils",
    "import torch\nimport {T}.model_averaging.utils\nf({T}.model_averaging.utils.f, [{T}.model_averaging.utils.g.h])\n",
]
OTHERS = {
    f"import {OPTIM}.post_localSGD_optimizer as opt\n": f"import {OURS}.optim as opt\n",
    f"from {OPTIM} import PostLocalSGDOptimizer as P  # why\n": (
        f"from {OURS}.optim import PostLocalSGDOptimizer as P  # why\n"
    ),
    f"import {AVERAGING}.utils\na = {AVERAGING}.utils.f(torch.ones(1))\n": (
        f"import torch, {OURS}.model_averaging.utils\na = {OURS}.model_averaging.utils.f(torch.ones(1))\n"
    ),
}
REWRITES = {**{text.format(T=TORCH): text.format(T=OURS) for text in IN_PLACE}, **OTHERS}


@pytest.mark.parametrize("before", REWRITES)
def test_imports_change_and_nothing_else_does(before: str):
    changed = rewritten(before)
    assert changed == REWRITES[before]
    assert found(before, "import")
    assert rewritten(changed) == changed and ParsedScript(changed.encode()).findings == []


@pytest.mark.parametrize(
    "text",
    [
        f"from {HOOKS}.ddp_zero_hook import hook_with_zero_step\n",
        f"import {HOOKS}.optimizer_overlap_hooks as overlap\n",
        f"import torch\nimport torch.distributed as dist\nimport {OPTIM}\nfrom {OPTIM} import *\n",
        "from .averagers import PeriodicModelAverager\nfrom . import x\n",
        f"s = 'import {TORCH}.model_averaging.averagers'  # {TORCH}\n",
        "import torch.distributed as dist\ndef f(dist): dist.optim.PostLocalSGDOptimizer(o, a)\n",
        "from laconic.algorithms.optim import PostLocalSGDOptimizer\n",
        "",
    ],
)
def test_other_scripts_have_no_findings(text: str):
    assert ParsedScript(text.encode()).findings == [] and rewritten(text) == text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import torch.distributed as dist\ndist.optim.PostLocalSGDOptimizer(o, a)\n", 2),
        (f"import torch\n\n{AVERAGING}.averagers.PeriodicModelAverager(4)\n", 3),
        (f"import {HOOKS} as h\nh.optimizer_overlap_hooks.x()\nh.default_hooks.allreduce_hook\n", 3),
        (f"import torch\nimport {AVERAGING}.utils\nx = ({AVERAGING}\n  # why\n.utils.average_parameters)\n", 3),
        (f"\nfrom {OPTIM} import ZeroRedundancyOptimizer, PostLocalSGDOptimizer as P\n", 2),
        (f"from {OPTIM} import post_localSGD_optimizer\n", 1),
    ],
)
def test_what_only_a_person_can_change_is_listed(text: str, line: int):
    (finding,) = found(text, "by hand")
    assert finding.line == line and "laconic.algorithms" in finding.way_out
    rewritten(text)


def test_a_finding_has_place_reason_and_way_out():
    (finding,) = found(f"x = 1\nif x:\n    from {OPTIM} import (  # c\n  PostLocalSGDOptimizer as P)\n", "import")
    assert (finding.line, finding.column, finding.kind) == (3, 5, "import")
    assert finding.wrote == f"from {OPTIM} import PostLocalSGDOptimizer as P"
    assert "right where torch's modules are not" in finding.why
    assert finding.way_out == "Write: from laconic.algorithms.optim import PostLocalSGDOptimizer as P"


# --- misuses

AFTER_ZERO_GRAD = {
    "in one block": "for x in d:\n    loss.backward()\n    o.step()\n    o.zero_grad()\n    a.average_parameters(p)\n",
    "under an if": "for x in d:\n    o.zero_grad()\n    if i % 4 == 0:\n        a.average_parameters(p)\n",
    "around the loop": "for x in d:\n    a.average_parameters(p)\n    l.backward()\n    o.step()\n    o.zero_grad()\n",
    "in a method": "class T:\n    def end(self):\n        self.o.zero_grad()\n        self.a.average_parameters(p)\n",
}


@pytest.mark.parametrize("case", AFTER_ZERO_GRAD)
def test_averaging_after_zero_grad_is_found(case: str):
    (finding,) = found(AFTER_ZERO_GRAD[case])
    assert finding.rule == "averaging after zero_grad" and "average_parameters(p)" in finding.wrote
    assert "gradient is None" in finding.why and "between optimizer.step() and zero_grad()" in finding.way_out
    migrated = "from laconic.algorithms.model_averaging.averagers import PeriodicModelAverager\n"
    assert found(migrated + AFTER_ZERO_GRAD[case]) == []


@pytest.mark.parametrize(
    "text",
    [
        "for x in d:\n    l.backward()\n    o.step()\n    a.average_parameters(p)\n    o.zero_grad()\n",
        "for x in d:\n    o.zero_grad()\n    l.backward()\n    o.step()\n    a.average_parameters(p)\n",
        "for x in d:\n    o.zero_grad(set_to_none=False)\n    a.average_parameters(p)\n",
        f"from {AVERAGING} import utils\no.zero_grad()\nutils.average_parameters(p, None)\n",
        "def f():\n    o.zero_grad()\ndef g():\n    a.average_parameters(p)\n",
    ],
)
def test_averaging_with_gradients_is_not(text: str):
    assert found(text) == []


@pytest.mark.parametrize(
    ("averager", "start", "is_misuse"),
    [
        ("PeriodicModelAverager(4)", "200", True),
        ("averagers.PeriodicModelAverager(period=4, warmup_steps=args.warm)", "args.start", True),
        ("HierarchicalModelAverager(d, WARM)", "100", True),
        ("PeriodicModelAverager(4, WARM)", "99", False),
        ("PeriodicModelAverager(4, warmup_steps=args.warm)", "args.warm", False),
        ("PeriodicModelAverager(4, **settings)", "100", False),
        ("PeriodicModelAverager(4)", "0", False),
    ],
)
def test_different_warm_ups_are_found(averager: str, start: str, is_misuse: bool):
    findings = found(f"WARM = 99\nstate = PostLocalSGDState(None, None, {start})\na = {averager}\n")
    assert [(finding.rule, finding.line) for finding in findings] == [("warm-up mismatch", 3)] * is_misuse
    assert all("in PostLocalSGDState (line 2)" in finding.why for finding in findings)
    assert found(f"a = {averager}\n") == []


SAVES = {
    "rank": "if dist.get_rank() == 0:\n    torch.save(state, 'f')\n",
    "not rank": "if not rank and x:\n    pickle.dump(state, f)\n",
    "main process": "if accelerator.is_main_process:\n    accelerator.save(state, 'f')\n",
    "a dict made before": "ckpt = {'hook': state}\nif rank == 0:\n    torch.save(ckpt, 'f')\n",
    "an item set before": "ckpt = {}\nckpt['hook'] = state\nif rank == 0:\n    save_checkpoint(ckpt)\n",
    "state_dict": "if rank == 0:\n  for i in x:\n    torch.save([state.state_dict()], 'f')\n",
}


@pytest.mark.parametrize("case", SAVES)
def test_a_hook_state_saved_by_worker_0_only_is_found(case: str):
    text = f"from {HOOKS}.powerSGD_hook import PowerSGDState\nstate = PowerSGDState(None)\n{SAVES[case]}"
    (finding,) = found(text)
    assert finding.rule == "hook state of worker 0 only"
    assert "residual" in finding.why and "every worker" in finding.way_out
    assert len(found(rewritten(text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "torch.save(state, f'hook-{rank}.pt')\n",
        "if rank == 0:\n    torch.save(model.state_dict(), 'f')\n",
        "if get_rank() == 0 or f() == 0:\n    torch.save(state, 'f')\n",
        "if rank == 0:\n    print(state)\nelse:\n    torch.save(state, 'f')\n",
        "if not is_rank_zero():\n    torch.save(state, 'f')\n",
        "if rank == 0:\n    torch.save({'state': model, 'iter': state.iter}, 'f')\n",
    ],
)
def test_other_saves_are_not(text: str):
    assert found(f"state = powerSGD.PowerSGDState(None)\n{text}") == []


def test_a_scaler_with_averaging_is_found():
    scaler = "scaler = torch.cuda.amp.GradScaler()\n"
    wrapped = f"from {OPTIM} import PostLocalSGDOptimizer\nopt = PostLocalSGDOptimizer(o, a)\n"
    text = f"{wrapped}{scaler}scaler.scale(loss).backward()\nscaler.step(opt)\n"
    (finding,) = found(text)
    assert (finding.rule, finding.line) == ("GradScaler with averaging", 5)
    assert "pytorch#76282" in finding.why and "laconic.algorithms.optim" in finding.way_out
    assert found(rewritten(text)) == []
    assert len(found(f"{scaler}l.backward()\nscaler.step(opt)\naverager.average_parameters(p)\n")) == 1
    assert found(f"{scaler}scaler.step(opt)\n") == found(f"{wrapped}scheduler.step(opt)\n{scaler}") == []


# --- the command

LINE = f"from {AVERAGING}.utils import average_parameters"
NEW_LINE = "from laconic.algorithms.model_averaging.utils import average_parameters"
app = typer.Typer()
app.command()(migrate)


def put(folder: Path, text: str, encoding: str = "utf-8") -> Path:
    path = folder / "train.py"
    path.write_bytes(text.encode(encoding))
    return path


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_lists_and_changes_nothing(tmp_path: Path):
    path = put(tmp_path, f"{LINE}\n")
    code, out, _ = run(path)
    assert code == 1 and path.read_text() == f"{LINE}\n"
    assert f"{path}:1:1: import: {LINE}" in out and f"Write: {NEW_LINE}" in out
    assert "imports to change: 1, others: 0; --write changes the imports." in out


def test_the_command_writes_the_imports_through_a_link_and_keeps_the_mode(tmp_path: Path):
    path, link = put(tmp_path, LINE + "\n"), tmp_path / "link.py"
    path.chmod(0o750)
    link.symlink_to(path)
    code, out, _ = run(link, "--write")
    assert (code, path.read_text()) == (0, NEW_LINE + "\n")
    assert link.is_symlink() and stat.S_IMODE(path.stat().st_mode) == 0o750
    assert f"{link}:1:1: changed: {LINE}" in out and "written, 1 settled, 0 left." in out
    before = path.stat().st_mtime_ns
    code, out, _ = run(path, "--write")
    assert code == 0 and "nothing to change" in out and path.stat().st_mtime_ns == before


ENCODED = {
    "utf-8": "x = 1\r\n{}\ny = 2\r\n\x0c\n# c",
    "utf-8-sig": "é = 'ü'\n{}  # ö\n",
    "latin-1": "# -*- coding: latin-1 -*-\né = 'ü'\n{}  # ö\n",
}


@pytest.mark.parametrize(("encoding", "text"), ENCODED.items())
def test_line_ends_and_encodings_are_kept(tmp_path: Path, encoding: str, text: str):
    path = put(tmp_path, text.format(LINE), encoding)
    assert run("--write", path)[0] == 0
    assert path.read_bytes() == text.format(NEW_LINE).encode(encoding)


def test_what_write_leaves_is_exit_code_1(tmp_path: Path):
    path = put(tmp_path, f"{LINE}\nstate = PowerSGDState(None)\nif rank == 0:\n    torch.save(state, 'f')\n")
    code, out, _ = run("--write", path)
    assert code == 1 and "written, 1 settled, 1 left." in out
    assert f"{path}:4:5: misuse (hook state of worker 0 only): torch.save(state, 'f')" in out


def test_errors_are_exit_code_2_and_other_files_are_still_read(tmp_path: Path):
    good, bad, notebook = put(tmp_path, LINE + "\n"), tmp_path / "bad.py", tmp_path / "run.ipynb"
    bad.write_text(f"{LINE}\ndef f(:\n")
    notebook.write_text("{}")
    code, out, err = run("--write", tmp_path / "nowhere.py", bad, tmp_path, notebook, good)
    assert code == 2
    assert "nowhere.py: there is no such file." in err and "Is a directory" in err
    assert "bad.py:2: invalid syntax" in err and bad.read_text() == f"{LINE}\ndef f(:\n"
    assert "a notebook is not a script" in err
    assert "written, 1 settled" in out


@pytest.mark.parametrize(
    "code", [b"x = '\xff'\n", b"# coding: no-such-thing\n", b"x = '\x00'\n", b"x = " + b"(" * 5000]
)
def test_a_file_that_is_not_python_is_an_error(code: bytes):
    with pytest.raises(ScriptError, match=r"script:1: .*nothing was changed"):
        ParsedScript(code)


@pytest.mark.parametrize("text", [f"{LINE}\rx = 1\r", f"{LINE}\n\x0cx = 1\n"])
def test_a_file_that_libcst_would_change_is_not_written(tmp_path: Path, text: str):
    path = put(tmp_path, text)
    assert run(path)[0] == 1
    code, _, err = run(path, "--write")
    assert code == 2 and "does not keep every byte" in err and "by hand" in err
    assert path.read_bytes() == text.encode()


def test_without_libcst_the_error_gives_the_extra_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "laconic.tools.migrate")
    monkeypatch.delattr(laconic.tools, "migrate")
    monkeypatch.setitem(sys.modules, "libcst", None)
    code, _, err = run(put(tmp_path, LINE + "\n"))
    assert code == 2 and 'pip install "laconic-train[migrate]"' in err
