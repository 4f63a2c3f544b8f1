"""A probe on real workers over loopback, with a small budget."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import laconic
from laconic.codecs import Codec
from laconic.codecs.routing import routed
from laconic.exchange import State, all_finite
from laconic.tools.errors import UsageError
from laconic.tools.planner.measure import Meter, own_seconds, sizes
from laconic.tools.planner.network import fit
from laconic.tools.planner.probe import ProbeOptions, run_probe
from laconic.tools.planner.probe_data import OPS, Probe
from tests.workers import run_workers

CPU = torch.device("cpu")


def small(worker: int, options: ProbeOptions) -> tuple[str, list[tuple[float, str]]]:
    shown: list[tuple[float, str]] = []
    probe = run_probe(options, lambda done, text: shown.append((done, text)))
    return probe.to_json(), shown


def test_two_workers():
    plans = (laconic.diloco(period=2), laconic.alone(), laconic.ddp())
    options = ProbeOptions(f"{__name__}:a_line", plans, front=False, longest_s=0.005)
    (text, shown), (other, _) = run_workers(small, 2, (options,))
    assert text == other  # all workers have the same result
    probe = Probe.from_json(text)
    assert (probe.workers, probe.hosts, probe.backend, probe.device) == (2, ((0, 1),), "gloo", "cpu")
    assert probe.levels == {"world": 2}
    for op in OPS:
        measured = probe.of(op)
        assert [each.bytes for each in measured] == sorted({each.bytes for each in measured})
        assert len(measured) == 6
        assert measured[0].bytes == 1024
        assert all(len(each.samples) >= 3 for each in measured)
        assert fit(measured).bandwidth_bps > 1e6
    assert [each.plan for each in probe.codecs] == ["diloco(period=2)", "ddp()"]  # alone() has no codec
    assert probe.model.shapes == {"weight": (1, 3), "bias": (1,)}
    assert probe.step is not None
    assert len(probe.step.by_worker) == 2
    assert len(probe.step.forward_s) == len(probe.step.backward_s) == len(probe.step.samples)
    shares = [done for done, _ in shown]
    assert shares == sorted(shares)
    assert (shares[0], shown[-1]) == (0.0, (1.0, "done"))


@pytest.mark.slow
def test_groups_and_a_model_without_a_loss():
    options = ProbeOptions(
        f"{__name__}:two_matrices", (laconic.power_sgd(rank=1),), front=False, groups=(2,), longest_s=0.002
    )
    probes = [Probe.from_json(text) for text, _ in run_workers(small, 4, (options,))]
    assert all(each == probes[0] for each in probes)
    assert probes[0].levels == {"groups of 2": 2, "world": 4}
    assert probes[0].step is None
    assert probes[0].model.shapes == {"0.weight": (8, 4), "1.weight": (4, 8)}


def a_line() -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    model = torch.nn.Linear(3, 1)
    return model, lambda: model(torch.ones(8, 3)).square().mean()


def two_matrices() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.Linear(8, 4, bias=False))
    model.register_parameter("frozen", torch.nn.Parameter(torch.zeros(3), requires_grad=False))
    return model


def compute_without_network(worker: int, codecs: list[Codec]) -> list[bool]:
    """For each codec, whether it ends as with a network: with means of the right shapes that are finite."""
    meter = Meter(CPU, CPU)
    torch.manual_seed(worker)
    tensors = {"a": torch.randn(48, 32), "b": torch.randn(7)}
    ended = []
    for codec in codecs:
        state: State = {}
        for _ in range(3):  # residuals and warm factors of earlier rounds
            seconds, end = own_seconds(meter, codec.average(tensors, state, meter.world.peers))
            alike = all(end.mean[name].shape == t.shape for name, t in tensors.items())
            ended.append(seconds > 0 and alike and bool(end.finite()) and bool(all_finite(end.mean)))
    meter.close()
    return ended


def test_codecs_compute_without_a_network():
    plans = ("ddp()", "quantized_ddp(bits=4)", "power_sgd(rank=2)", "diloco()", "frugal('200x')", "sparse_loco()")
    codecs = [routed(laconic.plan(text).codec) for text in plans]
    for ended in run_workers(compute_without_network, 3, (codecs,)):
        assert all(ended)
        assert len(ended) == 3 * len(codecs)


def test_sizes_are_six_whatever_the_limit():
    for largest in (1, 5000, 1 << 25):
        found = sizes(largest, step=24)
        assert len(set(found)) == 6
        assert found == sorted(found)
        assert all(size % 24 == 0 for size in found)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ProbeOptions(groups=(3,)), "--groups 3: 4 workers cannot be divided into groups of 3."),
        (ProbeOptions(groups=(1,)), "--groups 1: 4 workers cannot be divided into groups of 1."),
        (ProbeOptions(longest_s=0), "--longest 0: it must be a number above 0."),
        (ProbeOptions("bert"), "--model bert: write module:function."),
    ],
)
def test_mistakes(options, words):
    with pytest.raises(UsageError, match=words):
        options.check(workers=4)
