"""`laconic migrate`: imports change and nothing else does; misuses are found, and right scripts are left in peace."""

from __future__ import annotations

import ast
import os
import stat
import textwrap
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from laconic.cli.migrate import migrate
from laconic.migration import Finding, Script, ScriptError, check, read_script, remaining, rewrite, write
from laconic.migration.names import bindings, twin_of

HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
AVERAGING = "torch.distributed.algorithms.model_averaging"


def script(text: str) -> Script:
    return Script(Path("train.py"), textwrap.dedent(text))


def rewritten(text: str) -> str:
    return rewrite(script(text)).text


def found(text: str, kind: str = "misuse") -> list[Finding]:
    return [finding for finding in check(script(text)) if finding.kind == kind]


# --- imports

REWRITES = {
    "a module's names": (
        f"from {HOOKS}.powerSGD_hook import PowerSGDState, powerSGD_hook\n",
        "from laconic.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook\n",
    ),
    "an alias": (
        f"from {AVERAGING}.averagers import PeriodicModelAverager as P  # why\n",
        "from laconic.algorithms.model_averaging.averagers import PeriodicModelAverager as P  # why\n",
    ),
    "modules of a package": (
        f"from {HOOKS} import default_hooks as default, powerSGD_hook\n",
        "from laconic.algorithms.ddp_comm_hooks import default_hooks as default, powerSGD_hook\n",
    ),
    "torch's short names of modules": (
        f"from {HOOKS} import default, powerSGD as p\n",
        "from laconic.algorithms.ddp_comm_hooks import default_hooks as default, powerSGD_hook as p\n",
    ),
    "names of the package": (
        f"from {HOOKS} import DDPCommHookType, register_ddp_comm_hook\n",
        "from laconic.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook\n",
    ),
    "packages": (
        "from torch.distributed.algorithms import ddp_comm_hooks, model_averaging\n",
        "from laconic.algorithms import ddp_comm_hooks, model_averaging\n",
    ),
    "the package of packages": (
        "from torch.distributed import algorithms\nalgorithms.model_averaging.averagers.PeriodicModelAverager(4)\n",
        "from laconic import algorithms\nalgorithms.model_averaging.averagers.PeriodicModelAverager(4)\n",
    ),
    "a star": (
        f"from {HOOKS}.default_hooks import *\n",
        "from laconic.algorithms.ddp_comm_hooks.default_hooks import *\n",
    ),
    "import as": (
        f"import {AVERAGING}.hierarchical_model_averager as hsgd, os\n",
        "import laconic.algorithms.model_averaging.hierarchical_model_averager as hsgd, os\n",
    ),
    "the optimizer's module": (
        "import torch.distributed.optim.post_localSGD_optimizer as opt\n",
        "import laconic.algorithms.optim as opt\n",
    ),
    "the optimizer": (
        "from torch.distributed.optim import PostLocalSGDOptimizer\n",
        "from laconic.algorithms.optim import PostLocalSGDOptimizer\n",
    ),
    "the optimizer among others, last": (
        "from torch.distributed.optim import ZeroRedundancyOptimizer, PostLocalSGDOptimizer  # both\n",
        "from laconic.algorithms.optim import PostLocalSGDOptimizer\n"
        "from torch.distributed.optim import ZeroRedundancyOptimizer  # both\n",
    ),
    "the optimizer among others, first": (
        "from torch.distributed.optim import PostLocalSGDOptimizer as P, ZeroRedundancyOptimizer\n",
        "from laconic.algorithms.optim import PostLocalSGDOptimizer as P\n"
        "from torch.distributed.optim import ZeroRedundancyOptimizer\n",
    ),
    "split, two of four": (
        f"from {HOOKS} import default_hooks, ddp_zero_hook, powerSGD_hook, optimizer_overlap_hooks\n",
        "from laconic.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook\n"
        f"from {HOOKS} import ddp_zero_hook, optimizer_overlap_hooks\n",
    ),
    "split, the last two": (
        f"from {HOOKS} import ddp_zero_hook, default_hooks, powerSGD_hook\n",
        "from laconic.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook\n"
        f"from {HOOKS} import ddp_zero_hook\n",
    ),
    "split, in brackets on one line": (
        f"from {HOOKS} import (ddp_zero_hook, default_hooks)\n",
        f"from laconic.algorithms.ddp_comm_hooks import default_hooks\nfrom {HOOKS} import (ddp_zero_hook)\n",
    ),
    "split, with comments": (
        f"from {HOOKS} import (\n    default_hooks,  # one\n    ddp_zero_hook,  # two\n    powerSGD_hook as p,\n)\n",
        "from laconic.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook as p\n"
        f"from {HOOKS} import (\n    # one\n    ddp_zero_hook,  # two\n)\n",
    ),
    "split, after a backslash": (
        "from torch.distributed.optim import ZeroRedundancyOptimizer, \\\n    PostLocalSGDOptimizer\n",
        "from laconic.algorithms.optim import PostLocalSGDOptimizer\n"
        "from torch.distributed.optim import ZeroRedundancyOptimizer\n",
    ),
    "split, indented": (
        "def f():\n    try:\n        from torch.distributed.optim import A, PostLocalSGDOptimizer\n    except E: 0\n",
        "def f():\n    try:\n        from laconic.algorithms.optim import PostLocalSGDOptimizer\n"
        "        from torch.distributed.optim import A\n    except E: 0\n",
    ),
    "split, not first on its line": (
        "if x: from torch.distributed.optim import A, PostLocalSGDOptimizer; y = 1\n",
        "if x: from laconic.algorithms.optim import PostLocalSGDOptimizer; "
        "from torch.distributed.optim import A; y = 1\n",
    ),
    "a path in full": (
        f"import torch\nimport {AVERAGING}.averagers\na = {AVERAGING}.averagers.PeriodicModelAverager(4)  # é\n",
        "import torch\nimport laconic.algorithms.model_averaging.averagers\n"
        "a = laconic.algorithms.model_averaging.averagers.PeriodicModelAverager(4)  # é\n",
    ),
    "a path in full, where only it brought torch in": (
        f"import {AVERAGING}.averagers\na = {AVERAGING}.averagers.PeriodicModelAverager(torch.ones(1))\n",
        "import torch, laconic.algorithms.model_averaging.averagers\n"
        "a = laconic.algorithms.model_averaging.averagers.PeriodicModelAverager(torch.ones(1))\n",
    ),
    "after letters of several bytes": (
        f"é = 'ü'; from {HOOKS}.debugging_hooks import noop_hook; ß = 2\n",
        "é = 'ü'; from laconic.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook; ß = 2\n",
    ),
    "no line end at the end": (
        f"from {AVERAGING} import utils",
        "from laconic.algorithms.model_averaging import utils",
    ),
}


