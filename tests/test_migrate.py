"""`laconic migrate`: imports change and nothing else does; misuses are found, and correct scripts have no findings."""

from __future__ import annotations

import ast
import os
import stat
import sys
import textwrap
from pathlib import Path

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import laconic
from laconic.cli.migrate import migrate
from laconic.migrate import Finding, Script, ScriptError, check, read_script, remaining, rewrite, write
from laconic.migrate.imports import twin_of

TORCH, OURS, OPTIM = "torch.distributed.algorithms", "laconic.algorithms", "torch.distributed.optim"
HOOKS, AVERAGING = f"{TORCH}.ddp_comm_hooks", f"{TORCH}.model_averaging"


def script(text: str) -> Script:
    return Script(Path("train.py"), text)


def rewritten(text: str) -> str:
    return rewrite(script(text)).text


def found(text: str, kind: str = "misuse") -> list[Finding]:
    return [finding for finding in check(script(text)) if finding.kind == kind]


# --- imports

IN_PLACE = [  # here only the path is another: {T} becomes {L}
    "from {T}.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook\n",
    "from {T}.model_averaging.averagers import PeriodicModelAverager as P  # why\n",
    "from {T}.ddp_comm_hooks import default_hooks as default, powerSGD_hook\n",
    "from {T}.ddp_comm_hooks import (  # note\n    DDPCommHookType,\n\n    register_ddp_comm_hook  ,  # end\n  )\n",
    "from {T} import ddp_comm_hooks, model_averaging\n",
    "from {T}.ddp_comm_hooks.default_hooks import *\n",
    "import {T}.model_averaging.hierarchical_model_averager as hsgd, os\n",
    "é = 'ü'; from {T}.ddp_comm_hooks.debugging_hooks import noop_hook; ß = 2\n",
    "if x:\n\n    # why\n    from \\\n  {T}.model_averaging.averagers import PeriodicModelAverager\n",
    "from {T}.model_averaging import utils",
    "import torch\nimport {T}.model_averaging.utils\na = ({T}.model_averaging.utils.average_parameters(4))  # é\n",
    "import torch\nimport {T}.model_averaging.utils\nf({T}.model_averaging.utils, [({T}.model_averaging.utils.f)])\n",
]
L_OPTIM, L_HOOKS = "from laconic.algorithms.optim import", "from laconic.algorithms.ddp_comm_hooks import"
OTHERS = {
    f"from {HOOKS} import default, powerSGD as p\n": f"{L_HOOKS} default_hooks as default, powerSGD_hook as p\n",
    "from torch.distributed import algorithms\nalgorithms.model_averaging\n": (
        "from laconic import algorithms\nalgorithms.model_averaging\n"
    ),
    f"import {OPTIM}.post_localSGD_optimizer as opt\n": "import laconic.algorithms.optim as opt\n",
    "from torch . distributed.optim import PostLocalSGDOptimizer\n": f"{L_OPTIM} PostLocalSGDOptimizer\n",
    f"from {OPTIM} import Z, PostLocalSGDOptimizer  # both\n": (
        f"{L_OPTIM} PostLocalSGDOptimizer\nfrom {OPTIM} import Z  # both\n"
    ),
    f"# above\nfrom {OPTIM} import PostLocalSGDOptimizer as P, Z\n": (
        f"# above\n{L_OPTIM} PostLocalSGDOptimizer as P\nfrom {OPTIM} import Z\n"
    ),
    f"from {OPTIM} import PostLocalSGDOptimizer, post_localSGD_optimizer\n": (
        f"{L_OPTIM} PostLocalSGDOptimizer\nfrom laconic.algorithms import optim as post_localSGD_optimizer\n"
    ),
    f"from {OPTIM} import Z, \\\n    PostLocalSGDOptimizer\n": (
        f"{L_OPTIM} PostLocalSGDOptimizer\nfrom {OPTIM} import Z\n"
    ),
    f"from {HOOKS} import (ddp_zero_hook, default_hooks)\n": (
        f"{L_HOOKS} (default_hooks)\nfrom {HOOKS} import (ddp_zero_hook)\n"
    ),
    f"from {HOOKS} import (\n    default_hooks,  # one\n    ddp_zero_hook,  # two\n    powerSGD_hook as p,\n)\n": (
        f"{L_HOOKS} (\n    default_hooks,  # one\n    powerSGD_hook as p,\n)\n"
        f"from {HOOKS} import (\n    ddp_zero_hook,  # two\n)\n"
    ),
    f"from {HOOKS} import (  # noqa\n    ddp_zero_hook\n    , default_hooks  # end\n)\n": (
        f"{L_HOOKS} (  # noqa\n    default_hooks  # end\n)\nfrom {HOOKS} import (  # noqa\n    ddp_zero_hook\n)\n"
    ),
    f"try:\n    from {OPTIM} import A, PostLocalSGDOptimizer\nexcept E: 0\n": (
        f"try:\n    {L_OPTIM} PostLocalSGDOptimizer\n    from {OPTIM} import A\nexcept E: 0\n"
    ),
    f"if x: from {OPTIM} import A, PostLocalSGDOptimizer; y = 1\n": (
        f"if x: {L_OPTIM} PostLocalSGDOptimizer; from {OPTIM} import A; y = 1\n"
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
    assert rewritten(changed) == changed and remaining(check(script(changed))) == []


@pytest.mark.parametrize(
    "text",
    [
        f"from {TORCH}.join import Join\n",
        f"from {TORCH} import Join\n",
        f"from {HOOKS}.ddp_zero_hook import hook_with_zero_step\n",
        f"import {HOOKS}.optimizer_overlap_hooks as overlap\n",
        f"from {HOOKS}.ddp_zero_hook import *\n",
    ],
)
def test_an_import_without_a_twin_stays(text: str):
    (finding,) = check(script(text))
    assert finding.kind == "stays" and "has no twin" in finding.why
    assert rewritten(text) == text and remaining([finding]) == []


@pytest.mark.parametrize(
    "text",
    [
        f"import torch\nimport torch.distributed as dist\nimport {OPTIM}\nfrom {OPTIM} import *\n",
        f"from {OPTIM} import ZeroRedundancyOptimizer\n",
        "from .averagers import PeriodicModelAverager\nfrom . import x\n",
        "from mine.distributed.algorithms.model_averaging import averagers\n",
        f"s = 'import {TORCH}.model_averaging.averagers'  # {TORCH}\n",
        "import torch.distributed as dist\ndef f(dist): dist.optim.PostLocalSGDOptimizer(o, a)\n",
        "from laconic.algorithms.optim import PostLocalSGDOptimizer\n",
        "",
    ],
)
def test_other_scripts_have_no_findings(text: str):
    assert check(script(text)) == [] and rewritten(text) == text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import torch.distributed as dist\ndist.optim.PostLocalSGDOptimizer(o, a)\n", 2),
        (f"import torch\n\n{AVERAGING}.averagers.PeriodicModelAverager(4)\n", 3),
        (f"from {HOOKS} import (\n  powerSGD\n)\nimport {OPTIM} as o\no.PostLocalSGDOptimizer()\n", 5),
        (f"import torch\nimport {AVERAGING}.utils\nx = ({AVERAGING}\n  # why\n.utils.average_parameters)\n", 3),
    ],
)
def test_a_path_that_only_a_person_can_change_is_listed(text: str, line: int):
    (finding,) = found(text, "by hand")
    assert finding.line == line and "laconic.algorithms" in finding.way_out
    rewritten(text)


