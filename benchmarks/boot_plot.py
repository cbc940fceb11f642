"""The plot of benchmarks/boot.py: one bar for each kind of boot, split by what the worker was doing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt

from benchmarks import machine

BEFORE = "process, imports, weights"
ORDER = ("lookup", "wait", "load", "dynamo", "export", "aot_autograd", "inductor", "codegen", "autotune", "compile")
LAST = ("verify", "measure", "store", "other")
KINDS = {"eager": "not compiled", "cold": "cold: first boot", "warm": "warm: later boots"}


def in_order(stages: Iterable[str]) -> list[str]:
    """Stages in the order of a boot; unknown ones stand between the compiler's phases and what follows them."""
    known = [*ORDER, *LAST]
    unknown = sorted(set(stages) - set(known))
    return [stage for stage in (*ORDER, *unknown, *LAST) if stage in set(stages)]


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws the medians of `result`, the content of boot.json, to a PNG at `path`."""
    mpl.use("Agg")
    medians = result["medians"]
    stages = in_order({stage for kind in KINDS for stage in medians[kind]["stages"]})
    shown = [stage for stage in stages if max(medians[kind]["stages"].get(stage, 0.0) for kind in KINDS) >= 0.05]
    figure, axes = plt.subplots(figsize=(10, 3.4), layout="constrained")
    left = [0.0] * len(KINDS)
    for name, colour in zip([BEFORE, *shown], _colours(len(shown)), strict=True):
        widths = [_seconds(medians[kind], name) for kind in KINDS]
        axes.barh(list(KINDS.values()), widths, left=left, color=colour, label=name, height=0.6)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, kind in enumerate(KINDS):
        axes.text(medians[kind]["ready_seconds"], row, f"  {medians[kind]['ready_seconds']:.1f} s", va="center")
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("seconds from the start of the process until the service is ready (median)")
    axes.set_title(machine.in_words(result["machine"]), fontsize=9, color="#555")
    figure.legend(frameon=False, fontsize=8, loc="outside right center")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _seconds(median: dict[str, Any], name: str) -> float:
    if name == BEFORE:
        return float(max(median["ready_seconds"] - median["compile_model_seconds"], 0.0))
    return float(median["stages"].get(name, 0.0))


def _colours(count: int) -> list[Any]:
    return ["#c8c8c8", *(plt.get_cmap("tab20")(index) for index in range(count))]
