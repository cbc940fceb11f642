"""What a compiler in another process needs, as files: the program without its weights, and this process's settings.

The weights are not copied: the other process allocates memory of the same layout and leaves it as it is, since code
does not depend on their values (inductor.SETTINGS). Tensors that share memory here share it there.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import io
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from bentoml_compile.artifacts.environment import environment_axes

_PROGRAM, _JOB = "program.pt2", "job.pt"
_NAMESPACES = {"aten", "prims", "prim"}  # of the operators that `import torch` registers
# Up to here values go along: should Inductor make a literal of a small tensor, it is the one that it would be here.
_SMALL = 4096  # bytes

_CONFIGS = ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config")
_WRITTEN_BY_COMPILING = {"aot_inductor.metadata"}
# axes of environment_axes that are no matter to AOTInductor's code: what they decide is in the graph, or decided as the
# code runs, in the process that runs it
_NOT_IN_CODE = {"autocast", "torch.default_device", "torch.anomaly", "torch.cuda.linalg", "torch.cuda.blas"}


class HandoverError(Exception):
    """Something that another process would not have: compile in this process instead."""


@dataclass(frozen=True, slots=True)
class Job:
    """The arguments of `compile_program` but for the directory."""

    program: ExportedProgram
    device: torch.device
    mode: str
    options: Mapping[str, Any]


# this process


def write(job: Job, directory: Path) -> None:
    """Writes what `reading` needs. Leaves the program as it is.

    Raises:
        HandoverError: an operator, a tensor, an option or a setting that only this process has.
    """
    _refuse_other_operators(job.program)
    storages, tensors = _layout(job.program)
    contents = {
        "device": str(job.device),
        "mode": job.mode,
        "options": {name: _plain(f"the option {name!r}", value) for name, value in job.options.items()},
        "storages": storages,
        "tensors": tensors,
        "settings": _read_settings(),
        "configs": _changed_configs(),
        "axes": _axes(job.device),
        "inference": torch.is_inference_mode_enabled(),
        "grad": torch.is_grad_enabled(),
    }
    torch.save(contents, directory / _JOB)
    try:
        torch.export.save(_without_tensors(job.program), directory / _PROGRAM)
    except OSError:
        raise
    except Exception as error:
        raise HandoverError(f"the exported program cannot be written: {type(error).__name__}: {error}") from error


def _refuse_other_operators(program: ExportedProgram) -> None:
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            target = node.target
            if isinstance(target, torch._ops.OpOverload) and target.namespace not in _NAMESPACES:
                raise HandoverError(f"the operator {target} may be registered in this process alone")
            if isinstance(target, torch._ops.HigherOrderOperator) and not type(target).__module__.startswith("torch."):
                raise HandoverError(f"the higher-order operator {target} is registered in this process alone")


def _layout(program: ExportedProgram) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The memory to allocate, and the tensors in it."""
    storages: dict[Any, dict[str, Any]] = {}
    tensors = []
    for kind, owned in (("state_dict", program.state_dict), ("constants", program.constants)):
        for name, tensor in owned.items():
            _refuse_other_tensors(name, tensor)
            storage = tensor.untyped_storage()
            key = (str(tensor.device), storage.data_ptr() or (kind, name))  # an empty one has no address
            storages.setdefault(key, _storage(tensor, storage))
            tensors.append(
                {
                    "kind": kind,
                    "name": name,
                    "storage": list(storages).index(key),
                    "dtype": tensor.dtype,
                    "place": (tensor.storage_offset(), tuple(tensor.shape), tensor.stride()),
                    "parameter": isinstance(tensor, nn.Parameter),
                    "requires_grad": tensor.requires_grad,
                }
            )
    return list(storages.values()), tensors


def _refuse_other_tensors(name: str, tensor: Any) -> None:
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        raise HandoverError(f"{name!r} is a {type(tensor).__name__}, whose class another process may not have")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise HandoverError(f"{name!r} is more than a dense tensor: {tensor.layout}, {tensor.dtype}")


def _storage(tensor: torch.Tensor, storage: torch.UntypedStorage) -> dict[str, Any]:
    size, value = storage.nbytes(), None
    if 0 < size <= _SMALL:
        value = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (size,), (1,)).cpu().clone()
    return {"size": size, "device": str(tensor.device), "value": value}


def _without_tensors(program: ExportedProgram) -> ExportedProgram:
    """With an empty tensor in each one's place, and with no class in its output that the other process must import.

    The three private names are those of torch 2.13.0's ExportedProgram; where they mean nothing, the weights are
    written too, and the tests see that.
    """
    stripped: Any = copy.copy(program)
    stripped._state_dict = {name: _stand_in(tensor) for name, tensor in program.state_dict.items()}
    stripped._constants = {name: _stand_in(tensor) for name, tensor in program.constants.items()}
    whole = copy.copy(program.module_call_graph[0])
    if whole.signature is not None:
        whole.signature = copy.copy(whole.signature)
        outputs = (None,) * whole.signature.out_spec.num_leaves
        whole.signature.out_spec = pytree.tree_structure(outputs)
    stripped._module_call_graph = [whole]  # the others are for unflattening
    return stripped  # type: ignore[no-any-return]


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False):
        empty = torch.zeros((), dtype=tensor.dtype)
        return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


