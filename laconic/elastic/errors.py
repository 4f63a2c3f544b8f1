"""What ends an elastic run, each with its own class: a launcher may want to act on it."""

from __future__ import annotations


class ElasticError(RuntimeError):
    """An elastic run cannot go on on this worker."""


class StoreLostError(ElasticError):
    """The store through which workers find each other does not answer: its host is gone, or cut off from here."""


class QuorumError(ElasticError):
    """Fewer workers than `least` are left, or none that holds the last committed round."""


class EndedError(ElasticError):
    """The run has ended without this worker: the others hold its result."""


class ReplacedError(ElasticError):
    """Another process has joined under this worker's id."""


class DamagedStateError(ElasticError):
    """The state that a member sent did not arrive as it was sent."""
