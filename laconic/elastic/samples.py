"""What became of the samples that a worker drew with an `ElasticSampler` in an elastic run."""

from __future__ import annotations

from dataclasses import dataclass

from laconic import Session
from laconic.data import ElasticSampler


@dataclass(frozen=True)
class Samples:
    """What became of the samples that this worker drew, since its process began.

    `applied` + `repeated` + `lost` + `undecided` = `drawn`.
    """

    drawn: int = 0
    applied: int = 0
    """Their steps were committed."""
    repeated: int = 0
    """Their steps were undone, and the workers of then drew them again."""
    lost: int = 0
    """The others decided about their steps without this worker: they have committed them, or drawn them again."""

    @property
    def undecided(self) -> int:
        """Those of the steps since the last commit."""
        return self.drawn - self.applied - self.repeated - self.lost


class SampleLedger:
    """Follows the commits of a run, and the steps that it goes back to."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._applied = self._repeated = self._lost = 0
        self._base: int | None = None
        """The last step whose commit this worker knows of."""
        self._taken: tuple[int | None, int] = (None, 0)
        """The step of the last snapshot, and what was drawn until then."""

    @property
    def now(self) -> Samples:
        """The numbers of now."""
        return Samples(self._drawn, self._applied, self._repeated, self._lost)

    @property
    def _drawn(self) -> int:
        return sum(each.drawn for each in self._session.kept.values() if isinstance(each, ElasticSampler))

    def took(self, step: int) -> None:
        """Note what was drawn until a snapshot."""
        self._taken = step, self._drawn

    def committed(self, step: int) -> None:
        """Count as applied what was drawn until the snapshot of this step, which is the last one."""
        self._base = step
        self._applied += self._taken[1] - (self._applied + self._repeated + self._lost)

    def resumed(self, step: int | None) -> None:
        """Count what is undecided, when the workers go on after this step; None if this one does not go on."""
        if step is not None and step == self._taken[0] != self._base:
            self.committed(step)
        undecided = self.now.undecided
        if step is not None and step == self._base:
            self._repeated += undecided
        else:
            self._lost += undecided
        self._base, self._taken = step, (None, self._drawn)