@pytest.mark.parametrize("case", REWRITES)
def test_imports_change_and_nothing_else_does(case: str):
    before, after = REWRITES[case]
    assert rewritten(before) == after
    assert any(finding.kind == "import" for finding in check(script(before)))


@pytest.mark.parametrize("case", REWRITES)
def test_a_changed_script_has_nothing_left_to_change(case: str):
    changed = rewritten(REWRITES[case][0])
    assert rewritten(changed) == changed
    assert remaining(check(script(changed))) == []


STAYS = [
    "from torch.distributed.algorithms.join import Join\n",
    "from torch.distributed.algorithms import Join\n",
    f"from {HOOKS} import ddp_zero_hook\n",
    f"from {HOOKS}.ddp_zero_hook import hook_with_zero_step\n",
    f"import {HOOKS}.optimizer_overlap_hooks as overlap\n",
    "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper\n",
    f"from {HOOKS}.ddp_zero_hook import *\n",
]


@pytest.mark.parametrize("text", STAYS)
def test_what_has_no_twin_stays_and_is_said_to(text: str):
    assert rewritten(text) == text
    (finding,) = check(script(text))
    assert finding.kind == "stays" and "has no twin" in finding.why
    assert remaining([finding]) == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nimport torch.distributed as dist\nimport torch.distributed.optim\n",
        "from torch.distributed.optim import ZeroRedundancyOptimizer\n",
        "from torch.distributed.optim import *\n",
        "from .averagers import PeriodicModelAverager\n",
        "from mine.distributed.algorithms.model_averaging import averagers\n",
        "s = 'import torch.distributed.algorithms.model_averaging.averagers'  # torch.distributed.algorithms\n",
        "from laconic.algorithms.optim import PostLocalSGDOptimizer\n",
        "",
    ],
)
def test_other_scripts_have_no_findings(text: str):
    assert check(script(text)) == []
    assert rewritten(text) == text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import torch.distributed as dist\ndist.optim.PostLocalSGDOptimizer(o, a)\n", 2),
        ("import torch\n\ntorch.distributed.algorithms.model_averaging.averagers.PeriodicModelAverager(4)\n", 3),
        (
            f"from {HOOKS} import (\n  powerSGD\n)\nimport torch.distributed.optim as o\no.PostLocalSGDOptimizer()\n",
            5,
        ),
        (f"from \\\n  {AVERAGING}.averagers import PeriodicModelAverager\n", 1),
        (f"import torch\nimport {AVERAGING}.utils\nx = ({AVERAGING}\n.utils.average_parameters)\n", 3),
    ],
)
def test_what_only_a_person_can_change_is_listed(text: str, line: int):
    (finding,) = found(text, "by hand")
    assert finding.line == line
    assert "laconic.algorithms" in finding.way_out
    rewritten(text)


