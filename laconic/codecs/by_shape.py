"""ByShape: tensors that one codec accepts go to it, all others to a second codec, in the same rounds."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from laconic.codecs.contract import Codec, accept_every_shape, check_codec, check_rest
from laconic.codecs.exact import Exact
from laconic.codecs.feedback import ErrorFeedback, feedback_state
from laconic.codecs.low_rank import LowRank
from laconic.codecs.low_rank_state import Factors
from laconic.codecs.parts import average_parts
from laconic.exchange import Averaged, Exchange, Peers, State, Tensors
from laconic.kernels.choose import can_fuse_all, fast_by_shape
from laconic.values import as_code


@dataclass(frozen=True, repr=False)
class ByShape:
    """Sends matrices through one codec, and the vectors and small tensors that it declines through `rest`.

    `rest` is exact by default. Both codecs run in the same rounds: means of one dtype that they request in one round
    are sent as one message.
    """

    codec: Codec
    rest: Codec = field(default_factory=Exact)

    __repr__ = as_code
    accepts = accept_every_shape

    def __post_init__(self) -> None:
        check_codec(f"ByShape({self.codec!r}, rest={self.rest!r})", self.codec)
        check_codec(f"ByShape({self.codec!r}, rest={self.rest!r})", self.rest)
        check_rest("ByShape", self.rest)

    def average(self, tensors: Tensors, state: State, peers: Peers, *, reuse: bool = False) -> Exchange[Averaged]:
        """Average each tensor through the codec for its shape."""
        fast = self._fast(tensors, state, peers) if reuse else None
        if fast is not None:
            return (yield from fast)
        chosen, others = self._split(tensors)
        return (
            yield from average_parts(
                tensors, [("codec", self.codec, chosen), ("rest", self.rest, others)], state, peers, reuse=reuse
            )
        )

    def _fast(self, tensors: Tensors, state: State, peers: Peers) -> Exchange[Averaged] | None:
        """Return one fused exchange for both codecs, where kernels for that exist."""
        feedback = self.codec
        if not isinstance(feedback, ErrorFeedback) or not feedback.is_plain or self.rest != Exact():
            return None
        if not isinstance(feedback.codec, LowRank) or feedback.codec.bits or not can_fuse_all(tensors):
            return None
        residual, inner = feedback_state(state.setdefault("codec", {}))
        return fast_by_shape(feedback.codec, self._split, tensors, residual, Factors(inner), peers)

    def _split(self, tensors: Tensors) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the tensors that the first codec accepts, and the others; each shape is tested once."""
        accepted: dict[torch.Size, bool] = {}
        chosen: dict[str, Tensor] = {}
        others: dict[str, Tensor] = {}
        for name, t in tensors.items():
            if t.shape not in accepted:
                accepted[t.shape] = self.codec.accepts(t.shape)
            (chosen if accepted[t.shape] else others)[name] = t
        return chosen, others
