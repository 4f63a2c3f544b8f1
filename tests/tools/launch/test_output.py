"""Files that grow: complete lines only, all of them, in order."""

import time

from laconic.tools.launch.output import Tail, following


def test_a_tail_reads_each_complete_line_once(tmp_path):
    path = tmp_path / "lines"
    tail = Tail(path)
    assert tail.read() == []
    path.write_text("first\nsec")
    assert tail.read() == ["first"]
    assert tail.read() == []
    path.write_text("first\nsecond\nthi")
    assert tail.read() == ["second"]
    assert tail.read(at_end=True) == ["thi"]


def test_following_shows_everything_up_to_the_end(tmp_path):
    path = tmp_path / "lines"
    seen: list[str] = []
    with following(path, seen.append), following(tmp_path / "never made", seen.append):
        path.write_text("first\n")
        deadline = time.monotonic() + 10
        while not seen and time.monotonic() < deadline:
            time.sleep(0.01)
        with path.open("a") as file:
            file.write("second\n")
    assert seen == ["first", "second"]