@pytest.mark.parametrize(
    "text",
    [
        "from torch.distributed.algorithms import ddp_comm_hooks as h\nh.ddp_zero_hook.x\nh.powerSGD_hook.y\n",
        f"import {HOOKS} as h\nh.optimizer_overlap_hooks.x(h.default_hooks.allreduce_hook)\n",
        "from torch.distributed import algorithms\nalgorithms.join.Join\nalgorithms.model_averaging.utils\n",
    ],
)
def test_a_package_used_for_both_is_left_to_a_person(text: str):
    assert rewritten(text) == text
    first = found(text, "by hand")[0]
    assert first.rule == "mixed package" and "which has no twin" in first.why


def test_a_finding_says_what_where_why_and_the_way_out():
    (finding,) = check(script("x = 1\nif x:\n    from torch.distributed.optim import PostLocalSGDOptimizer as P\n"))
    assert (finding.line, finding.column, finding.kind) == (3, 5, "import")
    assert finding.wrote == "from torch.distributed.optim import PostLocalSGDOptimizer as P"
    assert "right where torch's modules are not" in finding.why
    assert finding.way_out == "Write: from laconic.algorithms.optim import PostLocalSGDOptimizer as P"


NAMES = {
    HOOKS: ["default_hooks", "powerSGD_hook", "ddp_zero_hook", "DDPCommHookType", "optimizer_overlap_hooks", "default"],
    "torch.distributed.optim": ["PostLocalSGDOptimizer", "ZeroRedundancyOptimizer", "DistributedOptimizer"],
    AVERAGING: ["averagers", "utils", "hierarchical_model_averager"],
    "torch.distributed": ["algorithms", "optim", "init_process_group"],
    "os": ["path", "sep"],
}


@st.composite
def import_statements(draw: st.DrawFn) -> str:
    module = draw(st.sampled_from(sorted(NAMES)))
    names = draw(st.lists(st.sampled_from(NAMES[module]), min_size=1, unique=True))
    parts = [name + draw(st.sampled_from(["", f" as x{index}", f"  as  é{index}"])) for index, name in enumerate(names)]
    shape = draw(st.sampled_from(["{}", "({})", "({},)", "(\n    {},\n)", "(  # note\n  {}  # end\n)"]))
    between = ",\n    " if "\n" in shape and draw(st.booleans()) else ", "
    return (
        f"from {module} import " + shape.format(between.join(parts)) + draw(st.sampled_from(["", "  # c", "; y = 1"]))
    )


@given(st.lists(import_statements(), min_size=1, max_size=5), st.sampled_from(["\n", "\r\n", "\r"]), st.booleans())
def test_any_imports_still_bind_the_same_names_to_the_same_things(lines: list[str], newline: str, indented: bool):
    text = "\n".join(lines) + "\n"
    if indented:
        text = "def f():\n" + textwrap.indent(text, "    ")
    before = script(text.replace("\n", newline))
    after = rewrite(before)
    assert rewrite(after).text == after.text
    olds, news = bindings(before.tree), bindings(after.tree)
    assert set(olds) == set(news)
    assert {line[len(line.rstrip("\r\n")) :] for line in after.lines} == {newline}
    for name in olds:
        assert news[name] in {olds[name], twin_of(olds[name])}


# --- misuses

MIGRATED = "from laconic.algorithms.model_averaging.averagers import PeriodicModelAverager\n"

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
    assert finding.rule == "averaging after zero_grad"
    assert "average_parameters(p)" in finding.wrote
    assert "gradient is not None" in finding.why
    assert "between optimizer.step() and zero_grad()" in finding.way_out
    assert found(MIGRATED + AFTER_ZERO_GRAD[case]) == []


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


STATE = "PostLocalSGDState(None, None, {})\n"


