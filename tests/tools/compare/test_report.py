"""The page is self-contained and complete."""

import base64
import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

pytest.importorskip("matplotlib")

import laconic
from laconic.tools.compare.judging import as_json, headline
from laconic.tools.compare.report import INK, check_drawable, drawings, page, parts, svg, write_page
from laconic.tools.errors import UsageError
from tests.tools.compare.outcomes import ALL, DDP, LOCAL, LOW_RANK

COMMAND = ["compare", "--plan", "ddp()", "--link", "2 @ 1gbit, 2 @ 50mbit"]


class Links(HTMLParser):
    """Everything in a page that could load something else."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "iframe", "img", "object")
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "action"):
                self.found.append(value or "")
            if name == "id":
                self.ids.append(value or "")


def test_nothing_is_loaded_and_ids_are_unique():
    text = page(ALL, COMMAND)
    links = Links()
    links.feed(text)
    assert all(link.startswith(("#", "data:")) for link in links.found)
    assert not re.search(r"@import|url\((?!#)", text)
    assert len(links.ids) == len(set(links.ids))
    assert {"headline", "loss-time", "loss-bytes", "time", "levels", "table", "command", "facts", "data"} <= set(
        links.ids
    )
    assert len(text) < 500_000


def test_the_content(tmp_path):
    path = tmp_path / "out.html"
    write_page(path, ALL, COMMAND)
    text = path.read_text()
    assert headline(ALL) in text
    assert "laconic compare --plan &#39;ddp()&#39; --link &#39;2 @ 1gbit, 2 @ 50mbit&#39;" in text
    for words in (
        "<dt>torch</dt>",
        "<dt>processor</dt>",
        "18.0×",
        "23.0×",
        "256 MB",
        "validation loss",
        "a real link of 10mbit",
    ):
        assert words in text
    assert "computed" not in text
    [data] = re.findall(r"data:application/json;base64,([^\"]+)", text)
    assert base64.b64decode(data).decode() == as_json(ALL)
    assert json.loads(base64.b64decode(data))[1]["curve"][0] == {
        "step": 1,
        "seconds": 0.115,
        "loss": LOW_RANK.curve[0].loss,
        "wire_bytes": 102_912,
    }


def test_the_baselines():
    alone = replace(DDP, plan=laconic.alone(), seconds=18.6, loss_final=2.9, wire_bytes=80, level_bytes={"world": 80})
    free = replace(DDP, without_link=True, link=None, seconds=7.44)
    text = page([DDP, alone, LOW_RANK, LOCAL, free], COMMAND)
    assert text.count("<strong>no better than alone()</strong>") == 2  # ddp() over the link, and post_local_sgd
    for words in ("<th>kept</th>", "<th>efficiency</th>", ">0.60<", "<code>ddp() without the slow link</code>"):
        assert words in text


def test_a_computed_link_is_called_computed():
    text = page([replace(outcome, clock="computed", interface_bytes=None) for outcome in ALL], COMMAND)
    assert "<strong>Computed:</strong>" in text
    assert "seconds to 2.6 (computed)" in text
    assert "seconds (link computed)" in text


def test_text_of_the_user_is_escaped():
    odd = replace(DDP, changed_to="<b>&", model="</script><script>", link='"><x>')
    text = page([odd], ["--script", "<i>.py"])
    for raw in ("<b>&", "</script>", "<x>", "<i>"):
        assert raw not in text.replace("&lt;", "")


def test_a_run_without_numbers_still_gives_a_page():
    """No curve, a loss of NaN, nothing sent, many plans."""
    bare = replace(DDP, curve=(), level_bytes={}, loss_final=float("nan"), until_loss=None, wire_bytes=0)
    assert "nothing sent" in page([bare], [])
    lost = replace(LOCAL, curve=tuple(replace(point, loss=float("nan")) for point in LOCAL.curve))
    assert page([lost] * 9, [])
    assert page([replace(bare, until_loss=2.6)], [])


def test_two_levels():
    two = replace(
        DDP, level_bytes={"site": 5_000_000, "world": 1_000_000}, uplink_bytes={"level 1, group 0": 7_000_000}
    )
    text = page([two], [])
    assert "ddp(), site: 5 MB" in text
    assert "ddp(), world: 1 MB" in text
    assert "ddp(), level 1, group 0: 7 MB" in text


def test_ratios_are_to_ddp_wherever_it_is_in_the_list():
    text = page([LOW_RANK, DDP], COMMAND)
    assert "18.0×" in text and "23.0×" in text and "0.0×" not in text


def test_the_parts_of_the_time_add_up():
    for outcome in ALL:
        assert sum(parts(outcome)) == pytest.approx(outcome.seconds)


def test_figures_take_their_colours_from_the_page():
    for drawing in drawings(ALL):
        source = svg(drawing, ALL)
        assert source.startswith("<svg viewBox=")
        assert "var(--" in source
        assert INK not in source
        assert set(re.findall(r"(?:stroke|fill): (#\w+)", source)) <= {"#000000"}, drawing.name
        assert svg(drawing, ALL) == source  # deterministic


def test_missing_dependencies_are_refused_before_training(monkeypatch):
    check_drawable("--report out.html")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r'out.html: its figures need matplotlib, .*"laconic-train\[report\]"'):
        check_drawable("--report out.html")
