"""Samples of an elastic run: each draw has one fate, by the logs alone; and what the checker of the logs finds."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.elastic import read_history
from tests.elastic.cluster import Cluster
from tests.elastic.test_elastic import job


@pytest.mark.slow
def test_each_sample_of_an_epoch_is_applied_once(tmp_path):
    """Workers with batches of 1, 2 and 3 samples read ahead; they are killed, come late, and come back."""
    with Cluster(job(tmp_path, expect=2, samples=41)) as cluster:
        cluster.start("0", "2")
        cluster.wait_for_step(5)
        cluster.start("1")
        cluster.wait_for_members("0", "1", "2")
        cluster.wait_for_step(cluster.newest() + 12)
        cluster.send("0", signal.SIGKILL)
        cluster.wait_for_members("1", "2")
        cluster.start("0")
        cluster.wait_for_members("0", "1", "2")
        cluster.wait_for_step(cluster.newest() + 12)
        cluster.end()
        assert not cluster.errors(), cluster.tail()
        history = cluster.history(repeat=1)
    assert history.applied > 4 * 41
    assert sum(map(len, history.drawn.values())) == history.applied + history.again + history.lost
    assert check_ledgers(cluster, history) == 3
    assert history.lost == 0


def check_ledgers(cluster: Cluster, history: read_history.History) -> int:
    """Compare the ledger of each process that has ended in order with its log; return how many there were."""
    checked = 0
    for path in Path(cluster.job.logs).glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        if not lines or "final" not in lines[-1]:  # killed
            continue
        ledger = lines[-1]["samples"]
        tried = [((path.stem.split("-")[0], *line["tried"]), len(line["drew"])) for line in lines if "tried" in line]
        applied = sum(count for key, count in tried if key in history.counted)
        assert ledger["drawn"] == sum(count for _, count in tried)
        assert ledger["drawn"] == ledger["applied"] + ledger["repeated"] + ledger["lost"], "no draw is undecided"
        assert ledger["applied"] <= applied <= ledger["applied"] + ledger["lost"]
        checked += 1
    return checked


def write(folder: Any, **logs: list[tuple[Any, ...]]) -> read_history.History:
    """Write logs of (generation, step, samples) and of (since, step, workers); read them."""
    for id, lines in logs.items():
        text = []
        for first, second, third in lines:
            same: dict[str, Any] = {"state": [0.0], "shared": "x"}
            if isinstance(third, str):
                text.append({"commit": [first, second, list(third)], **same})
            else:
                text.append({"tried": [first, second], "moves": [0.0], "drew": third, "of": 4, **same})
        (folder / f"{id[1:]}-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in text))
    return read_history.check(folder)


def test_fates(tmp_path):
    """Worker 1 is lost in step 2; what both drew is drawn again by worker 0. Its step 3 is not committed."""
    found = write(
        tmp_path,
        w0=[(1, 1, [3]), (0, 1, "01"), (1, 2, [0]), (2, 2, [0]), (1, 2, "0"), (2, 3, [2]), (2, 3, "0"), (2, 4, [1])],
        w1=[(1, 1, [1]), (1, 2, [2])],
    )
    assert found.wrong == []
    assert (found.applied, found.again, found.lost) == (4, 2, 1)
    assert "7 samples drawn: 4 applied, 2 repeated, 1 lost; 1.0 epochs of 4" in read_history.samples(found)


def test_samples_that_are_applied_twice_or_never_are_found(tmp_path):
    twice = [(1, 1, [3]), (0, 1, "0"), (1, 2, [3]), (1, 2, "0"), (1, 3, [0]), (2, 3, "0")]
    assert write(tmp_path, w0=twice).wrong == ["epoch 0 has a sample twice"]
    missing = write(tmp_path, w0=[(1, 1, [3]), (0, 1, "01")], w1=[(0, 1, "01")])
    assert missing.wrong == ["commit 1: worker 1 drew no samples for step 1"]
