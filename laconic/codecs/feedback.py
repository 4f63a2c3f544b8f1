"""Error feedback: what a round failed to deliver is not lost, only late."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Literal

import torch
from torch import Tensor

from laconic.codecs.contract import Codec, check_codec, keep_if, wide_dtype
from laconic.codecs.low_rank import LowRank
from laconic.comm.requests import Exchange, State, Tensors
from laconic.kernels.choose import fast_feedback
from laconic.values import as_code


@dataclass(frozen=True, repr=False)
class ErrorFeedback:
    """Adds what the last round failed to deliver to what this round sends.

    The residual is what was wanted less what this worker's *own* messages amounted to (Vogels et al. 2019,
    arXiv:1905.13727, Algorithm 2), so it is bounded. `subtract="mean"` takes the shared mean instead, as torch's
    hook does: then the residual also collects this worker's distance from the mean, which never ends.
    Residuals are fp32 whatever the gradient's dtype.
    """

    codec: Codec
    subtract: Literal["own", "mean"] = "own"

    __repr__ = as_code

    def __post_init__(self) -> None:
        check_codec(f"ErrorFeedback({self.codec!r})", self.codec)
        if _has_feedback(self.codec):
            raise ValueError(
                f"ErrorFeedback({self.codec!r}): there is an ErrorFeedback inside already, and what is owed twice "
                "grows without bound. Leave out one of the two."
            )
        if self.subtract not in ("own", "mean"):
            raise ValueError(
                f'ErrorFeedback(subtract={self.subtract!r}): it must be "own" (the paper\'s rule) or "mean" (torch\'s).'
            )

    def accepts(self, shape: torch.Size) -> bool:
        """Accept what the codec inside accepts."""
        return self.codec.accepts(shape)

    def average(self, tensors: Tensors, state: State, *, reuse: bool = False) -> Exchange:
        """Average `tensors` plus what is owed, and keep what stays owed."""
        residual: dict[str, Tensor] = state.setdefault("residual", {})
        if reuse and self.subtract == "own" and isinstance(self.codec, LowRank):
            fast = fast_feedback(self.codec, tensors, residual, state.setdefault("inner", {}))
            if fast is not None:
                return (yield from fast)
        wanted = {name: _owed(t, residual.get(name)) for name, t in tensors.items()}
        sent = yield from self.codec.average(wanted, state.setdefault("inner", {}))
        said = sent.own() if self.subtract == "own" else sent.mean
        ok = sent.finite()
        for name, want in wanted.items():
            old = residual.get(name)
            if old is None:
                old = torch.zeros_like(want)
            residual[name] = keep_if(ok, want - said[name], old)
        return sent


def _has_feedback(codec: object) -> bool:
    if isinstance(codec, ErrorFeedback):
        return True
    parts = [getattr(codec, f.name) for f in fields(codec)] if is_dataclass(codec) else []
    return any(_has_feedback(part) for part in parts)


def _owed(t: Tensor, residual: Tensor | None) -> Tensor:
    wide = t.to(wide_dtype(t.dtype))
    return wide.clone() if residual is None else wide + residual
