"""compile_model(): a model made ready before the first request, or beside the first ones.

    encoder = compile_model(load_encoder(), example_inputs=[{"input_ids": ids, "attention_mask": mask}], name="encoder")
    encoder.report.outcome      # "compiled" on the first boot, "loaded" on the next
    encoder(input_ids=..., attention_mask=...)

This module knows neither BentoML nor OpenTelemetry: `bentoml_compile.compile_model` adds the service's config and the
listeners. The steps of a boot are in startup.py, the story of a request is in compiled_model.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bentoml_compile.artifacts.fingerprint import Fingerprint
from bentoml_compile.artifacts.places import Places
from bentoml_compile.background import background
from bentoml_compile.compiled_model import CompiledModel, open_models
from bentoml_compile.config import CompileConfig, parse_config
from bentoml_compile.engines import jit
from bentoml_compile.engines.limits import prompt_termination
from bentoml_compile.errors import ConfigError, GraphBreakError, VerificationError
from bentoml_compile.late import complete_late
from bentoml_compile.listener import Listener, Listeners, Timeline
from bentoml_compile.padding import check_pad
from bentoml_compile.prepared import Target
from bentoml_compile.ranges import check_ranges
from bentoml_compile.report import CompileReport, GraphBreak, in_words
from bentoml_compile.search import fingerprint_of
from bentoml_compile.shapes import parameter_names, read_example_inputs
from bentoml_compile.startup import Startup

__all__ = ["CompiledModel", "compile_model", "explaining"]

logger = logging.getLogger("bentoml_compile")

_instead: Callable[[Target], None] | None = None  # of booting a model


@dataclass(frozen=True, slots=True)
class Inspected:
    """What a model's artifact must match."""

    name: str
    fingerprint: Fingerprint
    config: CompileConfig


def compile_model(
    model: torch.nn.Module,
    *,
    example_inputs: Sequence[Mapping[str, Any] | tuple[Any, ...]],
    name: str = "model",
    method: str = "forward",
    config: CompileConfig | Mapping[str, Any] | None = None,
    listeners: Sequence[Listener] = (),
    default_store: Path | None = None,
    bundle: Path | None = None,
) -> CompiledModel:
    """Compiles (or loads) one method of a model for the signatures of `example_inputs`.

    Args:
        model: the module as it will serve: on its device, in its dtype, in eval mode. It is not copied.
        example_inputs: one entry per prepared shape: a dict of keyword arguments or a tuple of positional ones.
        name: unique in the process; artifacts, spans and metrics carry it.
        method: the method to compile; `forward` means calling the module, with its hooks.
        config: None means defaults.
        listeners: told about every step and call.
        default_store: where artifacts are kept if the config names no place; None: nowhere.
        bundle: a folder of artifacts that came with the service, which is only read.

    Raises:
        ConfigError: a wrong setting, a wrong example input, or a second model of this name.
        GraphBreakError: `fullgraph: require` and the model is not one graph.
        VerificationError: `verify.strict` and the compiled result differs.
    """
    _check_name(name)
    config = parse_config(config, where=f"compile_model(name={name!r})")
    examples = read_example_inputs(example_inputs, model=name)
    _check_model(model, method, name)
    names = parameter_names(getattr(model, method))
    check_ranges(config.ranges, examples, names, where=f"compile_model(name={name!r})")
    check_pad(config.pad or {}, examples, names, where=f"compile_model(name={name!r})")
    places = Places(default_store, bundle)
    timeline = Timeline(Listeners(listeners))
    timeline.listeners.tell("preparing", name)
    with contextlib.ExitStack() as until_over:
        until_over.enter_context(timeline.stage("startup", model=name, mode=config.mode, fullgraph=config.fullgraph))
        target = Target(model, method, name, config, names, tuple(examples))
        in_background = config.startup == "background"
        startup = Startup(target, timeline, places, is_in_background=in_background)
        with prompt_termination():
            if _instead is not None:
                _instead(target)
            elif in_background and not _is_found(startup):
                return _complete_in_background(startup, until_over.pop_all(), places)
            else:
                startup.run()
        report = startup.end()
    timeline.listeners.tell("ready", report)
    _say_ready(report)
    return _opened(CompiledModel(startup, report, places))


