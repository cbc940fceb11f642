"""`bentoml-compile artifacts why`: which stored artifacts a service's models would load, and why not the others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from bentoml_compile.cli.making import making
from bentoml_compile.cli.units import format_age, format_size
from bentoml_compile.cli.warm import say_what_is_left

if TYPE_CHECKING:
    from bentoml_compile.bento.why import Explained, Place, Verdict


@click.command()
@click.argument("target")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def why(context: click.Context, target: str, as_json: bool) -> None:
    """Say of each stored artifact of TARGET's models, e.g. service:Embedder, whether it fits here or what differs.

    TARGET is what `bentoml serve` takes: service:Name, a Bento's tag, or a folder.

    Looks into the Bento, the store and the remote of the service's config. Nothing is compiled, loaded or changed.
    Models of a service that it depends on are those of service:Entry.dependency. Of a legacy service, all runners are
    asked about.

    Exit status: 0 if each model has an artifact that fits, 1 if not, or if only the services that it depends on may
    have models, 2 if the service cannot be made.
    """
    from bentoml_compile.bento.why import why as explain

    if context.parent is not None and context.parent.params.get("root") is not None:
        raise click.UsageError(
            "why looks where the service's config says; set torch_compile.artifacts.store, not --store"
        )
    with making(target):
        workers = explain(target)
    models = [model for worker in workers for model in worker.models]
    if as_json:
        click.echo(json.dumps([_plain(model) for model in models], indent=2))
    else:
        for model in models:
            click.echo("\n".join(_lines(model)))
    is_enough = say_what_is_left(target, bool(models), [name for worker in workers for name in worker.dependencies])
    raise SystemExit(0 if is_enough and all(model.fits for model in models) else 1)


def _lines(model: Explained) -> Iterator[str]:
    yield f"{model.model}  {model.fingerprint}  {'has an artifact that fits' if model.fits else 'nothing fits'}"
    yield from (f"  {note}" for note in model.notes)
    for place in model.places:
        yield f"  {place.name}: {place.root}" + ("" if place.verdicts or place.problem else ": nothing of this model")
        if place.problem:
            yield f"    nothing of it is loaded: {place.problem}"
        for verdict in place.verdicts:
            yield f"    {'fits' if verdict.fits else 'no'}  {'  '.join(_about(verdict))}"
            yield from (f"      {reason}" for reason in verdict.reasons)


def _about(verdict: Verdict) -> Iterator[str]:
    yield verdict.artifact
    if verdict.created is not None:
        yield from (verdict.engine, format_size(verdict.size), f"{format_age(verdict.created)} old")
    if verdict.signature:
        yield verdict.signature


def _plain(model: Explained) -> dict[str, Any]:
    return {**asdict(model), "fits": model.fits, "places": [_plain_place(place) for place in model.places]}


def _plain_place(place: Place) -> dict[str, Any]:
    verdicts = [
        {**asdict(each), "fits": each.fits, "created": each.created.isoformat() if each.created is not None else None}
        for each in place.verdicts
    ]
    return {**asdict(place), "fits": place.fits, "verdicts": verdicts}
