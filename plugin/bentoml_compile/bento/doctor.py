"""The checks of this machine for one service, as its config asks, or for the defaults."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from bentoml_compile.config import SECTION, CompileConfig, nearest, parse_config
from bentoml_compile.doctor import shared, storage, tools
from bentoml_compile.doctor.check import Check, Finding, in_one_line, ok, problem, warning
from bentoml_compile.words import one_line

T = TypeVar("T")

SLOW = 120.0  # seconds: importing torch or a service on a busy machine
EXPORT_SECONDS = 30.0  # an exporter tries again for ten


@dataclass(slots=True)
class Asked:
    """What a service's config asks of the machine; nothing is known of it before `look`."""

    target: str | None
    configs: list[CompileConfig] = field(default_factory=lambda: [parse_config({}, where="doctor")])
    needs_gpu: bool = False
    has_bundle: bool = False

    def look(self) -> Iterator[Finding]:
        """Load the service and its dependencies' or runners' config, without making an instance."""
        import bentoml

        from bentoml_compile.artifacts.bundle import Bundle
        from bentoml_compile.bento import runners
        from bentoml_compile.bento.settings import bundle_root_of, entry_of, section_of
        from bentoml_compile.errors import ConfigError

        assert self.target is not None
        try:
            service: Any = bentoml.load(self.target, standalone_load=True)
            is_legacy = not isinstance(service, bentoml.Service)
            services = () if is_legacy else service.all_services().values()
            legacy = runners.runners_of(service) if is_legacy else []
            sections = [*map(section_of, services), *map(runners.section_of_runner, legacy)]
        except ConfigError as error:
            yield problem(str(error), _where_to_correct(str(error)))
            return
        except BaseException as error:  # its module runs here, and may do anything
            fix = _of_a_runner(error) or f"bentoml serve {self.target}, which says where"
            yield problem(f"{self.target} cannot be loaded: {in_one_line(error)}", fix)
            return
        asked = [section.for_model(name) for section in sections for name in ("", *section.models)]
        self.configs = asked or self.configs
        roots = [runners.bundle_of_service()] if is_legacy else map(bundle_root_of, services)
        self.has_bundle = any(Bundle(root).artifacts() for root in roots if root is not None)
        self.needs_gpu = any(_asks_for_gpu(each.config.get("resources"), "gpu") for each in services) or any(
            _asks_for_gpu(runner.resource_config, "nvidia.com/gpu") for runner in legacy
        )
        yield ok(f"{self.target} is loaded, and its torch_compile section is right; the checks are for its config")
        names = [service.name, *(each.name for each in legacy)] if is_legacy else entry_of(service).all_services()
        yield from _unread(sorted(names))
        if not all(config.enabled for config in self.configs) and not tools.switched_off():
            yield warning(
                "torch_compile.enabled is false: such models are served eagerly", "torch_compile: {enabled: true}"
            )


def _where_to_correct(refusal: str) -> str:
    in_code = "in the decorator"
    if refusal.startswith("runner "):
        in_code = "of the Runnable's class, in runnable_init_params or among compiled(...)'s keywords"
    return f"correct {SECTION} {in_code}, in BENTOML_CONFIG or in BENTOML_CONFIG_OVERRIDES"


def _of_a_runner(error: BaseException) -> str:
    """Where a section belongs that BentoML has refused under `runners`; empty if that is not the error."""
    refused = re.search(rf"Key 'runners' error:\s+Key '([^']+)' error:\s+Wrong key '{SECTION}'", str(error))
    return "" if refused is None else f"put it under services.{refused[1]}.{SECTION} instead of runners.{refused[1]}"


def _unread(names: Collection[str]) -> Iterator[Finding]:
    from bentoml_compile.bento.settings import sections_beside

    for name, path in sections_beside(names).items():
        yield warning(
            f"BentoML's config has {path}, which nothing here reads{nearest(name, names) if name else ''}; "
            f"the target's services and runners are: {', '.join(names)}",
            f"put it under services.NAME.{SECTION} with one of these names, or leave it to another service",
        )


def diagnose(target: str | None) -> Iterator[tuple[str, Finding]]:
    """What each check finds, by the check's name, as it is found. Never raises, and every check has a time limit.

    Args:
        target: a service as `bentoml serve` takes it, whose config decides what is checked; None: the defaults.
    """
    asked = Asked(target)
    if target is not None:
        yield from _run(Check("service", asked.look, SLOW, "see what its module does when it is imported"))
    for check in _checks(asked):
        yield from _run(check)


def _run(check: Check) -> Iterator[tuple[str, Finding]]:
    return ((check.name, finding) for finding in check.run())


