"""ByName: a codec for each pattern of parameter names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import Tensor

from laconic.codecs.contract import Codec, accept_every_shape, check_codec, check_rest
from laconic.codecs.exact import Exact
from laconic.codecs.parts import average_parts
from laconic.exchange import Averaged, Exchange, Peers, State, Tensors
from laconic.values import as_code


@dataclass(frozen=True, repr=False)
class ByName:
    """Sends tensors whose names match a pattern through its codec, and all others through `rest`.

    Patterns are those of a shell: `ByName({"*.embed*": Cast("bf16")}, rest=...)`. The first that matches counts. What
    its codec declines goes to `rest`, which is exact by default and must accept every shape. All codecs run in the same
    rounds.
    """

    codecs: Mapping[str, Codec] = field(hash=False)
    rest: Codec = field(default_factory=Exact)

    __repr__ = as_code
    accepts = accept_every_shape

    def __post_init__(self) -> None:
        given: object = self.codecs
        if not isinstance(given, Mapping) or not all(isinstance(pattern, str) for pattern in given):
            raise ValueError(
                f"ByName({given!r}): the first argument maps patterns of names to codecs, as in "
                'ByName({"*.embed*": Exact()}, rest=Cast("bf16")).'
            )
        object.__setattr__(self, "codecs", dict(self.codecs))
        for codec in (*self.codecs.values(), self.rest):
            check_codec(f"ByName({self.codecs!r}, rest={self.rest!r})", codec)
        check_rest("ByName", self.rest)

    def average(self, tensors: Tensors, state: State, peers: Peers, *, reuse: bool = False) -> Exchange[Averaged]:
        """Average each tensor through the codec for its name."""
        chosen: dict[str, dict[str, Tensor]] = {pattern: {} for pattern in self.codecs}
        others: dict[str, Tensor] = {}
        for name, t in tensors.items():
            pattern = next((each for each in self.codecs if fnmatchcase(name, each)), None)
            accepted = pattern is not None and self.codecs[pattern].accepts(t.shape)
            (others if pattern is None or not accepted else chosen[pattern])[name] = t
        parts = [(f"codec {pattern}", self.codecs[pattern], some) for pattern, some in chosen.items()]
        return (yield from average_parts(tensors, [*parts, ("rest", self.rest, others)], state, peers, reuse=reuse))
