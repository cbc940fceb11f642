"""What /readyz and /livez answer while models are compiled in the background, by BentoML's own app."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import bentoml
import pytest
import torch
from starlette.testclient import TestClient
from torch._dynamo.backends import registry

from bentoml_compile import CompiledModel, compile_model
from bentoml_compile.background import background
from bentoml_compile.bento import readiness, settings
from bentoml_compile.compiled_model import open_models
from tests.models import Broken, classifier, ids
from tests.waiting import PATIENCE, wait_for


@dataclass
class Compiler:
    """The config of a compile that goes on when it is told to."""

    config: dict[str, Any]
    _go_on: threading.Event

    def finish(self, *models: CompiledModel) -> None:
        self._go_on.set()
        wait_for(lambda: all(model.is_ready for model in models))


@pytest.fixture
def compiler(tmp_path: Path) -> Iterator[Compiler]:
    go_on = threading.Event()

    def waiting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        assert go_on.wait(PATIENCE)
        return graph.forward

    torch._dynamo.register_backend(name="readiness", compiler_fn=waiting)
    store = {"store": str(tmp_path / "store")}
    yield Compiler({"backend": "readiness", "startup": "background", "artifacts": store}, go_on)
    go_on.set()
    wait_for_background()  # a compile that begins later would find, and wait for, the next test's backend
    for model in list(open_models.values()):
        model.close()
    registry._BACKENDS.pop("readiness")
    registry._COMPILER_FNS.pop("readiness")


def wait_for_background() -> None:
    """Returns when every job is over, and its thread holds none."""
    over = threading.Event()
    background.run(over.set)
    assert over.wait(PATIENCE)


def tiny(name: str = "tiny", **config: Any) -> CompiledModel:
    return compile_model(classifier(), example_inputs=[{"ids": ids(2, 5)}], name=name, config=config or None)


def service_of(inner: type, **config: Any) -> bentoml.Service[Any]:
    # BentoML's metrics can be made once in a process
    return bentoml.service(metrics={"enabled": False}, torch_compile=config)(inner)


@contextlib.contextmanager
def served(service: bentoml.Service[Any]) -> Iterator[TestClient]:
    """With an instance of its own, as in a worker."""
    with TestClient(service.to_asgi()) as client:
        yield client


def one_model() -> type:
    class Service:
        def __init__(self) -> None:
            self.model = tiny()

    return Service


def test_a_service_is_ready_when_its_model_is_and_alive_before(compiler: Compiler) -> None:
    with served(service_of(one_model(), **compiler.config)) as client:
        assert client.get("/livez").status_code == 200
        assert client.get("/readyz").status_code == 503
        compiler.finish(open_models["tiny"])
        assert client.get("/readyz").status_code == 200


def test_a_service_that_may_serve_eagerly_is_ready_at_once(compiler: Compiler) -> None:
    inner = one_model()
    with served(service_of(inner, **compiler.config, ready_when="eager")) as client:
        assert client.get("/readyz").status_code == 200
    assert not hasattr(inner, "__is_ready__")


@pytest.mark.parametrize("config", [{"startup": "block", "backend": "eager"}, {"enabled": False}])
def test_a_service_that_compiles_nothing_in_the_background_is_left_as_it_is(
    compiler: Compiler, config: dict[str, Any]
) -> None:
    inner = one_model()
    with served(service_of(inner, **{**compiler.config, **config})) as client:
        assert client.get("/readyz").status_code == 200
    assert not hasattr(inner, "__is_ready__")


def asked_too(kind: str, answers: list[bool]) -> type:
    """A service with an `__is_ready__` of its own, which takes its answers from the list."""

    class Plain(one_model()):  # type: ignore[misc]
        def __is_ready__(self) -> bool:
            return answers.pop()

    class Async(one_model()):  # type: ignore[misc]
        async def __is_ready__(self) -> bool:
            return answers.pop()

    class Static(one_model()):  # type: ignore[misc]
        @staticmethod
        def __is_ready__() -> bool:
            return answers.pop()

    class Inherited(Async):
        pass

    return {"plain": Plain, "async": Async, "static": Static, "inherited": Inherited}[kind]


@pytest.mark.parametrize("kind", ["plain", "async", "static", "inherited"])
def test_the_services_own_readiness_counts_too(compiler: Compiler, kind: str) -> None:
    answers = [True, False]
    with served(service_of(asked_too(kind, answers), **compiler.config)) as client:
        assert client.get("/readyz").status_code == 503
        assert answers == [True, False]
        compiler.finish(open_models["tiny"])
        assert [client.get("/readyz").status_code for _ in range(2)] == [503, 200]


def test_a_service_waits_for_all_of_its_models(compiler: Compiler) -> None:
    class Two:
        def __init__(self) -> None:
            self.ready = tiny("ready", backend="eager")
            self.late = tiny("late")

    with served(service_of(Two, **compiler.config)) as client:
        assert client.get("/readyz").status_code == 503
        compiler.finish(open_models["late"])
        assert client.get("/readyz").status_code == 200


def test_a_closed_model_is_not_waited_for(compiler: Compiler) -> None:
    with served(service_of(one_model(), **compiler.config)) as client:
        assert client.get("/readyz").status_code == 503
        open_models["tiny"].close()
        assert client.get("/readyz").status_code == 200


def test_a_model_that_is_gone_is_not_waited_for(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dropped:
        def __init__(self) -> None:
            compile_model(Broken().eval(), example_inputs=[{"x": torch.ones(2, 4)}], name="dropped")

    # pytest keeps what is logged: an error, whose frames hold the model
    monkeypatch.setattr(logging.getLogger("bentoml_compile"), "disabled", True)
    config = {**compiler.config, "backend": "eager", "fullgraph": "require"}  # held, it would never be ready
    with served(service_of(Dropped, **config)) as client:
        wait_for_background()
        gc.collect()
        assert "dropped" not in open_models
        assert client.get("/readyz").status_code == 200


def test_what_would_stop_a_boot_keeps_the_service_from_being_ready(
    compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    class Stopped:
        def __init__(self) -> None:
            self.model = compile_model(Broken().eval(), example_inputs=[{"x": torch.ones(2, 4)}], name="stopped")

    with served(service_of(Stopped, **{**compiler.config, "backend": "eager", "fullgraph": "require"})) as client:
        wait_for(lambda: "will not be ready" in caplog.text)
        assert client.get("/readyz").status_code == 503
        assert client.get("/livez").status_code == 200


def test_services_and_instances_in_one_process_wait_for_their_own_models(compiler: Compiler) -> None:
    names = iter(["first", "second"])

    class Named:
        def __init__(self) -> None:
            self.model = tiny(next(names))

        def __is_ready__(self) -> bool:
            asked.append(self)
            return True

    class Plain:
        pass

    asked: list[object] = []
    named = service_of(Named, **compiler.config)
    with served(named) as first, served(named) as second, served(service_of(Plain)) as plain:
        open_models["first"].close()
        answers = [client.get("/readyz").status_code for client in (first, second, plain)]
        assert answers == [200, 503, 200]
        assert len(asked) == 1  # chained once, for all instances
        compiler.finish(open_models["second"])
        assert second.get("/readyz").status_code == 200


def test_a_dependency_in_the_same_process_counts_as_part_of_the_service(compiler: Compiler) -> None:
    dependency = service_of(one_model(), **compiler.config)

    class Entry:
        other = bentoml.depends(dependency)

        def __init__(self) -> None:
            self.model = self.other.model

    with served(service_of(Entry)) as client:
        assert client.get("/readyz").status_code == 503
        compiler.finish(open_models["tiny"])
        assert client.get("/readyz").status_code == 200


def test_a_model_may_be_compiled_in_a_thread_at_any_moment_of_a_look_at_the_others() -> None:
    class Model:
        is_ready = True

    class Threaded:
        pass

    models: Any = readiness._of_worker(Threaded)
    kept = [Model()]
    models[kept[0]] = None

    def between_two_lines(frame: FrameType, event: str, arg: object) -> Any:
        kept.append(Model())
        models[kept[-1]] = None
        return between_two_lines

    before = sys.gettrace()
    sys.settrace(between_two_lines)
    try:
        is_ready = readiness._are_ready(Threaded())
    finally:
        sys.settrace(before)
    assert is_ready
    assert len(kept) > 3


def test_a_model_that_is_compiled_in_a_thread_counts_for_the_workers_service(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Threaded:
        def __init__(self) -> None:
            thread = threading.Thread(target=lambda: setattr(self, "model", tiny("threaded", **compiler.config)))
            thread.start()
            thread.join()

    service = service_of(Threaded)
    monkeypatch.setattr(settings, "_worker_service", service)  # as in a worker
    with served(service) as client:
        assert client.get("/readyz").status_code == 503
        compiler.finish(open_models["threaded"])
        assert client.get("/readyz").status_code == 200
