from __future__ import annotations

import logging
import subprocess
import sys

import pytest
from _bentoml_impl.server.app import ServiceAppFactory  # type: ignore[import-untyped]
from bentoml._internal.marshal import dispatcher

from bentoml_compile.bento import batching, boot


def test_installing_twice_wraps_once() -> None:
    boot.install()
    batching.install()
    before = (ServiceAppFactory.create_instance, dispatcher.CorkDispatcher.outbound_call, dispatcher.Job)
    boot.install()
    batching.install()
    assert before == (ServiceAppFactory.create_instance, dispatcher.CorkDispatcher.outbound_call, dispatcher.Job)


def test_a_bentoml_without_the_private_names_is_a_log_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(ServiceAppFactory, "create_instance")
    monkeypatch.delattr(dispatcher, "Job")
    with caplog.at_level(logging.WARNING, "bentoml_compile"):
        boot.install()
        batching.install()
    assert "no bentoml.worker.boot span" in caplog.text
    assert "batched requests share one trace" in caplog.text


SCRIPT = """
import prometheus_client
from bentoml_compile.bento import boot
from bentoml_compile.listener import Listeners, Timeline
{setup}
listeners = Listeners(boot.listeners())
listeners.tell("preparing", "script")
with Timeline(listeners).stage("startup", model="script"):
    pass
boot.listeners()  # a second model
print(prometheus_client.generate_latest().decode())
"""

GLOBAL_PROVIDER = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
trace.set_tracer_provider(TracerProvider())
trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter()))
"""


@pytest.mark.parametrize(("setup", "exported"), [("", False), (GLOBAL_PROVIDER, True)])
def test_a_script_uses_the_global_provider_if_there_is_one_and_the_default_registry(setup: str, exported: bool) -> None:
    script = SCRIPT.format(setup=setup)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ('"name": "torch_compile.startup"' in ended.stdout) is exported
    assert 'torch_compile_ready{model="script"} 0.0' in ended.stdout
    assert ended.stderr == ""
