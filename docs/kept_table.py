"""Write README's table of what plans keep, from the measured trainings: `python docs/kept_table.py`.

The numbers are those that `laconic plan` predicts from (`laconic/tools/planner/quality.json`), which
`benchmarks/trainings.py --record` writes.
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
MARKED = re.compile(r"(?<=<!-- kept: python docs/kept_table.py writes this -->\n\n).*?(?=\n<!-- end of kept -->)", re.S)
COLUMNS = {
    "prose": "small transformer, AdamW",
    "wide": "three times as wide",
    "muon": "the small one, Muon",
    "lstm": "LSTM, SGD",
    "cnn": "ConvNet, SGD",
    "lora": "LoRA, AdamW",
}
"""The training of each column, and what its head says."""
STREAMED = "streaming_diloco(period={}, fragments=4, delay=0)"
FRUGAL = {
    "prose": "power_sgd(rank=12)",
    "wide": STREAMED.format(4),
    "muon": "power_sgd(rank=12)",
    "lstm": STREAMED.format(4),
    "cnn": STREAMED.format(5),
    "lora": STREAMED.format(4),
}
"""What frugal("60x") becomes on the model of each training."""
ROWS = {
    "quantized_ddp()": "quantized_ddp()",
    "power_sgd(rank=32)": "power_sgd(rank=32)",
    "power_sgd(rank=8)": "power_sgd(rank=8)",
    'frugal("60x")': FRUGAL,
    "diloco()": "diloco()",
}
"""The measured plan of each row."""


def table() -> str:
    """Return the table in Markdown: kept, and times fewer bytes."""
    measured = json.loads((ROOT / "laconic" / "tools" / "planner" / "quality.json").read_text())["trainings"]
    lines = [f"| | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, row in ROWS.items():
        cells = []
        for training in COLUMNS:
            found = measured[training]["plans"].get(row if isinstance(row, str) else row[training])
            cells.append(f"{100 * _mean(found['kept']):.0f} %, {found['fewer']:.0f} ×" if found else "-")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _mean(kept: float | dict[str, float]) -> float:
    """Return what a plan kept, in the mean over its seeds if there are several."""
    return statistics.fmean(kept.values()) if isinstance(kept, dict) else kept


if __name__ == "__main__":
    README.write_text(MARKED.sub(lambda _: table(), README.read_text()))
