"""Traces into a file, for when there is no collector.

The variables select it as any other OpenTelemetry exporter:

    pip install 'bentoml-compile[trace]'
    OTEL_TRACES_EXPORTER=bentoml_compile_file BENTOML_COMPILE_TRACE_FILE="$PWD/traces.jsonl" bentoml serve
    bentoml-compile trace traces.jsonl
"""

from __future__ import annotations

import logging
import os

from opentelemetry.exporter.otlp.json.file import FileSpanExporter

logger = logging.getLogger("bentoml_compile")

PATH_VARIABLE = "BENTOML_COMPILE_TRACE_FILE"


class TraceFile(FileSpanExporter):
    """Appends OTLP JSON, one line for each batch of spans, to the file that BENTOML_COMPILE_TRACE_FILE names.

    Several workers may share the file. OpenTelemetry's own exporter of that format takes its path from code only and
    writes to stdout, among BentoML's log lines, when OTEL_TRACES_EXPORTER=otlp_json_file selects it.
    """

    def __init__(self) -> None:
        # a Bento's worker is in the Bento's folder, wherever the command was typed
        path = os.path.abspath(os.environ.get(PATH_VARIABLE, "traces.jsonl"))
        super().__init__(path)
        logger.info("traces go to %s", path)
