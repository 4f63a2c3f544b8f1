"""What stragglers and faults cost, one formula each."""

from __future__ import annotations

from math import exp, sqrt
from statistics import NormalDist


def slowest_of(workers: int) -> float:
    """Return by how many standard deviations the slowest of so many workers is slower than the mean (Blom 1958).

    >>> [round(slowest_of(p), 2) for p in (1, 2, 64)]
    [0.0, 0.59, 2.34]
    """
    return 0.0 if workers < 2 else NormalDist().inv_cdf((workers - 0.375) / (workers + 0.25))


def straggling_s(workers: int, compute_s: float, jitter: float, period: int = 1) -> float:
    """Return the seconds that a step waits for the slowest worker, if workers meet every `period` steps.

    `jitter` is the standard deviation of a worker's step, relative to its mean. Over a round it averages out: by the
    square root of the period.
    """
    return slowest_of(workers) * jitter * compute_s / sqrt(period)


def goodput(round_s: float, between_faults_s: float | None) -> float:
    """Return the share of rounds that are committed, if a fault loses the round that it falls into.

    >>> round(goodput(10.9, 60.0), 3)
    0.834
    """
    return 1.0 if not between_faults_s else exp(-round_s / between_faults_s)


def checkpoint_every_s(save_s: float, between_faults_s: float) -> float:
    """Return the seconds between checkpoints that lose the least time (Young 1974).

    >>> checkpoint_every_s(save_s=20.0, between_faults_s=36_000.0)
    1200.0
    """
    return sqrt(2 * save_s * between_faults_s)
