"""Errors that end an elastic run, one class for each case that a launcher may handle."""

from __future__ import annotations


class ElasticError(RuntimeError):
    """An elastic run cannot continue on this worker."""


class StoreLostError(ElasticError):
    """The store of the run does not answer: its host is down, or cannot be reached from here."""


class QuorumError(ElasticError):
    """Fewer workers than `least` are left, or none that holds the last committed step."""


class EndedError(ElasticError):
    """The run ended without this worker; the other workers hold its result."""


class ReplacedError(ElasticError):
    """Another process joined with this worker's id."""


class DamagedStateError(ElasticError):
    """The state that another worker sent was damaged on the way."""
