"""Traces into a file, for when there is no collector.

The variables select it as any other OpenTelemetry exporter:

    pip install 'bentoml-compile[trace]'
    OTEL_TRACES_EXPORTER=bentoml_compile_file BENTOML_COMPILE_TRACE_FILE=traces.jsonl bentoml serve
    bentoml-compile trace traces.jsonl
"""

from __future__ import annotations

import os

from opentelemetry.exporter.otlp.json.file import FileSpanExporter

PATH_VARIABLE = "BENTOML_COMPILE_TRACE_FILE"


class TraceFile(FileSpanExporter):
    """Appends OTLP JSON, one line for each batch of spans, to the file that BENTOML_COMPILE_TRACE_FILE names.

    Several workers may share the file. OpenTelemetry's own exporter of that format takes its path from code only and
    writes to stdout, among BentoML's log lines, when OTEL_TRACES_EXPORTER=otlp_json_file selects it.
    """

    def __init__(self) -> None:
        super().__init__(os.environ.get(PATH_VARIABLE, "traces.jsonl"))
