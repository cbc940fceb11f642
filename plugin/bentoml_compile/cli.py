"""The command `bentoml-compile`: look at artifacts, graph breaks and traces without serving."""

from __future__ import annotations

import json
import os
import re
import traceback
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

import click

from bentoml_compile.artifacts.artifact import Artifact
from bentoml_compile.artifacts.store import Store

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_BYTES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def _seconds(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)([smhdw])", value.strip())
    if match is None:
        raise click.BadParameter(f"{value!r} is not a duration; give a number and s, m, h, d or w, e.g. 7d")
    return float(match[1]) * _SECONDS[match[2]]


def _bytes(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([KMGT]?I?)B?", value.strip().upper())
    if match is None or match[2] not in _BYTES:
        raise click.BadParameter(f"{value!r} is not a size; give a number and KB, MB, GB, TB (or KiB, ...), e.g. 2GB")
    return int(float(match[1]) * _BYTES[match[2]])


@click.group()
@click.version_option(package_name="bentoml-compile")
def main() -> None:
    """Compiled PyTorch models in BentoML: artifacts, graph breaks, traces."""


@main.group(invoke_without_command=True)
@click.option("--store", "root", type=click.Path(path_type=Path), help="Default: $BENTOML_HOME/compile.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def artifacts(context: click.Context, root: Path | None, as_json: bool) -> None:
    """List the artifacts of this machine, the last used first."""
    context.obj = store = Store(root or _default_store())
    if context.invoked_subcommand is not None:
        return
    found = store.artifacts()
    if as_json:
        click.echo(json.dumps([_summary(artifact) for artifact in found], indent=2))
    elif found:
        _print_table(found)
    else:
        click.echo(f"No artifacts in {store.root}.")


@artifacts.command()
@click.argument("id")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def show(store: Store, id: str, as_json: bool) -> None:
    """Show all of one artifact: ID is the beginning of its fingerprint or of its directory's name."""
    found = [a for a in store.artifacts() if a.fingerprint.startswith(id) or a.path.name.startswith(id)]
    if not found:
        raise click.BadParameter(f"no artifact {id!r} in {store.root}; `bentoml-compile artifacts` lists them")
    if as_json:
        details = [{**_summary(artifact), **artifact.manifest.model_dump(mode="json")} for artifact in found]
        click.echo(json.dumps(details, indent=2))
        return
    for artifact in found:
        click.echo("\n".join(_details(artifact)))


@artifacts.command()
@click.option("--older-than", metavar="DURATION", callback=_seconds, help="Not used for so long, e.g. 7d.")
@click.option("--max-size", metavar="SIZE", callback=_bytes, help="Keep the last used ones up to this size, e.g. 2GB.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.pass_obj
def prune(store: Store, older_than: float | None, max_size: int | None, dry_run: bool) -> None:
    """Remove artifacts by age or size, and what killed processes left behind; never what is in use."""
    if older_than is None and max_size is None:
        raise click.UsageError("say what to remove: --older-than 7d, --max-size 2GB, or both")
    removed = store.prune(older_than=older_than, max_bytes=max_size, dry_run=dry_run)
    for artifact in removed:
        click.echo(f"{artifact.model}  {artifact.fingerprint}  {_size(artifact.size)}")
    verb = "would be removed, unless in use" if dry_run else "removed"
    click.echo(f"{len(removed)} {verb}, {_size(sum(artifact.size for artifact in removed))}")


@main.command()
@click.argument("target")
def explain(target: str) -> None:
    """Print every graph break of the models of TARGET, e.g. service:Embedder.

    Exit status: 0 without breaks, 1 with breaks, 2 if the service cannot be made.
    """
    from bentoml.exceptions import BentoMLException

    from bentoml_compile.bento.explain import explain as find_breaks

    try:
        models = find_breaks(target)
    except BentoMLException as error:
        raise click.UsageError(f"{target}: {error}") from error
    except Exception:
        click.echo(traceback.format_exc(), err=True)  # the service's own
        raise click.UsageError(f"{target} could not be made; its error is above") from None
    if not models:
        click.echo(f"{target} compiles no model; call compile_model(...) in its __init__")
    for model, breaks in models:
        count = f"{len(breaks)} graph break{'s' if len(breaks) > 1 else ''}" if breaks else "one graph"
        click.echo(f"{model}: {count}")
        for number, found in enumerate(breaks, 1):
            click.echo(f"  {number}. " + str(found).replace("\n", "\n  "))
    raise SystemExit(1 if any(breaks for _, breaks in models) else 0)


@main.command()
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


def _default_store() -> Path:
    # BentoML's rule, without importing it: that takes a second.
    home = os.environ.get("BENTOML_HOME", os.path.join("~", "bentoml"))
    return Path(os.path.expandvars(os.path.expanduser(home))) / "compile"


def _summary(artifact: Artifact) -> dict[str, Any]:
    return {
        "model": artifact.model,
        "fingerprint": artifact.fingerprint,
        "engine": artifact.engine,
        "size": artifact.size,
        "created": artifact.created.isoformat(),
        "last_used": artifact.last_used.isoformat(),
        "path": str(artifact.path),
    }


def _print_table(artifacts: Sequence[Artifact]) -> None:
    rows = [("MODEL", "FINGERPRINT", "ENGINE", "SIZE", "AGE", "LAST USE")]
    for a in artifacts:
        rows.append((a.model, a.fingerprint, a.engine, _size(a.size), _ago(a.created), f"{_ago(a.last_used)} ago"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _details(artifact: Artifact) -> list[str]:
    manifest = artifact.manifest
    lines = [f"{artifact.model}  {artifact.fingerprint}  {artifact.engine}  {_size(artifact.size)}"]
    lines.append(f"  path: {artifact.path}")
    lines.append(f"  created: {artifact.created:%Y-%m-%d %H:%M:%S %Z} by {manifest.creator}")
    lines.append(f"  last used: {artifact.last_used:%Y-%m-%d %H:%M:%S %Z}")
    lines += ["  axes:", *(f"    {name}: {value}" for name, value in manifest.axes.items())]
    lines += ["  decisions:", *(f"    {line}" for line in json.dumps(manifest.decisions, indent=2).splitlines())]
    lines += ["  traced source files:", *(f"    {path}" for path in manifest.sources)]
    lines += ["  files:", *(f"    {_size(entry.size):>9}  {name}" for name, entry in manifest.files.items())]
    return lines


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _ago(then: datetime) -> str:
    seconds = max(0.0, (datetime.now(timezone.utc) - then).total_seconds())
    for unit in ("w", "d", "h", "m"):
        if seconds >= _SECONDS[unit]:
            return f"{seconds / _SECONDS[unit]:.0f}{unit}"
    return f"{seconds:.0f}s"
