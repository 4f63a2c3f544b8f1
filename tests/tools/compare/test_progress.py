"""Progress through a file: complete lines only, all of them, in order."""

import json
import time
from dataclasses import asdict, replace

from laconic.tools.compare.progress import Progress, Tail, following, progress_file

NOW = Progress(worker=0, step=1, steps=4, loss=2.0, tokens_per_s=10.0, sent_bytes=5, seconds=2.0)


def line(progress: Progress) -> str:
    return json.dumps(asdict(progress)) + "\n"


def test_a_tail_reads_each_complete_line_once(tmp_path):
    path = progress_file(tmp_path, worker=0)
    tail = Tail(path)
    assert tail.read() == []
    second = line(replace(NOW, step=2))
    path.write_text(line(NOW) + second[:10])
    assert tail.read() == [NOW]
    assert tail.read() == []
    path.write_text(line(NOW) + second)
    assert tail.read() == [replace(NOW, step=2)]


def test_following_shows_everything_up_to_the_end(tmp_path):
    path = progress_file(tmp_path, worker=0)
    seen: list[Progress] = []
    with following([path, progress_file(tmp_path, worker=1)], seen.append):
        path.write_text(line(NOW))
        deadline = time.monotonic() + 10
        while not seen and time.monotonic() < deadline:
            time.sleep(0.01)
        with path.open("a") as file:
            file.write(line(replace(NOW, step=2)))
    assert seen == [NOW, replace(NOW, step=2)]


def test_time_left():
    assert NOW.seconds_left == 6.0
    assert replace(NOW, step=4).seconds_left == 0.0
    assert replace(NOW, steps=0).seconds_left == 0.0
    assert replace(NOW, seconds_limit=5.0).seconds_left == 3.0
    assert replace(NOW, steps=0, seconds_limit=5.0).seconds_left == 3.0
    assert replace(NOW, ended="loss").seconds_left == 0.0
