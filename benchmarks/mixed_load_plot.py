"""The plot of benchmarks/mixed_load.py: each request's latency over time, and how many were slower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from benchmarks import machine

COLOURS = {"eager": "#a0a0a0", "by hand": "#d1495b", "ours": "#2a6f97"}


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws `result`, the content of mixed_load.json, to a PNG at `path`."""
    mpl.use("Agg")
    figure, (over_time, slower) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharey=True)
    for way, answers in result["answers"].items():
        ended = [one / 1e3 for one in answers["ended_ms"]]
        seconds = [end - start / 1e3 for end, start in zip(ended, answers["started_ms"], strict=True)]
        over_time.plot(ended, seconds, ".", markersize=3, color=COLOURS[way], label=_label(way, result["ways"][way]))
        share = [(len(seconds) - rank) / len(seconds) for rank in range(len(seconds))]
        slower.plot(share, sorted(seconds), color=COLOURS[way], drawstyle="steps-post")
    _finish(over_time, slower)
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", markerscale=3)
    figure.suptitle(f"{result['clients']} clients; {machine.in_words(result['machine'])}", fontsize=9, color="#555")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _finish(over_time: Axes, slower: Axes) -> None:
    over_time.set(yscale="log", xlabel="seconds since the service was ready", ylabel="latency of a request, seconds")
    over_time.yaxis.set_major_formatter(FuncFormatter(_plain))
    slower.set(xscale="log", xlabel="share of the requests that take at least so long")
    slower.invert_xaxis()
    slower.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
    for axes in (over_time, slower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)


def _label(way: str, figures: dict[str, Any]) -> str:
    count = figures["compiles_in_requests"]
    compiles = f"{count or 'no'} compile{'s' * (count != 1)} inside requests"
    return f"{way}: {figures['requests_per_second']:.1f} requests a second, {compiles}"


def _plain(number: float, _: int) -> str:
    return f"{number:g}"