@pytest.mark.parametrize(
    "text",
    [
        f"from {TORCH} import ddp_comm_hooks as h\nh.ddp_zero_hook.x\nh.powerSGD_hook.y\n",
        f"import {HOOKS} as h\nh.optimizer_overlap_hooks.x(h.default_hooks.allreduce_hook)\n",
        "from torch.distributed import algorithms\nalgorithms.join.Join\nalgorithms.model_averaging.utils\n",
    ],
)
def test_a_package_of_which_laconic_has_only_a_part_is_not_rewritten(text: str):
    assert rewritten(text) == text
    first = found(text, "by hand")[0]
    assert first.rule == "mixed package" and "which has no twin" in first.why


def test_a_finding_has_place_reason_and_way_out():
    (finding,) = check(script(f"x = 1\nif x:\n    from {OPTIM} import (  # c\n  PostLocalSGDOptimizer as P)\n"))
    assert (finding.line, finding.column, finding.kind) == (3, 5, "import")
    assert finding.wrote == f"from {OPTIM} import PostLocalSGDOptimizer as P"
    assert "right where torch's modules are not" in finding.why
    assert finding.way_out == "Write: from laconic.algorithms.optim import PostLocalSGDOptimizer as P"


NAMES = {
    HOOKS: ["default_hooks", "powerSGD_hook", "ddp_zero_hook", "DDPCommHookType", "optimizer_overlap_hooks", "default"],
    OPTIM: ["PostLocalSGDOptimizer", "ZeroRedundancyOptimizer", "DistributedOptimizer"],
    "torch.distributed": ["algorithms", "optim", "init_process_group"],
}


