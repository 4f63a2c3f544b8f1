"""The anchor: the weights that all workers shared last. Deltas are taken from it, and the outer step moves it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from laconic.comm.averaging import write
from laconic.packing import wide_dtype
from laconic.plans.outer import Outer
from laconic.session.model_state import ModelState

logger = logging.getLogger(__name__)

Anchors: TypeAlias = Literal["device", "cpu"]


class Anchor:
    """The anchor of one model, in fp32 or wider, on the device of the weights or on the CPU."""

    def __init__(self, model_state: ModelState, where: Anchors) -> None:
        if where not in ("device", "cpu"):
            raise ValueError(f'attach(anchors={where!r}): anchors are on the "device" of the weights, or on the "cpu".')
        self.tensors: dict[str, Tensor] | None = None
        self.is_current = False
        """Whether the last synchronisation set the weights to the anchor, and no step was taken since."""
        self._model_state = model_state
        self._where: Anchors = where

    def begin_step(self, first: bool) -> None:
        """Take the anchor before the first step, and again if other code has changed the weights after a round."""
        if self.tensors is None:
            self._take()
        elif first and self.is_current and not self._equals_weights():
            logger.warning("Weights have changed since they were synchronised: deltas start from those of now.")
            self._take()
        self.is_current = False

    def _take(self) -> None:
        self._model_state.refresh()
        self.tensors = {}
        self.add(self._model_state.params)

    def add(self, params: Mapping[str, Tensor]) -> None:
        """Let deltas of these parameters start from their values of now, which all workers share."""
        assert self.tensors is not None
        self.tensors |= {name: self._copied(p) for name, p in params.items()}

    def _copied(self, p: Tensor) -> Tensor:
        wide = wide_dtype(p.dtype)
        if self._where == "cpu" and p.device.type != "cpu":
            return torch.empty(p.shape, dtype=wide, pin_memory=p.is_cuda).copy_(p)
        return p.to(wide, copy=True)

    def has(self, name: str) -> bool:
        """Return whether deltas of a parameter are taken: not if it came since the last round, or was frozen."""
        state = self._model_state
        known = self.tensors is not None and name in self.tensors and name not in state.unsynced
        return known and state.originals[name].requires_grad

    def shared(self) -> dict[str, Tensor] | None:
        """Return the anchor of the parameters for which it is the same on all workers."""
        new = self._model_state.unsynced
        return None if self.tensors is None else {name: a for name, a in self.tensors.items() if name not in new}

    def deltas(self, names: Iterable[str], zero: bool) -> dict[str, Tensor]:
        """Return anchor − weights, or zeros in their place."""
        assert self.tensors is not None
        params = self._model_state.params
        if zero:
            return {name: torch.zeros_like(self.tensors[name], device=params[name].device) for name in names}
        return {name: self.tensors[name].to(params[name].device) - params[name] for name in names}

    def move(
        self,
        outer: Outer,
        mean: Mapping[str, Tensor],
        mix: float | None = 0.0,
        sent: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Take the outer step from the anchor; the weights become the anchor, but for the share `mix` of their own.

        With mix=None they keep all that they have moved since `sent`, this worker's weights when it sent its deltas.
        """
        assert self.tensors is not None
        params = self._model_state.params
        with torch.no_grad():
            anchor = {name: self.tensors[name] for name in mean if name in params}
            deltas = {name: mean[name].to(a.device) for name, a in anchor.items()}
            outer.step(anchor, deltas, self._model_state.state["outer"])
            for name, a in anchor.items():
                p = params[name]
                if mix is None:
                    assert sent is not None
                    p.copy_(a.to(p.device) + (p.to(a.dtype) - sent[name]))
                else:
                    p.copy_(a if not mix else torch.lerp(a.to(p.device), p.to(a.dtype), mix))

    def restore(self) -> None:
        """Set the weights to the anchor."""
        with torch.no_grad():
            for name, p in self._model_state.params.items():
                if self.has(name):
                    assert self.tensors is not None
                    p.copy_(self.tensors[name])

    def forget(self) -> None:
        """Drop it: the next step begins with another."""
        self.tensors = None

    def load(self, saved: Mapping[str, Tensor] | None) -> None:
        """Load the tensors that were saved."""
        self.is_current = False
        if saved is None:
            self.tensors = None
            return
        self._model_state.refresh()
        self.tensors = {name: self._copied(p) for name, p in self._model_state.params.items() if name in saved}
        write(self.tensors, saved)

    def _equals_weights(self) -> bool:
        assert self.tensors is not None
        self._model_state.refresh()
        params = self._model_state.params
        pairs = [(self.tensors[name], p) for name, p in params.items() if name in self.tensors]
        return not any((a.to(p.device, p.dtype) != p).any().cpu() for a, p in pairs)