def _plain(what: str, value: Any) -> Any:
    """The value, if it is one that can be read without importing anything."""
    written = io.BytesIO()
    try:
        torch.save(value, written)
        written.seek(0)
        torch.load(written, weights_only=True)
    except Exception as error:
        raise HandoverError(f"{what} is a {type(value).__name__}, which cannot be given to another process") from error
    return value


# the settings of torch

_BACKENDS = (
    "fp32_precision",
    "cuda.matmul.fp32_precision",
    "cuda.matmul.allow_tf32",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_accumulation",
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "cudnn.allow_tf32",
    "cudnn.conv.fp32_precision",
    "mkldnn.enabled",
    "mkldnn.deterministic",
    "mkldnn.fp32_precision",
    "quantized.engine",
)


def _backend(name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    path, _, attribute = f"backends.{name}".rpartition(".")
    owner = functools.reduce(getattr, path.split("."), torch)
    return lambda: getattr(owner, attribute), lambda value: setattr(owner, attribute, value)


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "deterministic": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _set_deterministic,
    ),
    "deterministic_fill": (
        lambda: torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        lambda value: setattr(torch.utils.deterministic, "fill_uninitialized_memory", value),
    ),
    "float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "sdp_flash": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "sdp_mem_efficient": (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    "sdp_math": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    "sdp_cudnn": (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    **{name: _backend(name) for name in _BACKENDS},
}


def _read_settings() -> dict[str, Any]:
    """Some raise where torch's old and new precision settings are mixed; what decides then is among the others."""
    values = {}
    for name, (read, _) in _SETTINGS.items():
        with contextlib.suppress(AttributeError, RuntimeError):
            values[name] = read()
    return values


def _set_settings(values: Mapping[str, Any]) -> None:
    """Sets those that differ. What cannot be set shows as an axis that differs."""
    for name, value in values.items():
        read, write_ = _SETTINGS[name]
        with contextlib.suppress(AttributeError, RuntimeError):
            if read() != value:
                write_(value)


def _changed_configs() -> list[tuple[str, str, Any]]:
    """(module, name, value) of each setting of Dynamo, AOTAutograd and Inductor that this thread sees changed.

    Reads private parts of torch.utils._config_module, checked with torch 2.13.0.
    """
    from torch.utils._config_module import _UNSET_SENTINEL

    changed = []
    for module in _CONFIGS:
        for name, entry in getattr(sys.modules.get(module), "_config", {}).items():
            value = entry.user_override.get()
            if value is _UNSET_SENTINEL or value is entry.default or name in _WRITTEN_BY_COMPILING:
                continue
            if value != entry.default:
                changed.append((module, name, _plain(f"the setting {module}.{name}", value)))
    return changed


def _axes(device: torch.device) -> dict[str, str]:
    return {name: axis for name, axis in environment_axes([device]).items() if name not in _NOT_IN_CODE}


# the other process


@contextlib.contextmanager
def reading(directory: Path) -> Iterator[Job]:
    """The job that `write` wrote; torch's settings are the writer's, those of gradients inside of the block.

    Raises:
        RuntimeError: a setting that could not be made as it was.
    """
    contents = torch.load(directory / _JOB, weights_only=True)
    with torch.inference_mode(contents["inference"]), torch.set_grad_enabled(contents["grad"]):
        program = torch.export.load(directory / _PROGRAM)
        for tensor, made in _allocated(contents["storages"], contents["tensors"]):
            owned = program.state_dict if tensor["kind"] == "state_dict" else program.constants
            owned[tensor["name"]] = made
        device = torch.device(contents["device"])
        _take_over(contents, device)
        yield Job(program, device, contents["mode"], contents["options"])


def _allocated(
    storages: list[dict[str, Any]], tensors: list[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    memory = [_memory(**storage) for storage in storages]
    for tensor in tensors:
        storage = memory[tensor["storage"]]
        made = torch.empty(0, dtype=tensor["dtype"], device=storage.device).set_(storage, *tensor["place"])
        if tensor["parameter"]:
            made = nn.Parameter(made, requires_grad=tensor["requires_grad"])
        yield tensor, made


def _memory(size: int, device: str, value: torch.Tensor | None) -> torch.UntypedStorage:
    if value is not None:
        return value.to(device).untyped_storage()
    return torch.UntypedStorage(size, device=device)  # type: ignore[no-untyped-call]  # never written: takes no memory


def _take_over(contents: Mapping[str, Any], device: torch.device) -> None:
    _set_settings(contents["settings"])
    for module, name, value in contents["configs"]:
        setattr(importlib.import_module(module), name, value)
    found = _axes(device)
    for name, axis in contents["axes"].items():
        if found.get(name) != axis:
            raise RuntimeError(f"{name} is {axis!r} in the worker and {found.get(name)!r} in the compiler's process")