@st.composite
def import_statements(draw: st.DrawFn) -> str:
    module = draw(st.sampled_from(sorted(NAMES)))
    names = draw(st.lists(st.sampled_from(NAMES[module]), min_size=1, unique=True))
    parts = [name + draw(st.sampled_from(["", f" as x{index}", f"  as  é{index}"])) for index, name in enumerate(names)]
    shape = draw(st.sampled_from(["{}", "({})", "({},)", "(\n    {},\n)", "(  # note\n  {}  # end\n)"]))
    between = draw(st.sampled_from([", ", ",  # about it\n    "])) if "\n" in shape else ", "
    end = draw(st.sampled_from(["", "  # c", "; y = 1"]))
    return f"from {module} import " + shape.format(between.join(parts)) + end


def bindings(text: str) -> dict[str, str]:
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in nodes for alias in node.names}


@given(st.lists(import_statements(), min_size=1, max_size=5), st.sampled_from(["\n", "\r\n"]), st.booleans())
@settings(deadline=None, max_examples=60)
def test_any_imports_still_bind_the_same_names_to_the_same_things(lines: list[str], newline: str, indented: bool):
    text = "\n".join(lines) + "\n"
    text = "def f():\n" + textwrap.indent(text, "    ") if indented else text
    before = text.replace("\n", newline)
    after = rewritten(before)
    assert rewritten(after) == after
    assert after.count("\n") == after.count(newline)
    assert all(after.count(comment) >= before.count(comment) for comment in ("# about it", "# note", "# end", "# c"))
    olds, news = bindings(before), bindings(after)
    assert set(olds) == set(news)
    assert all(news[name] in {olds[name], twin_of(olds[name])} for name in olds)


# --- misuses

AFTER_ZERO_GRAD = {
    "in one block": "for x in d:\n    loss.backward()\n    o.step()\n    o.zero_grad()\n    a.average_parameters(p)\n",
    "under an if": "for x in d:\n    o.zero_grad()\n    if i % 4 == 0:\n        a.average_parameters(p)\n",
    "around the loop": "for x in d:\n    a.average_parameters(p)\n    l.backward()\n    o.step()\n    o.zero_grad()\n",
    "in a method": "class T:\n    def end(self):\n        self.o.zero_grad()\n        self.a.average_parameters(p)\n",
    "in a with": "while 1:\n    with amp():\n        o.zero_grad()\n    with t():\n        a.average_parameters(p)\n",
}


@pytest.mark.parametrize("case", AFTER_ZERO_GRAD)
def test_averaging_after_zero_grad_is_found(case: str):
    (finding,) = found(AFTER_ZERO_GRAD[case])
    assert finding.rule == "averaging after zero_grad" and "average_parameters(p)" in finding.wrote
    assert "gradient is not None" in finding.why and "between optimizer.step() and zero_grad()" in finding.way_out
    migrated = "from laconic.algorithms.model_averaging.averagers import PeriodicModelAverager\n"
    assert found(migrated + AFTER_ZERO_GRAD[case]) == []


@pytest.mark.parametrize(
    "text",
    [
        "for x in d:\n    l.backward()\n    o.step()\n    a.average_parameters(p)\n    o.zero_grad()\n",
        "for x in d:\n    o.zero_grad()\n    l.backward()\n    o.step()\n    a.average_parameters(p)\n",
        "for x in d:\n    o.zero_grad(set_to_none=False)\n    a.average_parameters(p)\n",
        "for x in d:\n    o.zero_grad(False)\n    a.average_parameters(p)\n",
        f"from {AVERAGING} import utils\no.zero_grad()\nutils.average_parameters(p, None)\n",
        "def f():\n    o.zero_grad()\ndef g():\n    a.average_parameters(p)\n",
    ],
)
def test_averaging_with_gradients_is_not(text: str):
    assert found(text) == []


