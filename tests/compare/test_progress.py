"""Progress goes through a file: whole lines only, all of them, in order."""

import json
import time
from dataclasses import asdict, replace

from laconic.compare.progress import Tail, following
from laconic.compare.reporter import Reporter, progress_file
from laconic.compare.reporting import Progress

NOW = Progress(worker=0, step=1, steps=4, loss=2.0, tokens_per_s=10.0, sent_bytes=5, seconds=1.0)


def line(progress: Progress) -> str:
    return json.dumps(asdict(progress)) + "\n"


def test_a_tail_reads_each_line_once_and_waits_for_its_end(tmp_path):
    path = progress_file(tmp_path, worker=0)
    tail = Tail(path)
    assert tail.news() == []
    second = line(replace(NOW, step=2))
    path.write_text(line(NOW) + second[:10])
    assert tail.news() == [NOW]
    assert tail.news() == []
    path.write_text(line(NOW) + second)
    assert tail.news() == [replace(NOW, step=2)]


def test_a_reporter_writes_every_step_and_lets_the_last_be_seen_at_once(tmp_path):
    path = progress_file(tmp_path, worker=0)
    with path.open("w") as file:
        report = Reporter(file)
        for step in (1, 2, 3):
            report(replace(NOW, step=step))
        assert [progress.step for progress in Tail(path).news()] == [1]
        report(replace(NOW, step=4))
        assert [progress.step for progress in Tail(path).news()] == [1, 2, 3, 4]


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
    assert replace(NOW, step=1, steps=4, seconds=2.0).seconds_left == 6.0
    assert replace(NOW, step=4, steps=4, seconds=2.0).seconds_left == 0.0
