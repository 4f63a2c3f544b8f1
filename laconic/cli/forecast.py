"""The tables of `laconic plan`."""

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from laconic import plan as parse_plan
from laconic.tools.errors import UsageError
from laconic.tools.planner.checking import finished_runs, terms
from laconic.tools.planner.hierarchy import short_rate
from laconic.tools.planner.predict import Prediction, Scenario
from laconic.tools.planner.rows import Forecast
from laconic.tools.units import human_bytes, rate_text, share

OUTCOME = ("sent\na step", "step", "computing", "kept", "sooner\nthan ddp", "than\nalone")
"""What decides: "sooner" is to the same loss."""
DETAILS = ("exposed", "steps faster\nthan ddp", "memory", "break-even", "timeout")
ONE_TABLE = 135
"""The columns of a terminal in which all fits into one table."""


def forecast_tables(forecast: Forecast, width: int) -> list[Table]:
    """One row for each plan, the soonest at the same loss first; in two tables, if the terminal is narrow."""
    s = forecast.scenario
    rate = rate_text(float(f"{s.network.rate_bps:.4g}"))
    title = f"{s.shapes.parameters:,} parameters, {s.workers} workers, {s.compute_s:.4g} s a step, {rate}"
    parts = [OUTCOME + DETAILS] if width >= ONE_TABLE else [OUTCOME, DETAILS]
    tables: list[Table] = []
    for headings in parts:
        shown = None if tables else title
        table = Table(title=shown, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("plan", overflow="fold")
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        for each in forecast.ranked:
            cells = _cells(forecast, each)
            table.add_row(escape(repr(each.plan)), *(cells[heading] for heading in headings))
        tables.append(table)
    return tables


def _cells(forecast: Forecast, each: Prediction) -> dict[str, str]:
    low, high = each.interval_s
    outcome = (
        human_bytes(each.sent_bytes_per_step),
        f"{each.step_s:.3g} s" if low == high else f"{each.step_s:.3g} s\n{low:.2g} to {high:.2g}",
        share(each.now.utilisation),
        share(each.kept),
        _times(each.sooner_than(forecast.ddp)),
        _times(each.sooner_than(forecast.alone)),
    )
    details = (
        f"{each.now.exposed_s:.3g} s",
        _times(forecast.ddp.step_s / each.step_s),
        human_bytes(each.memory_bytes),
        _rate(None if each is forecast.ddp else each.break_even_bps(forecast.ddp)),
        f"{each.timeout_s} s",
    )
    return dict(zip(OUTCOME + DETAILS, outcome + details, strict=True))


def wanted_table(rows: list[dict[str, object]]) -> Table:
    """What each plan needs for the asked shares of the time, what it costs."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("plan", overflow="fold")
    first = rows[0]
    needs = first.get("needs_bps")
    headings = [f"needs for {need} %" for need in needs] if isinstance(needs, dict) else []
    headings += [name for name in ("price_of_1000_steps", "bytes_a_day", "within_budget") if name in first]
    for heading in headings:
        table.add_column(heading.replace("_", " "), justify="right", no_wrap=True)
    for row in rows:
        needs = row.get("needs_bps")
        cells = [_rate(value) for value in needs.values()] if isinstance(needs, dict) else []
        if "price_of_1000_steps" in row:
            cells.append(f"{row['price_of_1000_steps']:.2f}")
        if "bytes_a_day" in row:
            cells += [f"{row['bytes_a_day']:.3g}", "yes" if row["within_budget"] else "no"]
        table.add_row(escape(str(row["plan"])), *cells)
    return table


def check_table(path: Path, scenario: Scenario, plans: list[str] | None) -> Table:
    """Predictions beside the runs of a file, term by term."""
    wanted = {parse_plan(text) for text in plans or ()}
    table = Table(title=f"prediction beside {path.name}, per step", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("plan", "term", "predicted", "measured", "error"):
        table.add_column(heading, justify="left" if heading in ("plan", "term") else "right", overflow="fold")
    for run in finished_runs(path):
        parsed = parse_plan(run.plan)
        if run.without_link or (wanted and parsed not in wanted):
            continue
        if (run.workers, run.parameters) != (scenario.workers, scenario.shapes.parameters):
            raise UsageError(
                f"--check {path}: {run.plan} ran {run.parameters:,} parameters on {run.workers} workers, and the "
                f"prediction is for {scenario.shapes.parameters:,} on {scenario.workers}. Predict the same training."
            )
        for term in terms(Prediction(parsed, scenario), run):
            error = "-" if term.error is None else f"{term.error:+.1%}"
            table.add_row(escape(run.plan), term.name, f"{term.predicted:.4g}", f"{term.measured:.4g}", error)
    return table


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _rate(value: float | None) -> str:
    return "-" if value is None else "any" if value <= 0 else short_rate(value)
