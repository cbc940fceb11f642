"""Durations, sizes and ages, as the command reads and prints them."""

from __future__ import annotations

import re
from datetime import datetime, timezone

import click

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_BYTES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_duration(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Option callback: the seconds of `90s`, `1.5h`, `7d`, ...; BadParameter for anything else."""
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)([smhdw])", value.strip())
    if match is None:
        raise click.BadParameter(f"{value!r} is not a duration; give a number and s, m, h, d or w, e.g. 7d")
    return float(match[1]) * _SECONDS[match[2]]


def parse_size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Option callback: the bytes of `500MB`, `2GiB`, ...; BadParameter for anything else."""
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([KMGT]?I?)B?", value.strip().upper())
    if match is None or match[2] not in _BYTES:
        raise click.BadParameter(f"{value!r} is not a size; give a number and KB, MB, GB, TB (or KiB, ...), e.g. 2GB")
    return int(float(match[1]) * _BYTES[match[2]])


def format_size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def format_age(then: datetime) -> str:
    seconds = max(0.0, (datetime.now(timezone.utc) - then).total_seconds())
    for unit in ("w", "d", "h", "m"):
        if seconds >= _SECONDS[unit]:
            return f"{seconds / _SECONDS[unit]:.0f}{unit}"
    return f"{seconds:.0f}s"
