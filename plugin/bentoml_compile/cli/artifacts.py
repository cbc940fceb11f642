"""`bentoml-compile artifacts`: list, show and prune what is stored on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bentoml_compile.artifacts.artifact import Artifact
from bentoml_compile.artifacts.store import Store
from bentoml_compile.cli.units import format_age, format_size, parse_duration, parse_size


@click.group(invoke_without_command=True)
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
@click.option("--older-than", metavar="DURATION", callback=parse_duration, help="Not used for so long, e.g. 7d.")
@click.option(
    "--max-size", metavar="SIZE", callback=parse_size, help="Keep the last used ones up to this size, e.g. 2GB."
)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.pass_obj
def prune(store: Store, older_than: float | None, max_size: int | None, dry_run: bool) -> None:
    """Remove artifacts by age or size, and what killed processes left behind; never what is in use."""
    if older_than is None and max_size is None:
        raise click.UsageError("say what to remove: --older-than 7d, --max-size 2GB, or both")
    removed = store.prune(older_than=older_than, max_bytes=max_size, dry_run=dry_run)
    for artifact in removed:
        click.echo(f"{artifact.model}  {artifact.fingerprint}  {format_size(artifact.size)}")
    verb = "would be removed, unless in use" if dry_run else "removed"
    click.echo(f"{len(removed)} {verb}, {format_size(sum(artifact.size for artifact in removed))}")


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
        rows.append(
            (
                a.model,
                a.fingerprint,
                a.engine,
                format_size(a.size),
                format_age(a.created),
                f"{format_age(a.last_used)} ago",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _details(artifact: Artifact) -> list[str]:
    manifest = artifact.manifest
    lines = [f"{artifact.model}  {artifact.fingerprint}  {artifact.engine}  {format_size(artifact.size)}"]
    lines.append(f"  path: {artifact.path}")
    lines.append(f"  created: {artifact.created:%Y-%m-%d %H:%M:%S %Z} by {manifest.creator}")
    lines.append(f"  last used: {artifact.last_used:%Y-%m-%d %H:%M:%S %Z}")
    lines += ["  axes:", *(f"    {name}: {value}" for name, value in manifest.axes.items())]
    lines += ["  decisions:", *(f"    {line}" for line in json.dumps(manifest.decisions, indent=2).splitlines())]
    lines += ["  traced source files:", *(f"    {path}" for path in manifest.sources)]
    lines += ["  files:", *(f"    {format_size(entry.size):>9}  {name}" for name, entry in manifest.files.items())]
    return lines
