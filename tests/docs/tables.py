"""What `laconic plan` prints, as pages show it: one function for each table.

python -m tests.docs.tables            # writes the tables of docs/choosing.md
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import laconic
from laconic.cli.forecast import PIPED
from laconic.tools.launch.links import link
from laconic.tools.planner.network import ComputedNetwork
from laconic.tools.planner.predict import Forecast, Scenario
from laconic.tools.planner.shapes import from_count

PAGE = Path(__file__).parents[2] / "docs" / "choosing.md"
RATES = ("200 Gbit/s", "25 Gbit/s", "10 Gbit/s", "1 Gbit/s", "100 Mbit/s")
MACHINES = 'laconic plan --parameters 350M --link "4 @ 100GB/s, 2 @ 1Gb/s" --step 250ms'
"""Two machines with four GPUs each, over 1 Gbit/s."""
MARKED = "<!-- printed by {}: python -m tests.docs.tables writes it -->\n"
END = "<!-- end of what was printed -->\n"


def link_forecast(rate: str) -> Forecast:
    """Predict for 8 workers that train 350 M parameters at 0.25 s a step, each with a link of its own."""
    network = ComputedNetwork(link(rate.replace(" ", "").removesuffix("/s").lower(), 8))
    plans = [laconic.plan(text) for text in ("ddp()", "quantized_ddp(bits=4)", "power_sgd()")]
    return Forecast(plans, Scenario(from_count(350_000_000), 8, network, 0.25))


def link_table() -> str:
    """Return the table of plans by link, in Markdown."""
    rows = ["| link of each worker | plan | the same loss, predicted |", "|---|---|---|"]
    for rate in RATES:
        forecast = link_forecast(rate)
        best = forecast.ranked[0]
        sooner, than_alone = best.sooner_than(forecast.ddp) or 0.0, best.sooner_than(forecast.alone) or 0.0
        claim = f"{sooner:.1f} times sooner than `ddp()`, {than_alone:.1f} times sooner than `alone()`"
        plan = repr(best.plan)
        if best is forecast.ddp:
            rows.append(f"| {rate} | `{plan}`: do not compress | |")
        else:
            rows.append(f"| {rate} | `{plan}` | {claim} |")
    return "\n".join(rows) + "\n"


def machines_table() -> str:
    """Return what the command for two machines prints, with the command, as a block of text."""
    ended = subprocess.run(
        [sys.executable, "-m", *shlex.split(MACHINES)], capture_output=True, text=True, check=True, timeout=120
    )
    lines = [line.rstrip() for line in ended.stdout.splitlines() if not line.startswith("--all")]
    wrapped = [re.sub(rf"(.{{1,{PIPED}}})(?: |$)", r"\1\n", line).rstrip() for line in lines]
    return f"```\n{MACHINES}\n```\n\n```text\n" + "\n".join(wrapped).strip() + "\n```\n"


def with_tables(page: str) -> str:
    """Return a page with its tables made again."""
    for name, made in (("laconic plan, by link", link_table), ("laconic plan, two machines", machines_table)):
        before, begin, rest = page.partition(MARKED.format(name))
        _, end, after = rest.partition(END)
        assert begin and end, f"there is no table: {name}"
        page = f"{before}{begin}{made()}{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
