"""`bentoml-compile warm`: a service's models compiled for this machine, without serving."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import click

from bentoml_compile.cli.making import making

if TYPE_CHECKING:
    from bentoml_compile.bento.live import Warmed, Worker
    from bentoml_compile.report import CompileReport

T = TypeVar("T")


@click.command()
@click.argument("target")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def warm(target: str, as_json: bool) -> None:
    """Compile the models of TARGET, e.g. service:Embedder, for this machine and store them, without serving.

    The service is made as its worker makes it, but waits for every compile and upload. Each service that it depends on
    has workers of its own and is warmed by its own name: service:Entry.dependency. Of a legacy service, all runners
    are made, each in a process of its own.

    Exit status: 0 if all models are compiled or loaded, 1 if one is served eagerly or was not uploaded, or if only the
    services that it depends on may have models, 2 if the service cannot be made.
    """
    workers = made(target, _told)
    reports = [report for worker in workers for report in worker[0]]
    if as_json:
        click.echo(json.dumps([report.to_dict() for report in reports], indent=2))
    else:
        for report in reports:
            click.echo("\n".join(lines_of(report)))
    is_enough = say_what_is_left(target, bool(reports), [name for worker in workers for name in worker[1]])
    all_shared = all(worker[2] for worker in workers)
    if not all_shared:
        click.echo("not everything was uploaded to artifacts.remote; the reason is above", err=True)
    raise SystemExit(0 if is_enough and all_shared and not any(is_eager(report) for report in reports) else 1)


def _told(warmed: Warmed) -> tuple[list[CompileReport], tuple[str, ...], bool]:
    return [model.report for model in warmed.models], warmed.dependencies, warmed.all_shared


def made(target: str, use: Callable[[Warmed], T]) -> list[T]:
    """What `use`, which is pickled, returns of each of the target's workers; status 2 if one cannot be made.

    They write to stderr meanwhile.
    """
    from bentoml_compile.bento.warm import warm as make

    with making(target):
        return make(target, partial(_warmed, use))


def _warmed(use: Callable[[Warmed], T], worker: Worker) -> T:
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("bentoml_compile").setLevel(logging.INFO)
    return worker.warm(use)


def is_eager(report: CompileReport) -> bool:
    """Whether the model, or most of its shapes, is served eagerly."""
    return report.engine == "eager"


def lines_of(report: CompileReport) -> Iterator[str]:
    """One for the model, then why it, or one of its shapes, is not what was asked for."""
    yield f"{report.model}  {report.outcome}  {report.engine}  {report.seconds:.2f} s  {report.fingerprint}".rstrip()
    yield from (f"  {reason}" for reason in (report.fallback, report.engine_reason) if reason)
    for shape in report.shapes:
        if shape.engine == "eager" and shape.reason != report.fallback:
            yield f"  {shape.signature}: eager: {shape.reason}"


def say_what_is_left(target: str, has_models: bool, dependencies: Sequence[str]) -> bool:
    """Whether it was right to name the target: not if it has no models and depends on services that may have some."""
    if has_models:
        for dependency in dependencies:
            click.echo(f"not made: {dependency}, on which it depends; name it for its models", err=True)
    elif dependencies:
        click.echo(f"{target} has no model of its own; name what it depends on: {', '.join(dependencies)}", err=True)
    else:
        click.echo(f"{target} compiles no model; call compile_model(...) in its __init__", err=True)
    return has_models or not dependencies