def _is_found(startup: Startup) -> bool:
    """What would stop a boot does not stop this one: `complete_late` meets it again."""
    with contextlib.suppress(GraphBreakError):
        return startup.find()
    return False


def _complete_in_background(startup: Startup, until_over: contextlib.ExitStack, places: Places) -> CompiledModel:
    """The model, which answers eagerly; the startup's span ends when compiled code takes over, or is given up."""
    waiting = startup.report()
    compiled = CompiledModel(startup, dataclasses.replace(waiting, fallback="compiling in the background"), places)
    listeners = startup.timeline.listeners
    logger.info("model %r: answers eagerly while it is compiled in the background", waiting.model)

    def job() -> None:
        with until_over:
            error = complete_late(startup)
            report = startup.end()
            stopped = isinstance(error, (GraphBreakError, VerificationError, ConfigError))
            if stopped:
                compiled._stop(error)
            compiled._adopt(startup, report)
        compiled._settle()
        if stopped:
            return
        listeners.tell("ready", report)
        _say_ready(report)

    background.run(job)
    return _opened(compiled)


def _opened(compiled: CompiledModel) -> CompiledModel:
    open_models[compiled.report.model] = compiled
    return compiled


def _check_name(name: str) -> None:
    try:
        is_text = bool(name.encode())
    except UnicodeEncodeError:
        is_text = False
    if not is_text:
        raise ConfigError(f"compile_model(name={name!r}): a name is text in UTF-8 and not empty, e.g. 'encoder'")


def _check_model(model: Any, method: str, name: str) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"compile_model(name={name!r}): model must be a torch.nn.Module, not {type(model).__name__}")
    if not callable(getattr(model, method, None)):
        raise ConfigError(f"compile_model(name={name!r}): {type(model).__name__} has no method {method!r}")
    if name in open_models:
        gc.collect()  # an earlier service instance may wait for it
    if name in open_models:
        raise ConfigError(
            f"compile_model(name={name!r}): this process has a compiled model of that name; give each its own name, "
            "or close() the other"
        )
    if model.training:
        logger.warning("model %r is in training mode; call model.eval() first for inference", name)


def _say_ready(report: CompileReport) -> None:
    phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in report.phases.items() if seconds >= 0.05)
    logger.info(
        "model %r: %s%s in %.2f s%s; %s",
        report.model,
        report.outcome,
        f" from the {report.place}" if report.place else "",
        report.seconds,
        f" ({phases})" if phases else "",
        in_words(report.shapes),
    )


@contextlib.contextmanager
def explaining() -> Iterator[list[tuple[str, tuple[GraphBreak, ...]]]]:
    """Inside, compile_model compiles nothing and appends (name, graph breaks) to the list instead."""
    found: list[tuple[str, tuple[GraphBreak, ...]]] = []

    def explain(target: Target) -> None:
        breaks = jit.find_graph_breaks(target.model, target.method, list(target.examples))
        found.append((target.name, breaks))

    with _instead_of_booting(explain):
        yield found


@contextlib.contextmanager
def inspecting() -> Iterator[list[Inspected]]:
    """Inside, compile_model compiles nothing and appends what the model's artifact must match instead."""
    found: list[Inspected] = []
    with _instead_of_booting(
        lambda target: found.append(Inspected(target.name, fingerprint_of(target), target.config))
    ):
        yield found


@contextlib.contextmanager
def _instead_of_booting(do: Callable[[Target], None]) -> Iterator[None]:
    global _instead
    _instead = do
    try:
        yield
    finally:
        _instead = None
