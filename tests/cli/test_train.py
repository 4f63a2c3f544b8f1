"""`laconic train`: under torchrun, and on the user's own text."""

import json

import pytest


@pytest.mark.nightly
def test_train_under_torchrun(outside, tiny, tmp_path):
    path = tmp_path / "out.json"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["--plan", "power_sgd(rank=1)", "--steps", "4", "--json", str(path)]
    ended = outside(*torchrun, "-m", "laconic", "train", *tiny, *arguments)
    assert ended.code == 0
    assert "worker 0 step=4/4" in ended.out
    assert "worker 1" not in ended.out
    assert ended.out.count("validation loss") == 1
    [row] = json.loads(path.read_text())
    assert (row["workers"], row["steps"]) == (2, 4)


@pytest.mark.slow
def test_train_on_own_text_shows_each_worker(outside, tiny, tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    ended = outside("-m", "laconic", "train", *tiny, "--workers", "2", "--steps", "2", "--data", str(text))
    assert (ended.code, ended.err) == (0, "")
    assert "worker 0 step=2/2" in ended.out
    assert "worker 1 step=2/2" in ended.out
