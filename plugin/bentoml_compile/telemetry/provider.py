"""Where spans go: through the tracer provider that BentoML (or the program) has, or, if that one exports nothing,
through what the OTEL_* variables name.

    base = BentoMLContainer.tracer_provider.get()
    if attach_exporter(base):
        tracer = always_on(base).get_tracer("bentoml_compile")
"""

from __future__ import annotations

import logging
import os
import threading
from importlib.metadata import entry_points

from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

logger = logging.getLogger("bentoml_compile")

_EXPORTERS = "opentelemetry_traces_exporter"  # the SDK's group of entry points
_PROTOCOLS = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}


def attach_exporter(base: TracerProvider) -> bool:
    """Makes `base` export, if it does not: by the global OpenTelemetry provider's span processors (those of
    `opentelemetry-instrument`), else by exporters that the OTEL_* variables name.

    `base` keeps its sampler, so BentoML's `tracing.sample_rate` still decides which requests are traced;
    OTEL_TRACES_SAMPLER is not read. Returns whether `base` exports now. An exporter that cannot be made is logged.
    """
    if sdk_disabled():
        return False
    if processors(base):
        return True
    for processor in _global_processors() or _processors_from_environment():
        base.add_span_processor(processor)
    return bool(processors(base))


def always_on(base: TracerProvider) -> TracerProvider:
    """A provider that exports every span through the exporter and with the resource of `base`.

    BentoML samples no request by default, but boots and recompiles are rare and must not be lost. A span of it may
    have a parent that is not exported.
    """
    shared = getattr(base, "_active_span_processor", None)
    if shared is None:
        return base
    return TracerProvider(
        sampler=ALWAYS_ON,
        resource=base.resource,
        active_span_processor=shared,
        id_generator=base.id_generator,
        shutdown_on_exit=False,  # the processor belongs to `base`, which shuts it down
    )


def flush(provider: TracerProvider, seconds: float) -> bool:
    """Exports what is over by now; returns whether that was done within `seconds`.

    The SDK's own `force_flush` ignores its time limit (opentelemetry-python issue 4568), so an unreachable collector
    would hold up a worker; hence a thread that is left behind. With 0 seconds nothing is waited for.
    """
    thread = threading.Thread(target=_force_flush, args=(provider,), name="bentoml_compile flush", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _force_flush(provider: TracerProvider) -> None:
    try:
        provider.force_flush()
    except Exception:
        logger.warning("telemetry: spans could not be flushed", exc_info=True)


def processors(provider: object) -> tuple[SpanProcessor, ...]:
    """The span processors of an SDK provider.

    Private in opentelemetry-sdk; checked with 1.30 to 1.45. Where it is missing, a provider counts as one without an
    exporter, and BentoML's own tracing configuration alone would then not export our spans.
    """
    active = getattr(provider, "_active_span_processor", None)
    return tuple(getattr(active, "_span_processors", ()))


def _global_processors() -> tuple[SpanProcessor, ...]:
    return processors(trace.get_tracer_provider())


def exporter_names() -> list[str]:
    """The exporters in OTEL_TRACES_EXPORTER; "otlp" if only its endpoint is given.

    https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
    """
    names = os.environ.get("OTEL_TRACES_EXPORTER", "")
    if not names.strip() and _endpoint_given():
        names = "otlp"
    return [name.strip() for name in names.split(",") if name.strip().lower() not in ("", "none")]


def make_exporter(name: str) -> SpanExporter:
    """The exporter of that name. `otlp` without a protocol is http/protobuf, the specification's default and the one
    that we depend on.

    Raises:
        ValueError: it is not installed. Whatever it raises where its own variables cannot be used.
    """
    return _exporter(_otlp_by_protocol() if name == "otlp" else name)


def _processors_from_environment() -> list[SpanProcessor]:
    """One batch processor for each exporter."""
    return [processor for name in exporter_names() if (processor := _processor(name)) is not None]


def _endpoint_given() -> bool:
    return any(os.environ.get(f"OTEL_EXPORTER_OTLP_{which}ENDPOINT", "").strip() for which in ("", "TRACES_"))


def _processor(name: str) -> SpanProcessor | None:
    try:
        return BatchSpanProcessor(make_exporter(name))
    except Exception as error:
        logger.warning("telemetry: no spans go to OTEL_TRACES_EXPORTER=%s: %s", name, error)
        return None


def _otlp_by_protocol() -> str:
    chosen = (os.environ.get(f"OTEL_EXPORTER_OTLP_{which}PROTOCOL", "").strip() for which in ("TRACES_", ""))
    protocol = next(filter(None, chosen), "http/protobuf")
    if protocol not in _PROTOCOLS:
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol} is not one of {', '.join(_PROTOCOLS)}")
    return _PROTOCOLS[protocol]


def _exporter(name: str) -> SpanExporter:
    found = next(iter(entry_points(group=_EXPORTERS, name=name)), None)
    if found is None:
        known = ", ".join(sorted({point.name for point in entry_points(group=_EXPORTERS)}))
        raise ValueError(f"no such exporter is installed (installed: {known}); install the package that has it")
    exporter = found.load()()
    if not isinstance(exporter, SpanExporter):
        raise TypeError(f"{found.value} is not a SpanExporter")
    return exporter


def sdk_disabled() -> bool:
    return os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
