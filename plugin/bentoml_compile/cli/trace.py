"""`bentoml-compile trace`: the traces of a file as trees."""

from __future__ import annotations

from typing import TextIO

import click


@click.command()
@click.argument("file", type=click.File(encoding="utf-8", errors="replace"))
@click.option("--last", type=click.IntRange(min=1), help="Only the newest N traces.")
def trace(file: TextIO, last: int | None) -> None:
    """Print the traces in FILE (OTLP JSON lines; - for stdin) as trees, the newest last."""
    from bentoml_compile.trace_tree import read_traces, render

    found = read_traces(file)
    shown = found.traces if last is None else found.traces[-last:]
    click.echo("\n\n".join("\n".join(render(spans)) for spans in shown) or f"No traces in {file.name}.")
    if found.unreadable:
        click.echo(f"{found.unreadable} lines of {file.name} are not OTLP JSON and were skipped", err=True)
