"""How far off is `laconic plan`? Probe, predict, then run, over real links between network namespaces (needs root).

    python benchmarks/prediction.py --links 10mbit 50mbit 200mbit none

For each link: `laconic probe`, the prediction of a step from it, and the same training with `laconic compare`. Prints a
table of step times, the median and the worst error, and the share of pairs of plans that are ranked right (of those
that differ by more than 10 %).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from itertools import combinations
from pathlib import Path

PLANS = (
    "ddp()",
    "quantized_ddp(bits=4)",
    "power_sgd(rank=20)",
    "streaming_diloco(period=4, fragments=4, delay=0)",
    "frugal(bytes='120x')",
)
DIFFERS = 1.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", default=["10mbit", "50mbit", "200mbit", "none"])
    parser.add_argument("--plans", nargs="+", default=list(PLANS))
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = [row for link in given.links for row in measured(link, given.plans, given.steps, given.workers)]
    show(rows)
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1))


def measured(link: str, plans: list[str], steps: int, workers: int) -> list[dict[str, object]]:
    """Return the predicted and the measured seconds of a step, plan by plan."""
    network = ["--workers", str(workers), *([] if link == "none" else ["--link", link])]
    named = [part for plan in plans for part in ("--plan", plan)]
    with tempfile.TemporaryDirectory() as folder:
        probe, runs = Path(folder, "probe.json"), Path(folder, "runs.json")
        laconic("probe", *network, *named, "--out", str(probe))
        forecast = json.loads(laconic("plan", "--probe", str(probe), *named, "--json"))
        # Steps are counted from the fifth validation on: the first ones warm up.
        laconic("compare", *network, *named, "--no-baselines", "--steps", str(steps), "--json", str(runs))
        found = json.loads(runs.read_text())
    print(f"{link}: {forecast['advice']}", flush=True)
    rows = []
    for predicted, run in zip(forecast["rows"], found, strict=True):
        assert predicted["plan"] == run["plan"]
        rows.append(
            {
                "link": link,
                "plan": run["plan"],
                "predicted_s": predicted["step_s"],
                "low_s": predicted["step_s_low"],
                "high_s": predicted["step_s_high"],
                "measured_s": settled_step_s(run),
                "predicted_bytes": predicted["sent_bytes_per_step"],
                "measured_bytes": run["wire_bytes"] / run["steps"],
            }
        )
    return rows


def settled_step_s(run: dict[str, object]) -> float:
    """Return the seconds of a step after the warm-up: the first quarter of the steps, in whole periods of 16."""
    curve = run["curve"]
    assert isinstance(curve, list)
    first = next(point for point in curve if point["step"] >= run["steps"] // 4)
    last = curve[-1]
    return float(last["seconds"] - first["seconds"]) / (last["step"] - first["step"])


def laconic(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "laconic", *arguments], capture_output=True, text=True, timeout=900, check=False
    )
    if done.returncode:
        raise SystemExit(f"laconic {' '.join(arguments)}: {done.stderr[-2000:]}")
    return done.stdout


def show(rows: list[dict[str, object]]) -> None:
    print("| link | plan | predicted | measured | error | bytes |")
    print("|---|---|---|---|---|---|")
    errors = []
    for row in rows:
        error = float(row["predicted_s"]) / float(row["measured_s"]) - 1  # type: ignore[arg-type]
        errors.append(abs(error))
        sent = float(row["predicted_bytes"]) / float(row["measured_bytes"]) - 1  # type: ignore[arg-type]
        print(
            f"| {row['link']} | `{row['plan']}` | {row['predicted_s']:.3f} s | {row['measured_s']:.3f} s "
            f"| {error:+.0%} | {sent:+.1%} |"
        )
    print(f"error: median {statistics.median(errors):.0%}, worst {max(errors):.0%}")
    right = differing = 0
    for a, b in combinations(rows, 2):
        pair = [float(a["measured_s"]), float(b["measured_s"])]  # type: ignore[arg-type]
        if a["link"] == b["link"] and max(pair) > DIFFERS * min(pair):
            differing += 1
            right += (float(a["predicted_s"]) < float(b["predicted_s"])) == (pair[0] < pair[1])  # type: ignore[arg-type]
    print(f"ranking: {right} of {differing} pairs that differ by more than 10 % are right")


if __name__ == "__main__":
    main()