def _checks(asked: Asked) -> Iterator[Check]:
    from bentoml_compile.bento.settings import bentoml_home

    yield Check("environment", tools.switches, 10)
    yield Check("versions", tools.versions, 10)
    yield Check("compiler", partial(tools.compiler, has_bundle=asked.has_bundle), 2 * tools.COMPILE_SECONDS)
    yield Check("cuda", partial(tools.cuda, asked.needs_gpu), SLOW, "nvidia-smi; dmesg | grep -i nvrm")
    yield Check("triton", tools.triton, SLOW)
    disk = "see that its file system answers: stat -f"
    yield Check("home", partial(storage.home, bentoml_home()), 10, f"{disk} {bentoml_home()}")
    sections = [config.artifacts for config in asked.configs]
    for root, max_bytes, write in _distinct(
        (a.store or bentoml_home() / "compile", a.max_bytes, a.write) for a in sections
    ):
        look = partial(storage.store, root.absolute(), max_bytes=max_bytes, write=write)
        yield Check("store", look, 30, f"{disk} {root}")
    for public_keys, has_remote in _distinct((tuple(a.public_keys), a.remote is not None) for a in sections):
        yield Check("keys", partial(shared.keys, public_keys, has_remote=has_remote), 30)
    for uri, seconds, write in _distinct((a.remote, a.remote_timeout, a.write) for a in sections):
        if uri is None:
            yield Check("remote", partial(_nothing, "none is configured"), 1)
        else:
            look = partial(shared.remote, uri, seconds=seconds, writes=write and shared.signs())
            yield Check("remote", look, seconds + SLOW)
    yield Check("exporter", exporter, 2 * EXPORT_SECONDS, "unset OTEL_TRACES_EXPORTER")
    yield Check("machine", tools.machine, SLOW)


def _distinct(values: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(values))


def _nothing(text: str) -> Iterable[Finding]:
    return [ok(text)]


def _asks_for_gpu(resources: object, name: str) -> bool:
    return isinstance(resources, Mapping) and bool(resources.get(name))


def exporter() -> Iterator[Finding]:
    """Where a worker's spans go, by exporting none of them: BentoML's tracing config, else the OTEL_* variables."""
    from bentoml_compile.telemetry import provider

    if provider.sdk_disabled():
        yield warning("OTEL_SDK_DISABLED=true: no spans are made", "unset OTEL_SDK_DISABLED")
        return
    try:
        from bentoml._internal.configuration.containers import BentoMLContainer  # which reads the config

        own = provider.processors(BentoMLContainer.tracer_provider.get())
    except Exception as error:
        yield problem(
            f"BentoML's config cannot be used: {in_one_line(error)}",
            "pip install 'bentoml[tracing]', or correct it",
        )
        return
    if own:
        for processor in own:
            made = getattr(processor, "span_exporter", None)
            yield _tried("BentoML's tracing config", lambda made=made: made)  # type: ignore[misc]
        return
    names = provider.exporter_names()
    for name in names:
        yield _tried(f"OTEL_TRACES_EXPORTER={name}", partial(provider.make_exporter, name))
    if not names:
        yield ok("none is configured: no traces; metrics are at /metrics")


def _tried(source: str, make: Callable[[], Any]) -> Finding:
    from opentelemetry.sdk.trace.export import SpanExportResult

    try:
        made = make()
    except Exception as error:
        return problem(f"{source}: {in_one_line(error)}", f"{_package_of(error)}, or unset OTEL_TRACES_EXPORTER")
    endpoint = getattr(made, "_endpoint", None) or getattr(made, "endpoint", None)  # no public API; of OTLP and Zipkin
    place = endpoint or type(made).__name__
    if endpoint is not None and not getproxies() and (reason := _unreachable(endpoint)):  # it would try for ten seconds
        return problem(f"{source}: nobody listens at {place}: {reason}", _start(place))
    with _heard() as said:
        try:
            taken = made.export(()) is SpanExportResult.SUCCESS
        except Exception as error:
            taken = False
            said.append(in_one_line(error))
    if taken:
        return ok(f"{source}: {place} takes spans")
    return problem(f"{source}: {place} takes no spans: {said[0] if said else 'it gives no reason'}", _start(place))


def _unreachable(endpoint: str) -> str:
    """Why no connection can be made; empty if one can."""
    url = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}")
    try:
        socket.create_connection((url.hostname or "", url.port or (443 if url.scheme == "https" else 80)), 5.0).close()
    except (OSError, ValueError) as error:
        return in_one_line(error)
    return ""


def _package_of(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("opentelemetry.exporter.otlp.json"):
        return "pip install 'bentoml-compile[trace]'"
    return "pip install the package that has it"


def _start(place: str) -> str:
    return f"start what is to listen at {place}, or export OTEL_EXPORTER_OTLP_ENDPOINT=http://HOST:4318"


@contextlib.contextmanager
def _heard() -> Iterator[list[str]]:
    """What OpenTelemetry logs, which is all that an exporter tells of a failure."""
    said: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(one_line(record.getMessage(), 300))

    logger, ear = logging.getLogger("opentelemetry"), Ear(logging.WARNING)
    logger.addHandler(ear)
    logger.propagate, before = False, logger.propagate
    try:
        yield said
    finally:
        logger.propagate = before
        logger.removeHandler(ear)
