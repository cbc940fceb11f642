"""A legacy runner's methods as those of a Service: called with any values, by position or by name, and batched.

BentoML's own API methods check values against annotations, batch one argument only, and count every tensor as one.
`_bentoml_sdk` and BentoML's containers are private; checked with BentoML 1.4.40.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import bentoml._internal.frameworks.common.pytorch  # noqa: F401  # batches of tensors are made and split as tensors
import numpy as np
import torch
from _bentoml_sdk.io_models import IODescriptor, IORootModel  # type: ignore[import-untyped]
from _bentoml_sdk.method import APIMethod  # type: ignore[import-untyped]
from bentoml._internal.runner.container import AutoContainer, DataContainer, DataContainerRegistry
from bentoml._internal.runner.runner import RunnerMethod
from bentoml._internal.runner.utils import Params
from bentoml.exceptions import InvalidArgument
from pydantic import SerializationInfo, SerializerFunctionWrapHandler, WrapSerializer, model_validator
from starlette.responses import Response
from torch.utils import _pytree as pytree


class Call(Params[Any]):
    """What a method is called with; of a batch, what all of its requests are called with."""


class Results(tuple[Any, ...]):
    """Several that a method returns: of a batch, for all of its requests; of one, or of a part of it."""


class _CallContainer(DataContainer[Any, Any]):
    """Batches calls argument by argument, as a runner does."""

    @classmethod
    def get_batch_size(cls, batch: Call, batch_dim: int) -> int:
        value = batch.sample
        if isinstance(value, torch.Tensor):  # BentoML's container of tensors says 1
            return value.shape[batch_dim]
        return AutoContainer.get_batch_size(value, batch_dim)

    @classmethod
    def batches_to_batch(cls, batches: Sequence[Call], batch_dim: int = 0) -> tuple[Call, list[int]]:
        both = Call.agg(batches, lambda values: AutoContainer.batches_to_batch(values, batch_dim))
        indices = both.map(lambda pair: pair[1])
        if not indices.all_equal():
            raise InvalidArgument(f"all batchable arguments must have one batch size; got {dict(indices.items())}")
        batch = both.map(lambda pair: pair[0])
        return Call(*batch.args, **batch.kwargs), indices.sample

    @classmethod
    def batch_to_batches(cls, batch: Call, indices: Sequence[int], batch_dim: int = 0) -> list[Call]:
        """A request that is larger than what is left of a batch is split."""
        parts = batch.map(lambda value: AutoContainer.batch_to_batches(value, indices, batch_dim))
        return [
            Call(*(part[i] for part in parts.args), **{name: part[i] for name, part in parts.kwargs.items()})
            for i in range(len(indices) - 1)
        ]


class _ResultsContainer(DataContainer[Any, Any]):
    """Splits them one by one, and joins those of a request's parts."""

    @classmethod
    def batches_to_batch(cls, batches: Sequence[Results], batch_dim: int = 0) -> tuple[Results, list[int]]:
        pairs = [AutoContainer.batches_to_batch(values, batch_dim) for values in zip(*batches, strict=True)]
        return Results(values for values, _ in pairs), pairs[0][1]

    @classmethod
    def batch_to_batches(cls, batch: Results, indices: Sequence[int], batch_dim: int = 0) -> list[Results]:
        parts = (AutoContainer.batch_to_batches(values, indices, batch_dim) for values in batch)
        return [Results(values) for values in zip(*parts, strict=True)]


DataContainerRegistry.register_container(Call, Call, _CallContainer)  # type: ignore[type-abstract]
DataContainerRegistry.register_container(Results, Results, _ResultsContainer)  # type: ignore[type-abstract]


def api_method(function: Callable[..., Any], method: RunnerMethod[Any, Any, Any]) -> APIMethod[..., Any]:
    """`function` is the method in its Runnable class, `method` is the runner's."""
    batchable = method.config.batchable and method.max_batch_size > 1
    api: Any = _APIMethod(
        func=_served(function, batchable),
        route="/" if method.name == "__call__" else f"/{method.name}",
        input_spec=_input_of(function),
        output_spec=type("Output", (_Output,), {}),
        batchable=batchable,
        batch_dim=method.config.batch_dim,
        max_batch_size=max(2, method.max_batch_size),
        max_latency_ms=method.max_latency_ms,
    )
    api.name, api.is_stream, api.ctx_param = method.name, method.config.is_stream, None
    return api


class _APIMethod(APIMethod[..., Any]):  # type: ignore[misc]
    def __get__(self, instance: Any, owner: type) -> Any:
        """For the instance itself the method, where BentoML's would call itself over HTTP, and fail for `__call__`."""
        if instance is None:
            return self
        method: Any = self._local_call(instance)
        method.local = method
        return method


def _served(function: Callable[..., Any], batchable: bool) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Call):
            args, kwargs = args[0].args, args[0].kwargs
        return function(self, *args, **kwargs)

    def call_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(self, *args, **kwargs)
        return Results(result) if isinstance(result, tuple) and args and isinstance(args[0], Call) else result

    async def call_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await call(self, *args, **kwargs)

    chosen = call_async if inspect.iscoroutinefunction(function) else call_batch if batchable else call
    served: Any = functools.wraps(function)(chosen)
    served.func = function  # by which BentoML finds out what kind of function it is
    return served  # type: ignore[no-any-return]


def _as_it_is(value: Any, serialize: SerializerFunctionWrapHandler, info: SerializationInfo) -> Any:
    """Between processes a value goes as it is; into JSON, arrays and tensors go as lists."""
    if not info.mode_is_json():
        return value
    return serialize(pytree.tree_map_only((torch.Tensor, np.ndarray, np.generic), lambda array: array.tolist(), value))


_Value = Annotated[Any, WrapSerializer(_as_it_is)]


class _Output(IORootModel[_Value]):  # type: ignore[misc]
    @classmethod
    async def to_http_response(cls, obj: Any, serde: Any) -> Response:
        if isinstance(obj, Results):
            obj = tuple(obj)  # which every client can unpickle
        if not isinstance(obj, str | bytes):
            response: Response = await super().to_http_response(obj, serde)
            return response
        payload = serde.serialize_model(cls(obj))  # BentoML's would send it as plain text, which its proxy unpickles
        return Response(b"".join(payload.data), media_type=cls.mime_type(), headers=dict(payload.headers))


class _Input(IODescriptor):  # type: ignore[misc]
    args: _Value  # a Call; under the name whose value BentoML hands over as the one positional argument

    @classmethod
    def from_inputs(cls, *args: Any, **kwargs: Any) -> IODescriptor:
        return cls(args=cls.bound(args, kwargs))

    @classmethod
    def bound(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        raise NotImplementedError

    @model_validator(mode="before")
    @classmethod
    def _from_json(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or isinstance(data.get("args"), Call):
            return data
        try:
            return {"args": cls.bound((), data)}
        except TypeError as error:
            raise InvalidArgument(str(error)) from error


def _input_of(function: Callable[..., Any]) -> type[IODescriptor]:
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1:]
    signature = inspect.Signature(parameters)

    class Input(_Input):
        @classmethod
        def bound(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
            given = signature.bind(*args, **kwargs)  # one way to write it, so that calls can be batched
            return Call(*given.args, **given.kwargs)

        @classmethod
        def model_json_schema(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
            needed = [p.name for p in parameters if p.default is p.empty and p.kind not in _OPEN_ENDED]
            properties = {parameter.name: {"title": parameter.name} for parameter in parameters}
            return {"title": "Input", "type": "object", "properties": properties, "required": needed}

    return Input


_OPEN_ENDED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