@pytest.mark.parametrize(
    ("averager", "start", "is_misuse"),
    [
        ("PeriodicModelAverager(4, warmup_steps=100)", "200", True),
        ("PeriodicModelAverager(4, 100)", "200", True),
        ("PeriodicModelAverager(4)", "200", True),
        ("averagers.PeriodicModelAverager(period=4, warmup_steps=args.warm)", "args.start", True),
        ("HierarchicalModelAverager(d, WARM)", "100", True),
        ("h.HierarchicalModelAverager(period_group_size_dict=d, warmup_steps=WARM + 1)", "WARM", True),
        ("PeriodicModelAverager(4, warmup_steps=100)", "100", False),
        ("PeriodicModelAverager(4, WARM)", "99", False),
        ("PeriodicModelAverager(4, warmup_steps=WARM)", "WARM", False),
        ("PeriodicModelAverager(4, warmup_steps=args.warm)", "args.warm", False),
        ("PeriodicModelAverager(4, **settings)", "100", False),
        ("PeriodicModelAverager(*settings)", "100", False),
        ("PeriodicModelAverager(4)", "0", False),
    ],
)
def test_different_warm_ups_are_found(averager: str, start: str, is_misuse: bool):
    findings = found(f"WARM = 99\nstate = PostLocalSGDState(None, None, {start})\na = {averager}\n")
    assert [(finding.rule, finding.line) for finding in findings] == [("warm-up mismatch", 3)] * is_misuse
    for finding in findings:
        assert "start_localSGD_iter" in finding.why and "line 2" in finding.why
        assert "same name or number" in finding.way_out
    assert found(f"a = {averager}\n") == []


SAVES = {
    "rank": "if rank == 0:\n    torch.save(state, 'f')\n",
    "get_rank": "if dist.get_rank() == 0:\n    torch.save({'a': 1, 'hook': state}, 'f')\n",
    "the other side": "if 0 == self.local_rank:\n    torch.save([state], 'f')\n",
    "not rank": "if not rank and x:\n    pickle.dump(state, f)\n",
    "main process": "if accelerator.is_main_process:\n    accelerator.save(state, 'f')\n",
    "and": "if step % 10 == 0 and rank == 0:\n    torch.save(state, 'f')\n",
    "else": "if rank != 0:\n    pass\nelse:\n    torch.save(state, 'f')\n",
    "not main": "if not is_main():\n    pass\nelif x:\n    torch.save(state, 'f')\n",
    "return": "def save():\n    if rank != 0:\n        return\n    torch.save(obj=state, f='f')\n",
    "a dict made before": "ckpt = {'hook': state}\nmore = ckpt\nif rank == 0:\n    torch.save(more, 'f')\n",
    "an item set before": "ckpt = {}\nckpt['hook'] = state\nif rank == 0:\n    save_checkpoint(ckpt)\n",
    "state_dict": "if rank == 0:\n  for i in x:\n    with y:\n      torch.save(dict(s=state.state_dict()), 'f')\n",
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
        "if rank == 1:\n    torch.save(state, 'f')\n",
        "if get_rank() == 0 or f() == 0:\n    torch.save(state, 'f')\n",
        "if rank == 0:\n    pass\nelse:\n    torch.save(state, 'f')\n",
        "if step == 0:\n    torch.save(state, 'f')\n",
        "if rank == 0:\n    print(state)\ntorch.save(state, 'f')\n",
        "loss = train(model, state)\nif rank == 0:\n    torch.save(loss, 'f')\n",
        "if rank == 0:\n    torch.save({'iter': state.iter}, 'f')\n",
    ],
)
def test_other_saves_are_not(text: str):
    assert found(f"state = powerSGD.PowerSGDState(None)\n{text}") == []


SCALER = "scaler = torch.cuda.amp.GradScaler()\n"
WRAPPED = f"from {OPTIM} import PostLocalSGDOptimizer\nopt = PostLocalSGDOptimizer(o, a)\n"


def test_a_scaler_with_averaging_is_found():
    text = f"{WRAPPED}{SCALER}scaler.scale(loss).backward()\nscaler.step(opt)\n"
    (finding,) = found(text)
    assert (finding.rule, finding.line) == ("GradScaler with averaging", 5)
    assert "pytorch#76282" in finding.why and "laconic.algorithms.optim" in finding.way_out
    assert found(rewritten(text)) == []
    (finding,) = found(f"{SCALER}l.backward()\nscaler.step(opt)\naverager.average_parameters(p)\n")
    assert (finding.rule, finding.line) == ("GradScaler with averaging", 3) and "bfloat16" in finding.way_out
    for alone in (f"{SCALER}scaler.step(opt)\n", f"{WRAPPED}opt.step()\n", f"{WRAPPED}scheduler.step(opt)\n{SCALER}"):
        assert found(alone) == []