@pytest.mark.parametrize(
    ("averager", "start"),
    [
        ("PeriodicModelAverager(4, warmup_steps=100)", "200"),
        ("PeriodicModelAverager(4, 100)", "200"),
        ("PeriodicModelAverager(4)", "200"),
        ("averagers.PeriodicModelAverager(period=4, warmup_steps=args.warm)", "args.start"),
        ("HierarchicalModelAverager(d, WARM)", "100"),
        ("h.HierarchicalModelAverager(period_group_size_dict=d, warmup_steps=WARM + 1)", "WARM"),
    ],
)
def test_different_warm_ups_are_found(averager: str, start: str):
    (finding,) = found(f"WARM = 99\nstate = {STATE.format(start)}a = {averager}\n")
    assert (finding.rule, finding.line) == ("warm-up mismatch", 3)
    assert "start_localSGD_iter" in finding.why and "line 2" in finding.why
    assert "same name or number" in finding.way_out


@pytest.mark.parametrize(
    ("averager", "start"),
    [
        ("PeriodicModelAverager(4, warmup_steps=100)", "100"),
        ("PeriodicModelAverager(4, WARM)", "100"),
        ("PeriodicModelAverager(4, warmup_steps=WARM)", "WARM"),
        ("PeriodicModelAverager(4, warmup_steps=args.warm)", "args.warm"),
        ("PeriodicModelAverager(4, **settings)", "100"),
        ("PeriodicModelAverager(*settings)", "100"),
        ("PeriodicModelAverager(4)", "0"),
    ],
)
def test_equal_warm_ups_are_not(averager: str, start: str):
    assert found(f"WARM = 100\nstate = {STATE.format(start)}a = {averager}\n") == []
    assert found(f"a = {averager}\n") == []


SAVES = {
    "rank": "if rank == 0:\n    torch.save(state, 'f')\n",
    "get_rank": "if dist.get_rank() == 0:\n    torch.save({'a': 1, 'hook': state}, 'f')\n",
    "the other side": "if 0 == self.local_rank:\n    torch.save([state], 'f')\n",
    "not rank": "if not rank:\n    pickle.dump(state, f)\n",
    "main process": "if accelerator.is_main_process:\n    accelerator.save(state, 'f')\n",
    "and": "if step % 10 == 0 and rank == 0:\n    torch.save(state, 'f')\n",
    "else": "if rank != 0:\n    pass\nelse:\n    torch.save(state, 'f')\n",
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
WRAPPED = "from torch.distributed.optim import PostLocalSGDOptimizer\nopt = PostLocalSGDOptimizer(o, a)\n"


def test_a_scaler_with_the_averaging_optimizer_is_found():
    text = f"{WRAPPED}{SCALER}scaler.scale(loss).backward()\nscaler.step(opt)\n"
    (finding,) = found(text)
    assert (finding.rule, finding.line) == ("GradScaler with averaging", 5)
    assert "pytorch#76282" in finding.why and "laconic.algorithms.optim" in finding.way_out
    assert found(rewritten(text)) == []


def test_a_scaler_with_an_averager_is_found():
    text = f"{SCALER}l.backward()\nscaler.step(opt)\naverager.average_parameters(p)\n"
    (finding,) = found(text)
    assert finding.line == 3 and "bfloat16" in finding.way_out


@pytest.mark.parametrize(
    "text",
    [f"{SCALER}scaler.step(opt)\n", f"{WRAPPED}opt.step()\n", f"{WRAPPED}scheduler.step(opt)\n{SCALER}"],
)
def test_one_without_the_other_is_not(text: str):
    assert found(text) == []


# --- files


def put(folder: Path, text: str, encoding: str = "utf-8") -> Path:
    path = folder / "train.py"
    path.write_bytes(text.encode(encoding))
    return path


LINE = f"from {AVERAGING}.utils import average_parameters"
NEW_LINE = "from laconic.algorithms.model_averaging.utils import average_parameters"


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_line_ends_are_kept(tmp_path: Path, newline: str):
    path = put(tmp_path, newline.join(["'''é\x0c\u2028'''", LINE, "x = 1", ""]))
    write(rewrite(read_script(path)))
    assert path.read_bytes() == newline.join(["'''é\x0c\u2028'''", NEW_LINE, "x = 1", ""]).encode()


def test_mixed_line_ends_are_kept(tmp_path: Path):
    path = put(tmp_path, f"x = 1\r\n{LINE}\ny = 2\r\nfrom torch.distributed.optim import A, PostLocalSGDOptimizer\n")
    write(rewrite(read_script(path)))
    assert path.read_bytes().startswith(f"x = 1\r\n{NEW_LINE}\ny = 2\r\nfrom laconic".encode())


@pytest.mark.parametrize(
    ("encoding", "first"),
    [("utf-8-sig", ""), ("latin-1", "# -*- coding: latin-1 -*-\n"), ("cp1252", "# coding: cp1252\n")],
)
def test_encodings_are_kept(tmp_path: Path, encoding: str, first: str):
    path = put(tmp_path, f"{first}é = 'ü'\n{LINE}  # ö\n", encoding)
    write(rewrite(read_script(path)))
    assert path.read_bytes() == f"{first}é = 'ü'\n{NEW_LINE}  # ö\n".encode(encoding)


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
    assert path.read_text() == LINE + "\n"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"x = 1\ndef f(:\n", r"train\.py:2: .*nothing was changed"),
        (b"x = '\xff'\n", "encoding cannot be read"),
        (b"# coding: no-such-thing\n", "encoding cannot be read"),
        (b"x = '\x00'\n", "null bytes"),
        (b"x = " + b"(" * 5000 + b")" * 5000, "nothing was changed"),
    ],
)
def test_what_is_not_python_is_said_with_its_line(tmp_path: Path, data: bytes, said: str):
    path = tmp_path / "train.py"
    path.write_bytes(data)
    with pytest.raises(ScriptError, match=said):
        check(read_script(path))


