"""Draw the pictures of the documentation: `python docs/pictures.py` writes docs/images/*.svg.

Each SVG has colours for light and dark, so that it can be read by itself and on a forge. The site puts it into the page
without them, and docs/_static/site.css colours it. `front.svg` is drawn from the table of docs/quality.md.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).parent
STYLE = """<style>
text{font:14px system-ui,sans-serif}.small{font-size:12px}.ink{fill:#1d2733}.line{stroke:#5b6775;fill:none}
.soft{fill:#e4e9ef}.one{fill:#3b7dd8}.two{fill:#d9822b}.three{fill:#3f9c6c}.four{fill:#9b59b6}.on{fill:#fff}
@media (prefers-color-scheme:dark){.ink{fill:#dfe5ec}.line{stroke:#93a0af}.soft{fill:#2b333d}}
</style>"""


class Picture:
    """Shapes in one coordinate system. Classes name roles, and style sheets give the colours."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, kind: str = "ink", anchor: str = "start") -> None:
        """Write a text."""
        escaped = text.replace("&", "&amp;").replace("<", "&lt;")
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escaped}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str, label: str = "") -> None:
        """Draw a box, with a label in its middle."""
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"/>')
        if label:
            ink = "ink" if kind == "soft" else "on"
            self.text(x + width / 2, y + height / 2 + 5, label, ink, "middle")

    def line(self, *points: tuple[float, float], arrow: bool = False, dashed: bool = False) -> None:
        """Draw a line through points."""
        path = " ".join(f"{'M' if i == 0 else 'L'}{x:g} {y:g}" for i, (x, y) in enumerate(points))
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        self.parts.append(f'<path class="line" d="{path}" stroke-width="1.5"{dash}/>')
        if arrow:
            (x0, y0), (x, y) = points[-2:]
            turn = math.degrees(math.atan2(y - y0, x - x0))
            self.parts.append(
                f'<path class="line" d="M-7 -4 L0 0 L-7 4" stroke-width="1.5" '
                f'transform="translate({x:g} {y:g}) rotate({turn:.0f})"/>'
            )

    def dot(self, x: float, y: float, kind: str) -> None:
        """Draw a point."""
        self.parts.append(f'<circle class="{kind}" cx="{x:g}" cy="{y:g}" r="6"/>')

    def svg(self) -> str:
        """Return the file."""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img">'
        return "\n".join([head, f"<title>{self.title}</title>", STYLE, *self.parts, "</svg>", ""])


def factors() -> Picture:
    """How a gradient becomes two factors, in two rounds."""
    p = Picture(760, 315, "A gradient matrix of m rows and n columns becomes two thin factors, which workers average")
    for worker, top in ((0, 40), (1, 170)):
        p.text(20, top - 10, f"worker {worker}")
        p.box(20, top, 110, 90, "soft", "M = G + E")
        p.box(190, top, 16, 90, "one")
        p.text(198, top + 105, "P", "ink small", "middle")
        p.line((135, top + 45), (183, top + 45), arrow=True)
        p.text(159, top + 38, "M Q", "ink small", "middle")
        p.line((210, top + 45), (262, 150), arrow=True)
        p.line((322, 150), (372, top + 45), arrow=True)
        p.box(378, top + 37, 110, 16, "two")
        p.text(433, top + 70, "Q = Mᵀ P", "ink small", "middle")
        p.line((492, top + 45), (537, 150), arrow=True)
    p.box(266, 130, 56, 40, "one", "mean")
    p.text(294, 190, "round 1", "ink small", "middle")
    p.box(540, 130, 56, 40, "two", "mean")
    p.text(568, 190, "round 2", "ink small", "middle")
    p.line((600, 150), (632, 150), arrow=True)
    p.box(638, 105, 110, 90, "soft", "P Qᵀ")
    p.text(693, 212, "on every worker", "ink small", "middle")
    p.text(
        20,
        305,
        "sent: rank × (m + n) numbers instead of m × n.  M − own P Qᵀ is the residual E of the next step.",
        "ink small",
    )
    return p


def hierarchy() -> Picture:
    """When workers of a hierarchy average: hierarchical_sgd({4: 2, 16: 8})."""
    p = Picture(760, 300, "Eight workers: groups of two average every 4 steps, all eight every 16 steps")
    p.text(20, 22, "hierarchical_sgd({4: 2, 16: 8})")
    left, wide = 90, 39
    for worker in range(8):
        y = 45 + worker * 28
        p.text(20, y + 5, f"worker {worker}", "ink small")
        p.line((left, y), (left + 16 * wide, y))
        for step in range(1, 17):
            p.parts.append(f'<circle class="soft" cx="{left + step * wide:g}" cy="{y:g}" r="4"/>')
    for step in (4, 8, 12):
        for group in range(4):
            p.box(left + step * wide - 8, 37 + group * 56, 16, 44, "one")
    p.box(left + 16 * wide - 8, 37, 16, 212, "two")
    for step in (4, 8, 12, 16):
        p.text(left + step * wide, 268, f"step {step}", "ink small", "middle")
    p.box(90, 280, 12, 12, "one")
    p.text(108, 291, "mean in groups of 2, over the fast link", "ink small")
    p.box(400, 280, 12, 12, "two")
    p.text(418, 291, "mean of all 8, over the slow link", "ink small")
    return p


def streaming() -> Picture:
    """Which fragment is on the link at which step, beside DiLoCo's one large message."""
    p = Picture(760, 250, "Streaming DiLoCo sends one fragment at a time while training goes on; DiLoCo all at once")
    left, wide, kinds = 130, 38, ("one", "two", "three", "four")
    for step in range(1, 17):
        p.text(left + (step - 0.5) * wide, 20, str(step), "ink small", "middle")
    p.text(20, 20, "step", "ink small")
    p.text(20, 52, "diloco", "ink")
    for step in range(1, 17):
        p.box(left + (step - 1) * wide + 2, 36, wide - 4, 24, "soft")
    p.text(20, 84, "the link", "ink small")
    p.box(left + 15 * wide + 2, 68, 3.0 * wide / 4, 24, "two")
    p.text(left + 15 * wide - 6, 86, "the whole model; workers wait", "ink small", "end")
    p.line((20, 112), (740, 112), dashed=True)
    p.text(20, 142, "streaming", "ink")
    for step in range(1, 17):
        p.box(left + (step - 1) * wide + 2, 126, wide - 4, 24, "soft")
    for row, kind in enumerate(kinds):
        step = 4 * (row + 1)
        p.text(20, 180 + row * 18, f"fragment {row + 1}", "ink small")
        for start in (step - 16, step):
            if start > 0:
                end = min(start + 1, 16.0) + (0.55 if start == 16 else 0)
                p.box(left + start * wide - 2, 168 + row * 18, max(14.0, (end - start) * wide), 14, kind)
                if end <= 16:
                    x = left + (start + 1) * wide
                    p.line((x, 168 + row * 18), (x, 152), arrow=True)
    delayed = "a fragment travels while the next step is computed, and takes effect one step later (delay=1)"
    p.text(left, 245, delayed, "ink small")
    return p


def storeys() -> Picture:
    """The packages, from the command down to values."""
    rows = [
        ("the command", ["cli"], "soft"),
        ("tools", ["planner", "compare", "doctor", "migrate"], "soft"),
        ("around a session", ["integrations", "elastic", "algorithms", "checkpoint"], "three"),
        ("the session", ["attach", "Session", "Steps", "gradient paths", "WeightSync"], "one"),
        ("checks", ["handshake", "headers", "finite", "digests", "ledger"], "four"),
        ("exchanges", ["requests", "queue", "collectives", "lockstep", "dry"], "two"),
        ("values", ["plans", "codecs", "kernels"], "soft"),
    ]
    p = Picture(760, 40 + 46 * len(rows), "The packages of laconic: the command on top, plans and codecs at the bottom")
    for index, (name, boxes, kind) in enumerate(rows):
        y = 20 + index * 46 + (10 if index > 2 else 0)
        p.text(20, y + 21, name, "ink")
        width = (600 - 8 * (len(boxes) - 1)) / len(boxes)
        for place, label in enumerate(boxes):
            p.box(145 + place * (width + 8), y, width, 34, kind, label)
    p.line((20, 160), (745, 160), dashed=True)
    return p


def front() -> Picture:
    """What each plan keeps against how many times fewer bytes it sends, from the table of quality.md."""
    page = (HERE / "quality.md").read_text().partition("## The front")[2]
    rows = re.findall(r"^\| `([^`]+)`[^|]*\|(?:[^|]*\|){3} (\d+) % \| ([\d.]+) × \|$", page, re.M)
    points = [(name, int(kept), float(fewer)) for name, kept, fewer in rows]
    p = Picture(450, 400, "What each plan keeps of the training, against how many times fewer bytes it sends")
    left, top, wide, high = 44, 30, 360, 320

    def x(fewer: float) -> float:
        return left + wide * math.log10(fewer) / math.log10(400)

    def y(kept: float) -> float:
        return top + high * (1 - kept / 100)

    for kept in (0, 25, 50, 75, 100):
        p.line((left, y(kept)), (left + wide, y(kept)), dashed=kept not in (0, 100))
        p.text(left - 8, y(kept) + 4, f"{kept}%", "ink small", "end")
    for fewer in (1, 3, 10, 30, 100, 300):
        p.text(x(fewer), top + high + 20, f"{fewer}×", "ink small", "middle")
    p.text(left + wide, top + high + 40, "fewer bytes than ddp()", "ink small", "end")
    p.text(left + 6, y(0) - 6, "alone(): workers that never communicate", "ink small")
    p.text(left, top - 12, "kept", "ink small", "end")
    for name, kept, fewer in points:
        dx, dy, anchor = LABELS.get(name, (10, 4, "start"))
        p.dot(x(fewer), y(kept), "one")
        p.text(x(fewer) + dx, y(kept) + dy, name.replace("bytes=", ""), "ink small", anchor)
    return p


def suite() -> Picture:
    """What frugal keeps of each small training, from the table of quality.md."""
    table = (HERE / "quality.md").read_text().partition("<!-- measured: suite")[2].partition("<!-- end")[0]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\|.*\|$", table, re.M)]
    plans = {row[0]: row[1:] for row in cells}
    shown = ["`quantized_ddp()`", *(f'`frugal("{times}x")`' for times in (30, 60, 120))]
    p = Picture(
        760, 400, "What frugal keeps of each training of the suite, against how many times fewer bytes it sends"
    )
    left, top, wide, high, most = 60, 30, 580, 320, 120

    def x(fewer: float) -> float:
        return left + wide * math.log10(fewer) / math.log10(150)

    def y(kept: float) -> float:
        return top + high * (1 - kept / most)

    for kept in range(0, most + 1, 20):
        p.line((left, y(kept)), (left + wide, y(kept)), dashed=kept not in (0, 100))
        p.text(left - 8, y(kept) + 4, f"{kept}%", "ink small", "end")
    for fewer in (1, 3, 10, 30, 60, 120):
        p.text(x(fewer), top + high + 20, f"{fewer}×", "ink small", "middle")
    p.text(left + wide, top + high + 40, "fewer bytes than ddp()", "ink small", "end")
    p.text(left, top - 12, "kept", "ink small", "end")
    ends: list[tuple[float, float, str]] = []
    for index, name in enumerate(plans["plan"]):
        points = [(1.0, 100.0)]
        for found in (re.fullmatch(r"([-\d, ]+) \((\d+) ×\)", plans[plan][index]) for plan in shown):
            if found:
                kept = [float(each) for each in found[1].split(",")]
                points.append((float(found[2]), max(0.0, min(most, sum(kept) / len(kept)))))
        places = [(x(fewer), y(kept)) for fewer, kept in points]
        for a, b in pairwise(places):
            p.line(a, b)
        for place in places[1:]:
            p.dot(*place, ("one", "two", "three", "four")[index % 4])
        ends.append((places[-1][1], places[-1][0], name))
    last = 0.0
    for at, right, name in sorted(ends):  # names of neighbours are spread
        last = max(at, last + 14)
        p.line((right + 4, at), (left + wide + 16, last), dashed=True)
        p.text(left + wide + 20, last + 4, name, "ink small")
    return p


LABELS = {
    "ddp()": (10, -8, "start"),
    "quantized_ddp(bits=4)": (0, 22, "middle"),
    'frugal(bytes="30x")': (-10, 5, "end"),
    'frugal(bytes="60x")': (6, -11, "end"),
    "power_sgd(rank=32)": (12, 16, "end"),
    'frugal(bytes="120x")': (-6, -11, "start"),
    "sparse_loco()": (-10, 6, "end"),
    "streaming_diloco(mix=0.5)": (-10, 8, "end"),
}
"""Where the name of a point is written, beside it: its neighbours and the lines are near."""

PICTURES = {
    **{"factors": factors, "hierarchy": hierarchy, "streaming": streaming, "storeys": storeys},
    **{"front": front, "suite": suite},
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / "images" / f"{name}.svg").write_text(draw().svg())
