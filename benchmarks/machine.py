"""What a result was measured on: hardware and versions, never a path or a host name."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch

PACKAGES = ("bentoml-compile", "bentoml", "torch", "transformers")


def describe() -> dict[str, object]:
    """A JSON-able description of this machine."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
    }


def in_words(machine: dict[str, object]) -> str:
    """One line for a plot: "2 cores of Some CPU, torch 2.13.0, BentoML 1.4.40"."""
    gpu = f"{machine['gpu']}, " if machine["gpu"] else ""
    cpu = f"{machine['cores']} cores of {machine['cpu']}"
    return f"{gpu}{cpu}, torch {machine['torch']}, BentoML {machine['bentoml']}"


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
