"""What must hold after every operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor

from tests.property.oracle import Gradients, Oracle
from tests.property.trainer import Report

TOLERANCE = 2e-4
"""Of weights, relative to the largest of a tensor: fp32 beside fp64, over a dozen steps."""
HALF_TOLERANCE = 0.05


def check(oracle: Oracle, reports: Sequence[Report]) -> None:
    """Check all invariants of a state."""
    assert {report.step for report in reports} == {oracle.number}, "the workers count other steps than the oracle"
    assert len({report.synced for report in reports}) == 1, "`synced` differs between workers"
    _check_close(oracle, reports)
    _check_equal_bits(oracle, reports)
    _check_bytes(oracle, reports)
    if oracle.known.lossy:
        oracle.kept.check(reports, oracle.known.lossy)


def check_delivered(seen: Sequence[Gradients | None], reports: Sequence[Report]) -> None:
    """Check the gradients that each worker's optimizer saw."""
    for worker, (gradients, report) in enumerate(zip(seen, reports, strict=True)):
        assert set(gradients or {}) == set(report.delivered), (
            f"worker {worker}: the optimizer saw gradients of {sorted(report.delivered)}, and should have of "
            f"{sorted(gradients or {})}"
        )
        _compare(gradients or {}, report.delivered, f"worker {worker}, gradient of")


def _check_close(oracle: Oracle, reports: Sequence[Report]) -> None:
    for worker, (net, report) in enumerate(zip(oracle.nets, reports, strict=True)):
        _compare(dict(net.named_parameters()), report.weights, f"worker {worker}, weights of")
        _compare(dict(net.named_buffers()), report.buffers, f"worker {worker}, buffer")


def _compare(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], what: str) -> None:
    for name, t in expected.items():
        t = t.detach()
        have = found[name].to(t.dtype)
        tolerance = HALF_TOLERANCE if found[name].dtype.itemsize < 4 else TOLERANCE
        scale = max(1.0, float(t.abs().nan_to_num().max()))
        close = torch.isclose(have, t, rtol=0, atol=tolerance * scale, equal_nan=True)
        assert bool(close.all()), (
            f"{what} {name}: off by {float((have - t).abs().max()):.3g} (largest {scale:.3g}); "
            f"finite: {bool(have.isfinite().all())}, and should be: {bool(t.isfinite().all())}"
        )


def _check_equal_bits(oracle: Oracle, reports: Sequence[Report]) -> None:
    """Workers hold equal bits where the oracle's hold equal numbers, and under a plan that averages gradients."""
    states = [dict(net.state_dict()) for net in oracle.nets]
    held = [report.weights | report.buffers for report in reports]
    for name in held[0]:
        weights = name in reports[0].weights
        for a, b in combinations(range(len(reports)), 2):
            must = torch.equal(states[a][name], states[b][name]) or (weights and not oracle.known.local)
            if must:
                assert _same_bits(held[a][name], held[b][name]), f"workers {a} and {b} hold different bits in {name}"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    a, b = a.contiguous().view(-1), b.contiguous().view(-1)
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _check_bytes(oracle: Oracle, reports: Sequence[Report]) -> None:
    for worker, report in enumerate(reports):
        off = abs(report.wire_bytes - report.ledger_bytes)
        allowed = 8 * oracle.workers * report.collectives  # shards of a wide mean are rounded up
        assert off <= allowed, (
            f"worker {worker}: the ledger has {report.ledger_bytes} bytes, and {report.wire_bytes:.0f} were sent"
        )
        _check_ddp(oracle, report, worker)


def _check_ddp(oracle: Oracle, report: Report, worker: int) -> None:
    """DDP itself sends nothing but its bucket layout, once, and which parameters were used where it must ask that."""
    allowed = 0
    if oracle.setup.wrap == "ddp" and oracle.workers > 1:
        allowed = 2 + (oracle.averaged_steps if "branch" in oracle.setup.features else 0)
    if oracle.workers > 1:
        assert report.ddp_collectives <= allowed, (
            f"worker {worker}: {report.ddp_collectives} collectives outside the ledger, and at most {allowed} are DDP's"
        )
