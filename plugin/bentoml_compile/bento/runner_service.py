"""A legacy runner as a Service that others depend on.

    encoder = bentoml.legacy.Runner(Encoder, name="encoder")
    EncoderService = runner_service(encoder, workers=2)

    @bentoml.service
    class Api:
        encoder = bentoml.depends(EncoderService)

BentoML 1.4.40's own `bentoml.runner_service` makes a service whose methods are no APIMethods, and fails for every
runner; this one is independent of it.
"""

from __future__ import annotations

import sys
from typing import Any

import bentoml
import torch
from bentoml._internal.configuration.containers import BentoMLContainer
from bentoml._internal.resource import get_resource, system_resources
from bentoml.models import BentoModel

from bentoml_compile.bento import runners, settings
from bentoml_compile.bento.runner_calls import api_method
from bentoml_compile.config import SECTION

_GPU = "nvidia.com/gpu"


def runner_service(runner: bentoml.legacy.Runner, **config: Any) -> bentoml.Service[Any]:
    """Makes a Service of a runner, for `bentoml.depends()`. Assign it to a variable of the service's module.

    Its methods are the runner's, and are called with the values themselves: `self.encoder.encode(x)`, or
    `await self.encoder.to_async.encode(x)`. The runner's config is carried over: workers and GPUs (worker n gets the
    n-th), batching limits, timeout and concurrency limit, and its `torch_compile` sections.

    Args:
        runner: of any Runnable.
        config: as for `@bentoml.service`; over the runner's, key by key.

    Raises:
        ConfigError: a `torch_compile` setting that cannot be used.
    """
    module = sys._getframe(1).f_globals["__name__"]
    service: bentoml.Service[Any] = bentoml.Service(
        name=runner.name,
        config=settings.laid(_carried_over(runner), config),
        inner=_service_class(runner, module),
        envs=_environment(runner),
        models=[BentoModel(model.tag) for model in runner.models],
    )
    service._caller_module = module  # BentoML looks for the service's variable there
    return service


def _service_class(runner: bentoml.legacy.Runner, module: str) -> type:
    runnable: Any = runner.runnable_class

    def make(self: Any) -> None:
        _take_gpu(max(1, int(runner.workers_per_resource)))
        runnable.__init__(self, **runner.runnable_init_params)

    defined = runnable.bentoml_runnable_methods__
    methods = {method.name: api_method(defined[method.name].func, method) for method in runner.runner_methods}
    return type(runnable.__name__, (runnable,), {"__init__": make, "__module__": module, **methods})


def _take_gpu(workers_per_gpu: int) -> None:
    """Makes one of the service's GPUs this worker's; BentoML shows all of them to each worker of a service."""
    worker = bentoml.server_context.worker_index  # from 1; None outside of a worker
    if worker is not None and torch.cuda.is_available():
        torch.cuda.set_device((worker - 1) // workers_per_gpu % torch.cuda.device_count())


def _carried_over(runner: bentoml.legacy.Runner) -> dict[str, Any]:
    workers = runner.scheduled_worker_count
    config: dict[str, Any] = {"workers": workers}
    if resources := _resources(runner):
        config["resources"] = resources
    of_all = BentoMLContainer.config.get().get("runners", {})
    limits = {**of_all.get("traffic", {}), **of_all.get(runner.name, {}).get("traffic", {})}
    traffic = {"timeout": limits.get("timeout"), "max_concurrency": limits.get("max_concurrency")}
    if traffic["max_concurrency"]:
        traffic["max_concurrency"] *= workers  # a service's is shared by its workers, a runner's is each one's
    config["traffic"] = {key: value for key, value in traffic.items() if value}
    section = runners.written_section(runner.runnable_class, runners.given_section(runner), runner.name)
    return {**config, SECTION: section} if section else config


def _gpus(runner: bentoml.legacy.Runner) -> int:
    if _GPU not in runner.runnable_class.SUPPORTED_RESOURCES:
        return 0
    return len(get_resource(runner.resource_config or system_resources(), _GPU, validate=False) or ())


def _resources(runner: bentoml.legacy.Runner) -> dict[str, Any]:
    cpu = get_resource(runner.resource_config or {}, "cpu", validate=False)
    return {key: value for key, value in (("gpu", _gpus(runner)), ("cpu", cpu)) if value}


def _environment(runner: bentoml.legacy.Runner) -> list[Any]:
    """Of a runner that has been given CPUs: as BentoML sets it for each of its workers, threads, and no GPU."""
    if not runner.resource_config or _gpus(runner):
        return []
    return [{"name": name, "value": str(value)} for name, value in runner.scheduled_worker_env_map[0].items()]
