"""Bare modules: gradients are averaged at the optimizer's step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from laconic.checks.headers import Header, Headers
from laconic.exchange import Exchange
from laconic.packing import in_buckets
from laconic.plans.schedules import Payload, Sync
from laconic.session.gradients import GradientAverager, GradientPath, sparse_tables
from laconic.session.live_model import local_of
from laconic.session.scaling import ScaledSteps
from laconic.session.step_headers import StepHeaders


class ModulePath(GradientPath):
    """Averages `.grad` of the parameters that an optimizer holds, before it steps.

    A gradient that is None on this worker only counts as zero. One that is None on all is not sent.
    """

    in_backward = False

    def __init__(
        self, model: nn.Module, averager: GradientAverager, headers: StepHeaders, scaled: Sequence[ScaledSteps]
    ) -> None:
        self._model = model
        self._averager = averager
        self._headers = headers
        self._scaled = scaled
        self._averaged: list[ScaledSteps] = []
        """Optimizers whose gradients of this step `average_now` has averaged."""

    def begin_step(self, sync: Sync | None) -> None:
        """Prepare for the next step."""
        self._sync, self._averaged = sync, []

    def average_now(self, optimizers: Sequence[ScaledSteps]) -> Headers | None:
        """Average the gradients of these optimizers before their steps, unless that is done."""
        waiting = [each for each in optimizers if each not in self._averaged]
        if self._sync is None or not waiting:
            return None
        headers = self._average(self._sync, waiting)
        self._averaged += waiting
        return headers

    def before_optimizer(self, optimizer: ScaledSteps) -> Headers | None:
        """Average the gradients of an optimizer, unless `average_now` has. A step taken again averages again."""
        if self._sync is None:
            return None
        headers = None
        if optimizer in self._averaged:
            self._averaged.remove(optimizer)
            if optimizer.loss_scale is not None and self._averager.lacks_scale:
                raise RuntimeError(
                    "session.average_gradients() has averaged gradients times the loss scale, and residuals of one "
                    "step do not fit the scale of another. Call scaler.unscale_(optimizer) before it."
                )
        else:
            optimizer.unscale()
            headers = self._average(self._sync, [optimizer])
        optimizer.agree()
        return headers

    def _average(self, sync: Sync, optimizers: Sequence[ScaledSteps]) -> Headers:
        queue, live = self._averager.levels[sync.level], self._averager.live
        live.refresh()
        # 1. headers: which parameters have a gradient on some worker
        params = live.originals
        held = {id(p) for each in optimizers for p in each.parameters()}
        here = sum(1 << i for i, p in enumerate(params.values()) if p.grad is not None and id(p) in held)
        headers = self._averager.weigh(queue, self._header(here, optimizers))
        live.sync_new(queue, among_all=queue is self._averager.levels.world)
        # 2. gradients, the same ones on every worker. The others keep None: no optimizer moves these parameters, and
        # their residuals stay.
        used = {
            name: p for i, (name, p) in enumerate(params.items()) if id(p) in held and headers.with_gradient >> i & 1
        }
        # A gradient that this worker lacks is sparse, too, if it is that of an embedding with sparse gradients.
        tables = sparse_tables(self._model).values() if any(p.grad is None for p in used.values()) else ()
        lookups = {id(table.weight) for table in tables}
        sparse = [p for p in used.values() if (id(p) in lookups if p.grad is None else p.grad.is_sparse)]
        grads = {}
        for name, p in used.items():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            elif p.grad.is_sparse:
                p.grad = p.grad.to_dense()
            grads[name] = local_of(p.grad)
        # 3. exchange, in place
        buckets = [{name: grads[name] for name in names} for names in in_buckets({n: live.params[n] for n in used})]
        exchanges: list[Exchange[Any]] = [self._averager.average(bucket) for bucket in buckets]
        check = self._averager.check
        if check.agree is not None:
            exchanges.append(check.conclude())
        queue.run_all(exchanges, Payload.GRADIENT, check.agree)
        for each in sparse:  # sparse again, for optimizers such as SparseAdam
            assert each.grad is not None
            each.grad = each.grad.to_sparse(1)
        return headers

    def _header(self, with_gradient: int, optimizers: Sequence[ScaledSteps]) -> Header:
        """Make a header that also says whose gradients follow, where there are several optimizers."""
        counts = self._averager.counts
        count = None if counts is None else counts.of_gradients()
        header = self._headers.header(with_gradient=with_gradient, count=count)
        if len(self._scaled) == 1:
            return header
        whose = " and ".join(str(self._scaled.index(each) + 1) for each in optimizers)
        return replace(header, plan=f"{header.plan} with the gradients of optimizer {whose}")
