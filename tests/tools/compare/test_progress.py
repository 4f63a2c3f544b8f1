"""The time that is left of a run."""

from dataclasses import replace

from laconic.tools.compare.progress import Progress

NOW = Progress(worker=0, step=1, steps=4, loss=2.0, tokens_per_s=10.0, sent_bytes=5, seconds=2.0)


def test_time_left():
    assert NOW.seconds_left == 6.0
    assert replace(NOW, step=4).seconds_left == 0.0
    assert replace(NOW, steps=0).seconds_left == 0.0
    assert replace(NOW, seconds_limit=5.0).seconds_left == 3.0
    assert replace(NOW, steps=0, seconds_limit=5.0).seconds_left == 3.0
    assert replace(NOW, ended="loss").seconds_left == 0.0
