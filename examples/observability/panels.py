"""Draw the panels of `grafana.json` from a Prometheus server's answers, where there is no Grafana.

    python examples/observability/panels.py panels.png --server http://127.0.0.1:9090 --minutes 5

Every query must return data; the names of panels that have none are printed, and the exit status is 1.
"""

import argparse
import json
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import EngFormatter

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("image", type=Path)
parser.add_argument("--server", default="http://127.0.0.1:9090")
parser.add_argument("--minutes", type=float, default=5.0)
args = parser.parse_args()
END = int(time.time())
VARIABLES = {"$job": ".+", "$worker": ".+", "$__rate_interval": "10s"}


def ask(query: str, legend: str) -> dict[str, tuple[list[float], list[float]]]:
    """Return the series of a query by their legend: seconds since the beginning, and values."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    asked = {"query": query, "start": END - 60 * args.minutes, "end": END, "step": 1}
    with urllib.request.urlopen(f"{args.server}/api/v1/query_range?{urllib.parse.urlencode(asked)}") as answer:
        found = json.load(answer)["data"]["result"]
    named = {}
    for series in found:
        name = legend
        for label, value in series["metric"].items():
            name = name.replace("{{" + label + "}}", value)
        seconds, values = zip(*series["values"], strict=True)
        named[name] = (list(seconds), [float(value) for value in values])
    return named


panels = json.loads((Path(__file__).parent / "grafana.json").read_text())["panels"]
drawn = [panel for panel in panels if panel["type"] != "stat"]
figure, axes = pyplot.subplots(-(-len(drawn) // 3), 3, figsize=(14, 2.6 * -(-len(drawn) // 3)), dpi=72)
figure.suptitle("The queries of grafana.json, answered by Prometheus and drawn with matplotlib (this is not Grafana)")
without = []
for panel in panels:
    answers = [ask(target["expr"], target["legendFormat"]) for target in panel["targets"]]
    without += [panel["title"]] if not all(answers) else []
    if panel["type"] == "stat":
        continue
    plot = axes.flat[drawn.index(panel)]
    plot.set_title(panel["title"], fontsize=10)
    if panel["type"] == "xychart":
        sent, loss = (
            dict(zip(*answer[name], strict=True)) for answer, name in zip(answers, ("sent", "loss"), strict=True)
        )
        common = sorted(sent.keys() & loss.keys())
        plot.plot([sent[t] for t in common], [loss[t] for t in common])
        plot.xaxis.set_major_formatter(EngFormatter("B"))
    else:
        first = min((s[0] for answer in answers for s, _ in answer.values()), default=0.0)
        for name, (seconds, values) in sorted(item for answer in answers for item in answer.items()):
            plot.plot([t - first for t in seconds], values, label=name, linewidth=1)
        plot.legend(fontsize=7)
    plot.yaxis.set_major_formatter(EngFormatter())
figure.tight_layout()
figure.savefig(args.image)
print(f"{len(panels) - len(without)} of {len(panels)} panels have data" + "".join(f"; none: {t}" for t in without))
sys.exit(bool(without))
