"""The plot of benchmarks/call.py: for each model the time of a call, and the event loop's lag meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt

from benchmarks import machine

PANELS = {"call_us": "one call, microseconds (median)", "lag_p99_ms": "event loop's lag, milliseconds (p99)"}
OURS, OTHERS = "#2a6f97", "#c8c8c8"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws `result`, the content of call.json, to a PNG at `path`."""
    mpl.use("Agg")
    models = list(dict.fromkeys(row["model"] for row in result["rows"]))
    figure, grid = plt.subplots(
        len(models), len(PANELS), figsize=(10, 1 + 2 * len(models)), layout="constrained", squeeze=False
    )
    for line, model in zip(grid, models, strict=True):
        rows = [row for row in result["rows"] if row["model"] == model]
        for axes, (value, title) in zip(line, PANELS.items(), strict=True):
            _bars(axes, [row for row in rows if row[value]], value, f"{model}: {title}")
    figure.suptitle(machine.in_words(result["machine"]), fontsize=9, color="#555")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _bars(axes: Any, rows: list[dict[str, Any]], value: str, title: str) -> None:
    colours = [OURS if row["way"].startswith("ours") else OTHERS for row in rows]
    bars = axes.barh([row["way"] for row in rows], [row[value] for row in rows], color=colours, height=0.6)
    axes.bar_label(bars, fmt=_label, padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=9)


def _label(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