def test_edits_that_would_not_parse_are_not_made():
    text = f"from {HOOKS} import (ddp_zero_hook\n, default_hooks\n, optimizer_overlap_hooks)\n"
    with pytest.raises(ScriptError, match=r"no longer parse.*by hand"):
        rewrite(script(text))


# --- the command

app = typer.Typer()
app.command()(migrate)


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_lists_and_changes_nothing(tmp_path: Path):
    path = put(tmp_path, f"x = 1\n{LINE}\n")
    code, out, _ = run(path)
    assert code == 1
    assert f"{path}:2:1: import: {LINE}" in out and f"Write: {NEW_LINE}" in out
    assert "imports to change: 1, others: 0; --write changes the imports." in out
    assert path.read_text() == f"x = 1\n{LINE}\n"


def test_the_command_writes(tmp_path: Path):
    path = put(tmp_path, LINE + "\n")
    code, out, _ = run(path, "--write")
    assert (code, path.read_text()) == (0, NEW_LINE + "\n")
    assert f"{path}:1:1: changed: {LINE}" in out and "written, 1 settled, 0 left." in out
    assert run(path, "--write")[0] == 0


def test_what_write_leaves_is_exit_code_1(tmp_path: Path):
    path = put(tmp_path, f"{LINE}\nstate = PowerSGDState(None)\nif rank == 0:\n    torch.save(state, 'f')\n")
    code, out, _ = run("--write", path)
    assert code == 1 and "written, 1 settled, 1 left." in out
    assert f"{path}:4:5: misuse (hook state of worker 0 only): torch.save(state, 'f')" in out


def test_nothing_to_change_is_exit_code_0(tmp_path: Path):
    path = put(tmp_path, "import torch\n")
    before = path.stat().st_mtime_ns
    code, out, _ = run(path, "--write")
    assert (code, path.stat().st_mtime_ns) == (0, before)
    assert "nothing to change" in out
    stays = put(tmp_path, STAYS[0])
    code, out, _ = run(stays)
    assert code == 0 and "stays (no twin)" in out


def test_errors_are_exit_code_2_and_other_files_are_still_read(tmp_path: Path):
    good = put(tmp_path, LINE + "\n")
    bad = tmp_path / "bad.py"
    bad.write_text("def f(:\n")
    notebook = tmp_path / "run.ipynb"
    notebook.write_text("{}")
    code, out, err = run(tmp_path / "nowhere.py", bad, tmp_path, notebook, good)
    assert code == 2
    assert "nowhere.py: there is no such file." in err
    assert "bad.py:1: invalid syntax" in err
    assert "Is a directory" in err
    assert "a notebook is not a script" in err
    assert "imports to change: 1" in out


def test_a_script_with_an_error_is_not_written(tmp_path: Path):
    path = put(tmp_path, f"{LINE}\ndef f(:\n")
    code, _, err = run(path, "--write")
    assert code == 2 and f"{path}:2:" in err
    assert path.read_text() == f"{LINE}\ndef f(:\n"


def test_nothing_in_a_script_is_run(tmp_path: Path):
    path = put(tmp_path, f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n{LINE}\n")
    run(path, "--write")
    assert not (tmp_path / "ran").exists()
    ast.parse(path.read_text())
