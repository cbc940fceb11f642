"""`bentoml-compile pack`: a service's artifacts into `compiled/`, which its Bento takes along."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bentoml_compile.artifacts.axes import Fingerprint
from bentoml_compile.artifacts.bundle import Bundle
from bentoml_compile.artifacts.folder import Folder
from bentoml_compile.artifacts.store import Artifact, Store
from bentoml_compile.cli.units import format_size
from bentoml_compile.cli.warm import is_eager, lines_of, made, say_what_is_left
from bentoml_compile.errors import ArtifactRejected, CompileError

if TYPE_CHECKING:
    from bentoml_compile.bento.live import Warmed
    from bentoml_compile.compiled_model import CompiledModel
    from bentoml_compile.report import CompileReport


@dataclass(frozen=True, slots=True)
class _Packed:
    """What became of one model; `refused` says why it was not packed."""

    report: CompileReport
    artifacts: tuple[tuple[Path, int], ...] = ()  # and their sizes
    passed_over: tuple[str, ...] = ()  # of other fingerprints
    refused: str = ""


@dataclass(frozen=True, slots=True)
class _Part:
    """What became of one worker's models, where it went, where a boot looks for it, and the tag of its Bento."""

    models: list[_Packed]
    root: Path
    found: Path | None
    dependencies: tuple[str, ...]
    bento: str


@click.command()
@click.argument("target")
@click.option("--into", type=click.Path(path_type=Path, file_okay=False), help="Default: compiled/ beside service.py.")
@click.option("--all", "take_all", is_flag=True, help="Also what this machine has stored for others or other settings.")
def pack(target: str, into: Path | None, take_all: bool) -> None:
    """Warm TARGET, e.g. service:Embedder, and copy its models' artifacts to where a Bento takes them along.

    TARGET is what `bentoml serve` takes: service:Name, a Bento's tag, or a folder. Run it once on each kind of machine:
    artifacts of other fingerprints there are kept.

    Exit status: 0 if all models are packed, 1 if one is served eagerly or by torch.compile, whose code works only where
    it was made, or if only the services that it depends on may have models, 2 if the service cannot be made or the
    folder not be written.
    """
    into = None if into is None else into.absolute()
    parts = made(target, partial(_pack, into, take_all))
    models = [(packed, part.root) for part in parts for packed in part.models]
    for packed, root in models:
        click.echo("\n".join(_lines(packed, root)))
    is_enough = say_what_is_left(target, bool(models), [name for part in parts for name in part.dependencies])
    if any(packed.artifacts for packed, _ in models):
        click.echo(_how_it_travels(parts[0]))
    raise SystemExit(1 if not is_enough or any(packed.refused for packed, _ in models) else 0)


def _pack(into: Path | None, take_all: bool, warmed: Warmed) -> _Part:
    root = into or warmed.bundle
    if root is None:
        raise CompileError("no folder for the service's artifacts is known; give one by --into")
    try:
        models = [_pack_model(model, Bundle(root), take_all=take_all) for model in warmed.models]
    except OSError as error:
        raise CompileError(f"{root} cannot be written: {error}") from error
    return _Part(models, root, warmed.bundle, warmed.dependencies, warmed.bento)


def _pack_model(model: CompiledModel, bundle: Bundle, *, take_all: bool) -> _Packed:
    from bentoml_compile.bento.live import artifact_of, store_of

    report, artifact = model.report, artifact_of(model)
    if is_eager(report):
        return _Packed(report, refused="it is served eagerly")
    if artifact is None:
        return _Packed(report, refused="its artifact was not kept: is artifacts.write false, or the store read-only?")
    try:
        added = [bundle.add(artifact)]
    except ArtifactRejected as error:
        return _Packed(report, refused=str(error))
    passed_over = []
    if take_all:
        for other in _others(store_of(model), artifact):
            try:
                with _held(store_of(model), other) as whole:
                    added.append(bundle.add(whole))
            except ArtifactRejected as error:
                passed_over.append(f"{other.fingerprint}: {error}")
    return _Packed(report, tuple((each.path, each.size) for each in added), tuple(passed_over))


def _others(store: Folder, artifact: Artifact) -> list[Artifact]:
    """The last used artifact of each other fingerprint of the same model."""
    found = {each.fingerprint: each for each in reversed(store.artifacts()) if each.model == artifact.model}
    return [each for fingerprint, each in found.items() if fingerprint != artifact.fingerprint]


@contextlib.contextmanager
def _held(store: Store, artifact: Artifact) -> Iterator[Artifact]:
    """One that is whole, of the same fingerprint."""
    found = store.lookup(artifact.model, Fingerprint(artifact.axes, artifact.manifest.attributes))
    if found.artifact is None:
        raise ArtifactRejected(found.rejected[0].reason if found.rejected else "it was removed")
    try:
        yield found.artifact
    finally:
        found.artifact.release()


def _lines(packed: _Packed, root: Path) -> Iterator[str]:
    yield from lines_of(packed.report)
    for path, size in packed.artifacts:
        yield f"  packed: {os.path.relpath(path, root.parent)}, {format_size(size)}"
    yield from (f"  passed over: {reason}" for reason in packed.passed_over)
    if packed.refused:
        yield f"  not packed: {packed.refused}"


def _how_it_travels(part: _Part) -> str:
    root = part.root
    if root != part.found:
        return f"All of it is in {root}. A boot looks into {part.found or 'compiled/ beside service.py'}."
    if part.bento:
        return f"The Bento {part.bento} now carries it, in {root}; a later build does not take it over."
    return f'The Bento takes {root} along if its bentofile.yaml has, under include:\n  - "/{root.name}/**"'
