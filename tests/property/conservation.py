"""Nothing is lost: what was delivered and what is still in the residuals add up to what was to be averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from tests.property.trainer import Report


@dataclass
class Conservation:
    """The sums since a plan began, by parameter: of true means and of delivered ones."""

    true: dict[str, Tensor] = field(default_factory=dict)
    delivered: dict[str, Tensor] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    """The sum over the steps of the largest number that was to be sent."""
    holds: bool = True

    def add(
        self,
        true: Mapping[str, Tensor],
        delivered: Mapping[str, Tensor],
        exact: bool = True,
        forgotten: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Count one average, and what a decay took from the residuals before it.

        Where a worker was excluded (`exact` is False), sums say nothing from then on.
        """
        self.holds = self.holds and exact
        for name, t in true.items():
            t = t - forgotten.get(name, 0)
            self.true[name] = self.true.get(name, torch.zeros_like(t)) + t
            self.largest[name] = self.largest.get(name, 0.0) + float(t.abs().max())
        for name, t in delivered.items():
            self.delivered[name] = self.delivered.get(name, torch.zeros_like(t)) + t

    def forget(self, name: str) -> None:
        """Count this parameter anew: its residual was dropped."""
        for sums in (self.true, self.delivered, self.largest):
            sums.pop(name, None)

    def check(self, reports: Sequence[Report], lossy: float) -> None:
        """Compare the sums, with the residuals that the workers hold now."""
        if not self.holds:
            return
        for name, true in self.true.items():
            zero = torch.zeros_like(true)
            residuals = [report.residual[name].to(true.dtype) for report in reports if name in report.residual]
            residual = sum(residuals, zero) / len(reports)
            lost = float((true - self.delivered.get(name, zero) - residual).abs().max())
            half = reports[0].weights[name].dtype.itemsize < 4
            allowed = (lossy + (0.01 if half else 0.0)) * (self.largest[name] + float(residual.abs().max())) + 2e-6
            assert lost <= allowed, (
                f"{name}: delivered + residual differ from the sum of true means by {lost:.3g}; the sum is "
                f"{float(true.abs().max()):.3g}, {allowed:.3g} is allowed"
            )
