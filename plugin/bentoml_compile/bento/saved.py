"""Models that were saved the way of BentoML 1.x, compiled in their runner.

runner = compiled(bentoml.pytorch.get("classifier:latest").to_runner(), example_inputs=[(torch.zeros(8, 16),)])
service = bentoml.legacy.Service("api", runners=[runner])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import bentoml
import numpy as np
import torch
from bentoml._internal.runner.utils import Params

from bentoml_compile.bento import settings
from bentoml_compile.bento.compile import compile_model
from bentoml_compile.bento.runnable import CompiledRunnable, Examples, assigned_device, moved
from bentoml_compile.compiled_model import CompiledModel
from bentoml_compile.config import nearest
from bentoml_compile.errors import ConfigError

_CALL, _FORWARD = "__call__", "forward"  # one method of a module

_ByMethod = Mapping[str, Examples]


def compiled(
    runner: bentoml.legacy.Runner, *, example_inputs: Examples | Mapping[str, Examples], **torch_compile: Any
) -> bentoml.legacy.Runner:
    """A runner with the same name, methods, batching and models, whose model is compiled in the runner's process.

    A model of `bentoml.pytorch` is unpickled, which torch 2.6 and later refuse to BentoML itself unless
    TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1: who can write into BentoML's model store can run code here.

    Args:
        runner: of `bentoml.pytorch.get(...).to_runner()`, of `bentoml.transformers.get(...).to_runner()` (a model, no
            pipeline), or of a Runnable whose `__init__` sets `self.model` to the module that its methods call.
        example_inputs: for calling the model, as for `compile_model`; or a mapping from methods of the model to such.
            With several, `<runner name>.<method>` is each one's name. Its other methods are served eagerly.
        torch_compile: config, as a CompiledRunnable's attribute `torch_compile`.

    Raises:
        ConfigError: a setting or a method that cannot be used, or a saved pipeline. When the runner starts: as
            `compile_model`, or its model is no module that can be compiled.
    """
    by_method = _by_method(runner, example_inputs)
    saved = _saved_model(runner)
    runnable = _handwritten(runner, by_method) if saved is None else _saved(runner, saved, by_method)
    base = runner.runnable_class
    runnable.__name__, runnable.__module__ = base.__name__, base.__module__
    runnable.torch_compile = settings.laid(getattr(base, "torch_compile", {}), torch_compile)
    return bentoml.legacy.Runner(
        runnable,
        runnable_init_params=runner.runnable_init_params,
        name=runner.name,
        scheduling_strategy=runner.scheduling_strategy,
        models=runner.models,
        method_configs={
            method.name: {"max_batch_size": method.max_batch_size, "max_latency_ms": method.max_latency_ms}
            for method in runner.runner_methods
        },
        embedded=runner.embedded,
    )


class _Methods:
    """A module some of whose methods are compiled."""

    def __init__(self, module: torch.nn.Module, compiled_methods: Mapping[str, CompiledModel]) -> None:
        self._module = module
        self._compiled = compiled_methods

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled.get(_FORWARD, self._module)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._compiled.get(name) or getattr(self._module, name)


def _by_method(runner: bentoml.legacy.Runner, examples: Examples | _ByMethod) -> _ByMethod:
    if not isinstance(examples, Mapping):
        return {_FORWARD: examples}
    if not examples:
        raise ConfigError(f"runner {runner.name!r}: example_inputs names no method; give at least one")
    return {_FORWARD if name == _CALL else name: given for name, given in examples.items()}


def _compile(module: object, by_method: _ByMethod, device: torch.device, runner: str) -> CompiledModel | _Methods:
    if not isinstance(module, torch.nn.Module) or isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(
            f"runner {runner!r}: its model is a {type(module).__name__}, of which nothing can be compiled; "
            "write a CompiledRunnable that loads a torch.nn.Module"
        )
    for name in by_method:
        if not callable(getattr(module, name, None)):
            raise ConfigError(
                f"runner {runner!r}: its model has no method {name!r}{nearest(name, dir(module))}; "
                "correct the name in example_inputs"
            )
    models = {
        method: compile_model(
            module,
            example_inputs=moved(examples, device),
            name=runner if len(by_method) == 1 else f"{runner}.{method}",
            method=method,
        )
        for method, examples in by_method.items()
    }
    return models[_FORWARD] if list(models) == [_FORWARD] else _Methods(module, models)


def _handwritten(runner: bentoml.legacy.Runner, by_method: _ByMethod) -> Any:
    base: Any = runner.runnable_class
    if issubclass(base, CompiledRunnable):
        raise ConfigError(f"runner {runner.name!r} compiles its model itself; use it as it is")

    class Handwritten(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            module = getattr(self, "model", None)
            self.model = _compile(module, by_method, _device_of(module), runner.name)

    return Handwritten


def _device_of(module: Any) -> torch.device:
    parameter = next(module.parameters(), None) if isinstance(module, torch.nn.Module) else None
    return torch.device("cpu") if parameter is None else parameter.device


def _saved(runner: bentoml.legacy.Runner, model: bentoml.Model, by_method: _ByMethod) -> Any:
    load, as_input = _FRAMEWORKS[_framework(model)]

    class Saved(CompiledRunnable):
        def _compile(self, name: str) -> CompiledRunnable:
            self.device = assigned_device()
            module = load(model, self.device).eval()
            self.model = _compile(module, by_method, self.device, name)  # type: ignore[assignment]
            return self

    given = getattr(model.info.options, "partial_kwargs", {})
    for name, options in model.info.signatures.items():
        Saved.add_method(
            _method(name, given.get(name) or {}, as_input),
            name=name,
            batchable=options.batchable,
            batch_dim=options.batch_dim,
            input_spec=options.input_spec,
            output_spec=options.output_spec,
        )
    return Saved


def _method(name: str, given: Mapping[str, Any], as_input: Callable[[Any], Any]) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        def to_device(value: Any) -> Any:
            value = as_input(value)
            return value.to(self.device) if isinstance(value, torch.Tensor) else value

        params = Params[Any](*args, **kwargs).map(to_device)
        with torch.inference_mode():
            return getattr(self.model, name)(*params.args, **{**given, **params.kwargs})

    return run


def _saved_model(runner: bentoml.legacy.Runner) -> bentoml.Model | None:
    """The saved model that BentoML made the runner of; None if the runner has a hand-written Runnable."""
    if not runner.models or _framework(model := runner.models[0]) not in _FRAMEWORKS:
        return None
    if model.to_runnable() is not runner.runnable_class:
        return None
    if _framework(model) == "transformers" and "_pretrained_class" not in model.info.metadata:
        raise ConfigError(
            f"runner {runner.name!r}: {model.tag} is a pipeline; write a CompiledRunnable that compiles its model"
        )
    return model


def _framework(model: bentoml.Model) -> str:
    return model.info.module.rpartition(".")[2]  # "bentoml.pytorch" or, of older versions, its private home


def _load_pytorch(model: bentoml.Model, device: torch.device) -> torch.nn.Module:
    return bentoml.pytorch.load_model(model, device_id=str(device), weights_only=False)


def _load_transformers(model: bentoml.Model, device: torch.device) -> torch.nn.Module:
    module: torch.nn.Module = bentoml.transformers.load_model(model)  # type: ignore[assignment]
    return module.to(device)


def _as_float(value: Any) -> Any:
    """As BentoML's runners of `bentoml.pytorch` do; on a GPU they change torch's default tensor type for it."""
    value = value.to_numpy() if hasattr(value, "to_numpy") else value
    return torch.as_tensor(value, dtype=torch.float32) if isinstance(value, np.ndarray) else value


def _as_it_is(value: Any) -> Any:
    return value


_FRAMEWORKS: Mapping[str, tuple[Callable[..., torch.nn.Module], Callable[[Any], Any]]] = {
    "pytorch": (_load_pytorch, _as_float),
    "transformers": (_load_transformers, _as_it_is),
}
