"""`bentoml-compile doctor`: what may keep this machine from compiling, storing, sharing and telling."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from bentoml_compile.doctor.check import Finding

_COLORS = {"ok": "green", "warning": "yellow", "problem": "red"}
_INDENT = " " * 21


@click.command()
@click.argument("target", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(target: str | None, as_json: bool) -> None:
    """Check this machine for TARGET, e.g. service:Embedder (default: for a service without settings of its own).

    TARGET is what `bentoml serve` takes: service:Name, a Bento's tag, or a folder.

    Exit status: 0 without problems, 1 with problems.
    """
    from bentoml_compile.bento.doctor import diagnose
    from bentoml_compile.doctor.check import left_behind

    found = []
    for check, finding in _apart(diagnose(target)):
        found.append((check, finding))
        if not as_json:
            _print(check, finding)
    if as_json:
        click.echo(json.dumps([{"check": check, **asdict(finding)} for check, finding in found], indent=2))
    status = 1 if any(finding.status == "problem" for _, finding in found) else 0
    if left_behind():  # the interpreter's own end would wait for what it waits for
        sys.stdout.flush()
        os._exit(status)
    raise SystemExit(status)


def _apart(found: Iterator[tuple[str, Finding]]) -> Iterator[tuple[str, Finding]]:
    """With what the service prints on stderr."""
    while True:
        with contextlib.redirect_stdout(sys.stderr):
            item = next(found, None)
        if item is None:
            return
        yield item


def _print(check: str, finding: Finding) -> None:
    text = finding.text.replace("\n", f"\n{_INDENT}")
    click.echo(click.style(finding.status.ljust(9), fg=_COLORS[finding.status]) + check.ljust(12) + text)
    if finding.fix:
        click.echo(f"{_INDENT}fix: {finding.fix}")
    settings = [name for name in finding.details if name.startswith("torch.")]
    for name, value in finding.details.items():
        if name not in settings:
            click.echo(f"{_INDENT}{name}: {value}")
    if settings:
        click.echo(f"{_INDENT}and {len(settings)} of torch's settings, which --json prints")