# --- files

LINE = f"from {AVERAGING}.utils import average_parameters"
NEW_LINE = "from laconic.algorithms.model_averaging.utils import average_parameters"


def put(folder: Path, text: str, encoding: str = "utf-8") -> Path:
    path = folder / "train.py"
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("utf-8", "'''é\x0c\u2028'''\r\n{}\r\nx = 1\r\n"),
        ("utf-8", "x = 1\r\n{}\ny = 2\r\n\x0c\n# c"),
        ("utf-8-sig", "é = 'ü'\n{}  # ö\n"),
        ("latin-1", "# -*- coding: latin-1 -*-\né = 'ü'\n{}  # ö\n"),
        ("cp1252", "# coding: cp1252\né = 'ü'\n{}  # ö\n"),
    ],
)
def test_line_ends_and_encodings_are_kept(tmp_path: Path, encoding: str, text: str):
    path = put(tmp_path, text.format(LINE), encoding)
    write(rewrite(read_script(path)))
    assert path.read_bytes() == text.format(NEW_LINE).encode(encoding)


def test_mode_and_link_are_kept(tmp_path: Path):
    path = put(tmp_path, LINE + "\n")
    path.chmod(0o750)
    link = tmp_path / "link.py"
    link.symlink_to(path)
    write(rewrite(read_script(link)))
    assert link.is_symlink() and path.read_text() == NEW_LINE + "\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o750


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = put(tmp_path, LINE + "\n")
    changed = rewrite(read_script(path))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write(changed)
    assert path.read_text() == LINE + "\n" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"x = 1\ndef f(:\n", r"train\.py:2: .*nothing was changed"),
        (b"x = '\xff'\n", "encoding cannot be read"),
        (b"# coding: no-such-thing\n", "encoding cannot be read"),
        (b"x = '\x00'\n", "null bytes"),
        (b"x = " + b"(" * 5000 + b")" * 5000, "nothing was changed"),
        (b"x = a" + b".b" * 3000, "recursion.*nothing was changed"),
    ],
)
def test_a_file_that_is_not_python_is_an_error_with_its_line(tmp_path: Path, data: bytes, message: str):
    path = tmp_path / "train.py"
    path.write_bytes(data)
    with pytest.raises(ScriptError, match=message):
        check(read_script(path))


# --- the command

app = typer.Typer()
app.command()(migrate)


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_lists_and_changes_nothing(tmp_path: Path):
    path = put(tmp_path, f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n{LINE}\n")
    before = path.read_text()
    code, out, _ = run(path)
    assert code == 1
    assert f"{path}:3:1: import: {LINE}" in out and f"Write: {NEW_LINE}" in out
    assert "imports to change: 1, others: 0; --write changes the imports." in out
    assert path.read_text() == before and not (tmp_path / "ran").exists()


def test_the_command_writes_the_imports(tmp_path: Path):
    path = put(tmp_path, LINE + "\n")
    code, out, _ = run(path, "--write")
    assert (code, path.read_text()) == (0, NEW_LINE + "\n")
    assert f"{path}:1:1: changed: {LINE}" in out and "written, 1 settled, 0 left." in out
    before = path.stat().st_mtime_ns
    code, out, _ = run(path, "--write")
    assert code == 0 and "nothing to change" in out and path.stat().st_mtime_ns == before
    code, out, _ = run(put(tmp_path, f"from {TORCH}.join import Join\n"))
    assert code == 0 and "stays (no twin)" in out


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


@pytest.mark.parametrize("text", [f"{LINE}\rx = 1\r", f"{LINE}\n\x0cx = 1\n"])
def test_a_file_that_libcst_would_change_is_not_written(tmp_path: Path, text: str):
    path = put(tmp_path, text)
    assert run(path)[0] == 1
    code, _, err = run(path, "--write")
    assert code == 2 and "does not keep every byte" in err and "by hand" in err
    assert path.read_bytes() == text.encode()


def test_without_libcst_the_error_gives_the_extra_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.startswith("laconic.migrate")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(laconic, "migrate")
    monkeypatch.setitem(sys.modules, "libcst", None)
    code, _, err = run(put(tmp_path, LINE + "\n"))
    assert code == 2 and 'pip install "laconic[migrate]"' in err
