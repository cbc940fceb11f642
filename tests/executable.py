"""A stand-in for what serves a call: implements listener.Executable."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    model: str = "encoder"
    engine: str = "aot"
    label: str = "x: float32[2, 4]"
    prepared: bool = True
