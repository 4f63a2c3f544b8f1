"""The keyword index: definitions, sections and tests of keywords, without building the site."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
from laconic_site import commands, glossary, keywords, names, usages
from laconic_site.keywords import Section

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def index(sources):
    sections = [
        Section("twin", "saving", "Saving", frozenset({"PowerSGDState"}), "Each worker saves its PowerSGDState."),
        Section("log", "old", "Old", frozenset({"PowerSGDState"}), "PowerSGDState PowerSGDState"),
        Section("plan", "plan", "Planning", frozenset({"--link"}), "The step of the plan, with error-feedback."),
        Section("glossary", "error-feedback", "error feedback", frozenset({"ErrorFeedback"}), "error feedback"),
    ]
    terms = glossary.read_terms("# Glossary\n\n## error feedback\n\n`ErrorFeedback` and `residual`.\n")
    return keywords.build(sources, usages.read_tests(ROOT), sections, terms, list(commands.options(ROOT)))


@pytest.mark.parametrize("module", [names, glossary, keywords], ids=lambda module: module.__name__)
def test_examples_in_docstrings(module):
    failed, tried = doctest.testmod(module)
    assert tried and not failed


@pytest.mark.parametrize(
    "name",
    [
        *("PowerSGDState", "matrix_approximation_rank", "warm_start", "PostLocalSGDState", "average_parameters"),
        *("PeriodicModelAverager", "HierarchicalModelAverager", "period_group_size_dict", "LostWorkerError"),
    ],
)
def test_names_lead_to_their_lines_and_tests(index, name):
    keyword = index.keywords[name]
    assert keyword.definitions and keyword.tests
    for definition in keyword.definitions:
        assert name in (ROOT / definition.path).read_text().splitlines()[definition.line - 1]
    assert not any(test.path.startswith("tests/docs/") for test in keyword.tests)
    for test in keyword.tests:
        assert f"{test.name}" in (ROOT / test.path).read_text().splitlines()[test.line - 1]


def test_a_term_leads_to_the_code_that_it_names(index):
    keyword = index.keywords["error feedback"]
    assert keyword.definitions[0].qualname == "ErrorFeedback"
    assert keyword.tests
    assert [section.page for section in keyword.sections] == ["glossary", "plan"]


def test_sections_that_explain_come_before_the_log(index):
    assert [section.page for section in index.keywords["PowerSGDState"].sections] == ["twin", "log"]


def test_plain_words_are_looked_up_in_code_only(index):
    assert index.keywords["plan"].sections == []  # "plan" is in the prose of a section, and in no code


def test_options_lead_to_their_parameter(index):
    link = index.keywords["--link"]
    assert {"laconic compare --link", "laconic plan --link"} <= {d.qualname for d in link.definitions}
    for definition in link.definitions:
        assert "link" in (ROOT / definition.path).read_text().splitlines()[definition.line - 1]
    assert [section.page for section in link.sections] == ["plan"] and link.tests


def test_files_have_the_errors_that_they_raise(index):
    assert "LostWorkerError" in index.by_file["laconic/comm/timeout.py"]
    assert "self" not in index.keywords and "step" not in index.keywords


def test_public_names_without_a_section_are_named(index):
    missing = index.unexplained()
    assert "attach" in missing and "PowerSGDState" not in missing and "lineno" not in missing


def test_private_parameters_are_left_out():
    source = names.read_source('__all__ = ["f"]\ndef f(rank): ...\ndef g(hidden): ...\n', "laconic/x.py")
    assert {d.name for d in source.definitions} == {"rank", "hidden"}
    assert source.exports == ("f",)


def test_helpers_count_for_the_tests_that_use_them(tmp_path):
    (tmp_path / "tests").mkdir()
    text = "def _work():\n    return Codec()\n\n\ndef test_it():\n    run(_work)\n"
    (tmp_path / "tests" / "test_a.py").write_text(text)
    found = usages.read_tests(tmp_path)
    chosen = usages.exercising("Codec", {"laconic/codecs/contract.py"}, found)
    assert [(usage.name, usage.line) for usage in chosen] == [("test_it", 5)]
