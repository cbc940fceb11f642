"""The machine and torch's settings as axes of a fingerprint."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from bentoml_compile.artifacts.describe import Describer
from bentoml_compile.artifacts.hashing import short_hash

__all__ = ["environment_axes", "versions"]

_ENVIRONMENT = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE", "TORCH_DYNAMO_", "AOT_INDUCTOR_", "TRITON_")
# Where things are kept, how many helpers compile and what is logged: no part of the code that comes out.
_NOT_IN_CODE = {
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TORCHINDUCTOR_WORKER_START",
    "TORCHINDUCTOR_WORKER_LOGPATH",
    "TORCHINDUCTOR_WORKER_SUPPRESS_LOGGING",
    "TORCHINDUCTOR_QUIESCE_ASYNC_COMPILE_POOL",
    "TORCHINDUCTOR_COMPILE_WORKER_WAIT_TIMEOUT",
    "TORCHINDUCTOR_PRECOMPILATION_TIMEOUT_SECONDS",
    "TORCHINDUCTOR_FILE_LOCK_TIMEOUT",
    "TORCHINDUCTOR_FX_GRAPH_CACHE",
    "TORCHINDUCTOR_FX_GRAPH_CACHE_DEFAULT",
    "TORCHINDUCTOR_AUTOGRAD_CACHE",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES",
    "TORCHDYNAMO_VERBOSE",
    "TORCHDYNAMO_PRINT_MISSING",
    "TORCH_COMPILE_DEBUG",
    "TORCH_COMPILE_DEBUG_DIR",
    "TORCH_COMPILE_CPROFILE",
    "TORCH_COMPILE_DISABLE",
}

# What changes code or numbers. Each is read alone: some raise where torch's old and new precision settings are mixed.
_BACKENDS: Any = torch.backends  # some of its attributes are made at run time
_DETERMINISTIC: Any = torch.utils.deterministic
_SETTINGS: dict[str, Callable[[], object]] = {
    "default_dtype": torch.get_default_dtype,
    "default_device": torch.get_default_device,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
    "deterministic_fill": lambda: _DETERMINISTIC.fill_uninitialized_memory,
    "anomaly": torch.is_anomaly_enabled,
    "float32_matmul_precision": torch.get_float32_matmul_precision,
    "fp32_precision": lambda: _BACKENDS.fp32_precision,
    "cuda.matmul.fp32_precision": lambda: torch.backends.cuda.matmul.fp32_precision,
    "cuda.matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "cuda.matmul.fp16_reduced": lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    "cuda.matmul.bf16_reduced": lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    "cuda.matmul.fp16_accumulation": lambda: torch.backends.cuda.matmul.allow_fp16_accumulation,
    "cuda.linalg": lambda: torch.backends.cuda.preferred_linalg_library(),
    "cuda.blas": lambda: torch.backends.cuda.preferred_blas_library(),
    "cuda.sdp_flash": torch.backends.cuda.flash_sdp_enabled,
    "cuda.sdp_mem_efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "cuda.sdp_math": torch.backends.cuda.math_sdp_enabled,
    "cuda.sdp_cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "cudnn.enabled": lambda: torch.backends.cudnn.enabled,
    "cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
    "cudnn.conv.fp32_precision": lambda: _BACKENDS.cudnn.conv.fp32_precision,
    "mkldnn.enabled": lambda: torch.backends.mkldnn.enabled,
    "mkldnn.deterministic": lambda: torch.backends.mkldnn.deterministic,
    "mkldnn.fp32_precision": lambda: torch.backends.mkldnn.fp32_precision,
    "quantized_engine": lambda: torch.backends.quantized.engine,
}


def environment_axes(devices: Sequence[torch.device]) -> dict[str, str]:
    """Versions, devices, CPU, threads, autocast, torch's settings and the compiler's options."""
    kinds = sorted({"cpu"} | {device.type for device in devices})
    return {
        **versions(),
        "device": "; ".join(sorted({_device(device) for device in devices})),
        "cpu": f"{torch.backends.cpu.get_cpu_capability()}, {_cpu_flags()}",
        "threads": str(torch.get_num_threads()),
        "autocast": "; ".join(f"{kind}: {_autocast(kind)}" for kind in kinds if kind != "meta"),
        **{f"torch.{name}": _read(read) for name, read in _SETTINGS.items()},
        "compiler environment": "; ".join(_compiler_environment()) or "none",
        "compiler settings": "; ".join(_compiler_overrides()) or "none",
    }


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """torch, triton and Python."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    return {
        "torch": str(torch.__version__),
        "triton": triton,
        "python": f"{platform.python_version()} {platform.system()} {platform.machine()}".lower(),
    }


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    toolkit = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    return f"cuda: {torch.cuda.get_device_name(device)}, capability {major}.{minor}, {toolkit}"


@lru_cache(maxsize=1)
def _cpu_flags() -> str:
    """The first processor's instruction sets as Linux lists them; elsewhere the processor's name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    flags = sorted(value.split())
                    return f"{len(flags)} flags {short_hash(flags)}"
    except OSError:
        pass
    return platform.processor() or "unknown"


def _autocast(kind: str) -> str:
    try:
        return str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "off"
    except RuntimeError:  # a device kind without autocast
        return "off"


def _read(read: Callable[[], object]) -> str:
    try:
        return str(read())
    except (AttributeError, RuntimeError) as error:
        return type(error).__name__


def _compiler_environment() -> Iterator[str]:
    for name, value in sorted(os.environ.items()):
        if name.startswith(_ENVIRONMENT) and name not in _NOT_IN_CODE:
            yield f"{name}={value}"


def _compiler_overrides() -> Iterator[str]:
    """The settings of Dynamo, AOTAutograd and Inductor that this process changed.

    A config module that nobody has imported yet (it costs a second) has no changes, and what the environment says
    is an axis of its own. Reads `_config` of torch.utils._config_module, checked with torch 2.9 to 2.13; where it is
    missing, changed settings do not count.
    """
    describer = Describer()
    for module in ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config"):
        config = sys.modules.get(module)
        ignored = (*getattr(config, "_cache_config_ignore_prefix", ()), *_WRITTEN_BY_COMPILING)
        for name, entry in sorted(getattr(config, "_config", {}).items()):
            value = _override(entry)
            # torch leaves an override behind that equals the default whenever it patches and unpatches.
            if value is not _UNSET and not name.startswith(ignored):
                text, default = describer.describe(value), describer.describe(entry.default)
                if text != default:
                    yield f"{module.removeprefix('torch._').removesuffix('.config')}.{name}={text}"


_UNSET = object()
_WRITTEN_BY_COMPILING = ("aot_inductor.metadata",)  # AOTInductor notes there what it has compiled for (torch 2.13)


def _override(entry: Any) -> Any:
    override = getattr(entry, "user_override", _UNSET)
    override = override.get() if hasattr(override, "get") and hasattr(override, "reset") else override
    return _UNSET if type(override) is object else override
