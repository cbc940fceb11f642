"""`bentoml-compile explain`: the graph breaks of a service's models."""

from __future__ import annotations

import click

from bentoml_compile.cli.making import making
from bentoml_compile.cli.warm import say_what_is_left


@click.command()
@click.argument("target")
def explain(target: str) -> None:
    """Print every graph break of the models of TARGET, e.g. service:Embedder.

    TARGET is what `bentoml serve` takes: service:Name, a Bento's tag, or a folder.

    Models of a service that it depends on are those of service:Entry.dependency. Of a legacy service, all runners are
    explained.

    Exit status: 0 without breaks, 1 with breaks, or if only the services that it depends on may have models, 2 if the
    service cannot be made.
    """
    from bentoml_compile.bento.explain import explain as find_breaks

    with making(target):
        explained = find_breaks(target)
    for model, breaks in explained.models:
        count = f"{len(breaks)} graph break{'s' if len(breaks) > 1 else ''}" if breaks else "one graph"
        click.echo(f"{model}: {count}")
        for number, found in enumerate(breaks, 1):
            click.echo(f"  {number}. " + str(found).replace("\n", "\n  "))
    is_enough = say_what_is_left(target, bool(explained.models), explained.dependencies)
    raise SystemExit(0 if is_enough and not any(breaks for _, breaks in explained.models) else 1)
