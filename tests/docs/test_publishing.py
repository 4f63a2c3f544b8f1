"""What publishes the project is well-formed: workflow, issue forms, citation. None of it is run here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import laconic
from laconic.torch_private import TRIED

ROOT = Path(__file__).parents[2]
SCHEMAS = [
    ("github-workflows", ".github/workflows/publish.yml"),
    ("github-workflows", ".github/workflows/versions.yml"),
    ("github-issue-forms", ".github/ISSUE_TEMPLATE/bug.yml"),
    ("github-issue-forms", ".github/ISSUE_TEMPLATE/slower.yml"),
    ("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
    ("citation-file-format", "CITATION.cff"),
]


@pytest.mark.parametrize(("schema", "path"), SCHEMAS, ids=lambda value: Path(value).name)
def test_files_follow_their_schema(schema, path):
    pytest.importorskip("check_jsonschema", reason="make docs runs it")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_version_is_the_same_everywhere():
    wanted = laconic.__version__
    for path, pattern in (("pyproject.toml", r'^version = "(.+)"$'), ("CITATION.cff", r"^version: (.+)$")):
        assert re.findall(pattern, (ROOT / path).read_text(), re.M) == [wanted], path


def test_the_workflow_runs_what_there_is():
    workflow = (ROOT / ".github" / "workflows" / "publish.yml").read_text()
    makefile = (ROOT / "Makefile").read_text()
    assert "run: make docs" in workflow and re.search(r"^docs:", makefile, re.M)
    assert "path: build/site" in workflow and re.search(r"^SITE +:= build/site$", makefile, re.M)
    assert workflow.count("timeout-minutes:") == workflow.count("runs-on:")


def test_the_versions_of_torch_are_the_same_everywhere():
    read = {name: (ROOT / name).read_text() for name in ("Makefile", "constraints.txt", "pyproject.toml")}
    oldest, newest = (re.search(rf"^{name} := (.+)$", read["Makefile"], re.M) for name in ("OLDEST", "NEWEST"))
    pinned = re.search(r"^torch==(.+)$", read["constraints.txt"], re.M)
    assert oldest and pinned and newest
    versions = [found[1] for found in (oldest, pinned, newest)]
    assert [each.rpartition(".")[0] for each in versions] == list(TRIED)
    assert f'"torch>={TRIED[0]},<3"' in read["pyproject.toml"]
    workflow = (ROOT / ".github" / "workflows" / "versions.yml").read_text()
    assert f"torch: {json.dumps(versions)}" in workflow and "make versions-${{ matrix.torch }}" in workflow
    assert workflow.count("timeout-minutes:") == workflow.count("runs-on:")
    page = (ROOT / "docs" / "versions.md").read_text()
    assert all(f"torch {each}" in page for each in versions)


def test_links_of_the_security_policy_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / "SECURITY.md").read_text()):
        assert (ROOT / target).exists(), target
