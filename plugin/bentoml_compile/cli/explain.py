"""`bentoml-compile explain`: the graph breaks of a service's models."""

from __future__ import annotations

import click

from bentoml_compile.cli.making import making


@click.command()
@click.argument("target")
def explain(target: str) -> None:
    """Print every graph break of the models of TARGET, e.g. service:Embedder.

    TARGET is what `bentoml serve` takes: service:Name, a Bento's tag, or a folder.

    Exit status: 0 without breaks, 1 with breaks, 2 if the service cannot be made.
    """
    from bentoml_compile.bento.explain import explain as find_breaks

    with making(target):
        models = find_breaks(target)
    if not models:
        click.echo(f"{target} compiles no model; call compile_model(...) in its __init__")
    for model, breaks in models:
        count = f"{len(breaks)} graph break{'s' if len(breaks) > 1 else ''}" if breaks else "one graph"
        click.echo(f"{model}: {count}")
        for number, found in enumerate(breaks, 1):
            click.echo(f"  {number}. " + str(found).replace("\n", "\n  "))
    raise SystemExit(1 if any(breaks for _, breaks in models) else 0)
