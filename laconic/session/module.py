"""Bare modules: gradients are averaged at the optimizer's step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from laconic.checks.headers import Headers, exchange_headers
from laconic.codecs import Codec
from laconic.codecs.packing import in_buckets
from laconic.plans.plan import Plan
from laconic.plans.schedules import Payload, Sync
from laconic.session.grad_scaler import ScaledSteps
from laconic.session.gradients import GradientAverager
from laconic.session.model_state import local_of
from laconic.session.stop import StepHeaders


class ModulePath:
    """Averages `.grad` of every parameter. A gradient that is None on this worker only counts as zero."""

    in_backward = False

    def __init__(self, averager: GradientAverager, headers: StepHeaders, scaled: Sequence[ScaledSteps]) -> None:
        self._averager = averager
        self._headers = headers
        self._scaled = scaled
        self._buckets = in_buckets(averager.model_state.params)
        self._sync: Sync | None = None
        self._averaged = False

    def check_plan(self, plan: Plan) -> None:
        """Accept every plan."""

    def install(self) -> None:
        """Install nothing: the session calls `before_optimizer`."""

    def begin_step(self, sync: Sync | None, codec: Codec | None) -> None:
        """Prepare for the next step."""
        self._averager.begin_step(sync, codec)
        self._sync, self._averaged = sync, False

    def average_now(self) -> Headers | None:
        """Average the gradients of this step before the optimizer's step."""
        if self._averaged:
            return None
        headers = self.before_optimizer()
        self._averaged = True
        return headers

    def before_optimizer(self) -> Headers | None:
        """Average the gradients of this step, unless `average_now` has. A step that is taken again averages again."""
        averaged, self._averaged = self._averaged, False
        if self._sync is None or averaged:
            return None
        for each in self._scaled:
            each.unscale()
        headers = self._average(self._sync)
        for each in self._scaled:
            each.agree()
        return headers

    def _average(self, sync: Sync) -> Headers:
        queue, params = self._averager.levels[sync.level], self._averager.model_state.originals
        here = sum(1 << i for i, p in enumerate(params.values()) if p.grad is not None)
        headers = exchange_headers(queue, self._headers.header(with_gradient=here))
        unused = [p for i, p in enumerate(params.values()) if not headers.with_gradient >> i & 1]
        grads = {}
        for name, p in params.items():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            elif p.grad.is_sparse:
                p.grad = p.grad.to_dense()
            grads[name] = local_of(p.grad)
        buckets = [{name: grads[name] for name in names} for names in self._buckets]
        queue.run_all([self._averager.average(bucket) for bucket in buckets], Payload.GRADIENT)
        for p in unused:  # on every worker: they stay None, so that no optimizer moves them
            p.grad = None
        return headers

    def after_optimizer(self) -> None:
        """Do nothing: buffers stay as they are."""

    def layout(self) -> dict[str, list[list[str]]]:
        """Return nothing: the buckets follow from the model."""
        return {}

    def repeat_layout(self, layout: Mapping[str, Any]) -> None:
        """Do nothing."""

    def detach(self) -> None:
        """Remove nothing."""
