"""What a probe has found, for people."""

from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from laconic.tools.planner.hierarchy import pair_rates, propose, short_rate
from laconic.tools.planner.probe_data import OPS, Probe
from laconic.tools.units import human_bytes

WIDTH = 120
MOST_HOSTS = 12
"""Larger matrices are not printed."""


def print_summary(probe: Probe) -> None:
    """Print levels and collectives, the links between hosts, the proposed hierarchy, codecs, memory and the step."""
    console = Console(width=WIDTH, highlight=False)
    hosts = len(probe.hosts)
    link = "" if probe.link is None else f", link {probe.link}"
    console.print(
        f"{probe.workers} worker{'s' * (probe.workers > 1)} on {hosts} host{'s' * (hosts > 1)}, {probe.backend}, "
        f"computing on {probe.device} with {probe.threads} thread{'s' * (probe.threads > 1)}{link}"
    )
    if probe.timings:
        console.print(_collectives(probe))
    if 1 < hosts <= MOST_HOSTS:
        console.print("links between hosts: rates, and latencies below the diagonal")
        console.print(_links(probe))
    proposed = propose(probe)
    if proposed is not None:
        console.print(f"hierarchy: {proposed.words}.\n")
    if probe.codecs:
        size = f"{probe.model.parameters:,} parameters of {probe.model.name}"
        console.print(f"own computation to average {size} once, without the network")
        console.print(_codecs(probe))
    console.print(f"memory: {human_bytes(probe.memory.bandwidth_bps / 8)}/s read and written")
    console.print(_step(probe))


def _collectives(probe: Probe) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("level")
    table.add_column("collective")
    for heading in ("latency\na hop", "bandwidth", "largest", "took", "spread"):
        table.add_column(heading, justify="right")
    for level, workers in probe.levels.items():
        for op in OPS:
            found = probe.fit(op, level)
            largest = max(probe.of(op, level), key=lambda each: each.bytes)
            table.add_row(
                f"{level} ({workers})",
                op,
                seconds_text(found.latency_s),
                f"{short_rate(found.bandwidth_bps)}/s",
                human_bytes(largest.bytes),
                seconds_text(largest.seconds),
                f"{largest.spread:.0%}",
            )
    return table


def _links(probe: Probe) -> Table:
    """The rate of each pair of hosts, of its slower direction, and its latency below the diagonal."""
    rates, hosts = pair_rates(probe.links), range(len(probe.hosts))
    latencies = {(each.sender, each.receiver): each.latency_s for each in probe.links}
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("host")
    for host in hosts:
        table.add_column(str(host), justify="right")
    for a in hosts:
        cells = [
            f"{short_rate(rates[a, b])}" if a < b else seconds_text(latencies[a, b]) if a > b else "" for b in hosts
        ]
        table.add_row(str(a), *cells)
    return table


def _codecs(probe: Probe) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("plan")
    for heading in ("seconds", "spread"):
        table.add_column(heading, justify="right")
    for each in probe.codecs:
        table.add_row(each.plan, seconds_text(each.seconds), f"{each.spread:.0%}")
    return table


def _step(probe: Probe) -> str:
    step = probe.step
    if step is None:
        return "step: not measured. Let --model return a model and a function of its loss, or use --step-script."
    text = f"step without synchronising: {seconds_text(step.seconds)}"
    if step.backward_share is None:
        return text
    names = (("forward", step.forward_s), ("backward", step.backward_s), ("optimizer", step.optimizer_s))
    return f"{text} ({', '.join(f'{name} {seconds_text(median(samples))}' for name, samples in names)})"


def seconds_text(seconds: float) -> str:
    """Format a duration in three digits.

    >>> seconds_text(0.0123), seconds_text(2.5), seconds_text(4.56e-5)
    ('12.3 ms', '2.5 s', '45.6 us')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
