"""Values as text: parsed without evaluating anything, or refused with a PlanError that gives the reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.errors import PlanError
from laconic.plans.text import parse
from laconic.values import as_code, call


@dataclass(frozen=True, repr=False)
class Leaf:
    """A value of plain fields."""

    size: int
    word: str = "two"
    share: float = 0.5
    flag: bool = False

    __repr__ = as_code


@dataclass(frozen=True, repr=False)
class Tree:
    """A value of other values."""

    left: Any
    right: Any = field(default_factory=lambda: Leaf(1))

    __repr__ = as_code


NAMES: dict[str, Any] = {"Leaf": Leaf, "Tree": Tree}

finite = st.floats(allow_nan=False, allow_infinity=False)
leaf = st.builds(Leaf, st.integers(), st.text(), finite, st.booleans())
plain = st.none() | st.booleans() | st.integers() | finite | st.text() | st.binary()
anything = st.recursive(
    leaf,
    lambda inner: (
        st.builds(Tree, inner, inner)
        | st.builds(Tree, plain | st.tuples(plain, plain) | st.lists(plain))
        | st.builds(Tree, st.dictionaries(st.integers() | st.text(), inner | plain, max_size=3))
    ),
    max_leaves=8,
)


@given(anything)
@settings(deadline=None, max_examples=200)
def test_the_repr_of_a_value_parses_to_that_value(value: Leaf | Tree) -> None:
    assert parse(repr(value), NAMES) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Leaf(3), "Leaf(size=3)"),
        (Leaf(3, "two", 0.5), "Leaf(size=3)"),
        (Leaf(-3, "it's"), 'Leaf(size=-3, word="it\'s")'),
        (Tree(Leaf(2)), "Tree(left=Leaf(size=2))"),
        (Tree(None, Leaf(2)), "Tree(left=None, right=Leaf(size=2))"),
    ],
)
def test_defaults_are_left_out(value: Leaf | Tree, text: str) -> None:
    assert repr(value) == text


@pytest.mark.parametrize(
    "text",
    [
        "Leaf(3)",
        "Leaf(size=3)",
        "laconic.Leaf(3)",
        "  Leaf(3)\n",
        "(Leaf)(3)",
        "Leaf(\n  size=3,  # how large\n)",
        "Leaf(0x3)",
    ],
)
def test_equivalent_texts(text: str) -> None:
    assert parse(text, NAMES) == Leaf(3)


def test_dicts_and_lists() -> None:
    assert parse("Tree({4: 8, 16: Leaf(2)}, [1, (2, 'x')])", NAMES) == Tree({4: 8, 16: Leaf(2)}, [1, (2, "x")])


def test_call() -> None:
    assert call("Nothing", {}) == "Nothing()"
    assert call("Two", {"a": 1, "b": "x"}) == "Two(a=1, b='x')"


EXAMPLE = "such as Leaf()."
REFUSED = {
    "": "'' is not a plan: invalid syntax. Write a call, such as Leaf().",
    "Leaf(": f"'Leaf(' is not a plan: '(' was never closed. Write a call, {EXAMPLE}",
    "Leaf(1); Leaf(2)": f"'Leaf(1); Leaf(2)' is not a plan: invalid syntax. Write a call, {EXAMPLE}",
    "import os": f"'import os' is not a plan: invalid syntax. Write a call, {EXAMPLE}",
    "Leaf": "'Leaf': Leaf must be a call. Write Leaf().",
    "Tree(Leaf)": "'Tree(Leaf)': Leaf must be a call. Write Leaf().",
    "Laef(1)": "'Laef(1)': there is no 'Laef'. Did you mean Leaf?",
    "Tree(Treee(1))": "'Tree(Treee(1))': there is no 'Treee'. Did you mean Tree?",
    "Quux(1)": "'Quux(1)': there is no 'Quux'. There are: Leaf, Tree.",
    "Leaf(width=1)": (
        "'Leaf(width=1)': Leaf: missing a required argument: 'size'. "
        "It is Leaf(size, word='two', share=0.5, flag=False)."
    ),
    "Leaf(1, width=1)": (
        "'Leaf(1, width=1)': Leaf: got an unexpected keyword argument 'width'. "
        "It is Leaf(size, word='two', share=0.5, flag=False)."
    ),
    "Tree()": "'Tree()': Tree: missing a required argument: 'left'. It is Tree(left, right).",
    "Tree(1, 2, 3)": "'Tree(1, 2, 3)': Tree: too many positional arguments. It is Tree(left, right).",
    "Leaf(**{'size': 1})": "\"Leaf(**{'size': 1})\": ** is not supported. Write each argument by its name.",
    "Leaf(size)": (
        f"'Leaf(size)': cannot read 'size'. A plan consists of calls, numbers and quoted strings, {EXAMPLE}"
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_invalid_text_is_refused_with_a_reason(text: str) -> None:
    with pytest.raises(PlanError) as error:
        parse(text, NAMES)
    assert str(error.value) == REFUSED[text]


TRICKS = [
    "__import__('os').system('touch evaluated')",
    "Leaf.__init__.__globals__['__builtins__']",
    "Leaf(1).__class__",
    "Leaf.__class__(1)",
    "Leaf(1)()",
    "(lambda: Leaf(1))()",
    "Leaf((lambda: 1)())",
    "lambda: 1",
    "Leaf(*[1])",
    "Leaf(size=[x for x in range(3)])",
    "Leaf({**{}})",
    "Leaf(f'{1}')",
    "Leaf(1 if True else 2)",
    "Leaf(x := 1)",
    "Leaf(1 + 1)",
    "Leaf(2 ** 99999999)",
    "Leaf('a' * 99999999)",
    "Leaf(1 < 2)",
    "Leaf(not 1)",
    "Leaf([1][0])",
    "Leaf(print)",
    "Leaf(print('evaluated'))",
    "eval('Leaf(1)')",
    "exec('x')",
    "getattr(Leaf, '__mro__')",
    "Leaf(await x)",
    "Leaf((yield))",
    "Leaf(...).x",
    "a" + ".b" * 40 + "()",
    "Leaf(\x00)",
    "Leaf(\udcff)",
    "laconic.laconic.Leaf(1)",
    "laconic.plans.text.Leaf(1)",
    "Léaf(1)",
    "Leaf(" + "9" * 5000 + ")",
    "(" * 300 + ")" * 300,
    "Tree(" * 250 + "Leaf(1)" + ")" * 250,
    "[" * 5000,
    "a" + ".b" * 5000 + "()",
    "1" + "+1" * 20_000,
    "a" + "()" * 5000,
    "-" * 50_000 + "1",
]


def short(text: str) -> str:
    return ascii(text[:40])


@pytest.mark.parametrize(
    "text",
    [
        *TRICKS,
        "-" * 500 + "1",
        "not " * 500 + "1",
        "Tree({{}: 1})",
        "Leaf(size=1, size=2)",
    ],
    ids=short,
)
def test_tricks_are_refused_and_nothing_is_evaluated(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError):
        parse(text, NAMES)
    assert capsys.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


def test_only_the_given_names_are_called() -> None:
    called = []

    def spy(*args: object) -> str:
        called.append(args)
        return "made"

    with pytest.raises(PlanError):
        parse("spy(spy(1), other(2))", {"spy": spy})
    assert called == [(1,)]  # inner calls are made first; the outer one never is


def test_an_error_of_the_value_itself_is_passed_on_with_the_text() -> None:
    def picky(size: int) -> None:
        raise ValueError(f"picky(size={size}): size must be 2. Use 2.")

    with pytest.raises(PlanError) as error:
        parse("picky(3)", {"picky": picky})
    assert str(error.value) == "'picky(3)': picky(size=3): size must be 2. Use 2."
    assert isinstance(error.value.__cause__, ValueError)


@given(st.text(max_size=60) | st.text(alphabet="LeafTr(){}[]=,.'1-*:_ \n", max_size=60))
@settings(deadline=None, max_examples=400)
def test_any_text_is_a_value_or_a_plan_error(text: str) -> None:
    error = None
    try:
        parse(text, NAMES)
    except PlanError as raised:
        error = raised
    assert error is None or repr(text) in str(error)


@pytest.mark.parametrize("value", [5, None, ["Leaf(1)"]])
def test_values_that_are_not_text_are_refused(value: Any) -> None:
    with pytest.raises((PlanError, TypeError)):
        parse(value, NAMES)
