"""What is said about one place in a script."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["import", "by hand", "stays", "misuse"]
"""`import`: `rewrite` changes it; `by hand`: only a person can; `stays`: right as it is; `misuse`: see its rule."""


@dataclass(frozen=True, order=True)
class Finding:
    """One place, what is written there, why it matters and what to do."""

    line: int
    column: int
    kind: Kind
    rule: str
    wrote: str
    why: str
    way_out: str
