"""From an exported program to a library on disk, by AOTInductor."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from bentoml_compile.artifacts.hashing import file_hash
from bentoml_compile.engines.dynamo import inductor_cache

# What makes the result right, not fast: not for users to override. Each was found by experiment with torch 2.13.0.
SETTINGS: Mapping[str, Any] = {
    "aot_inductor.package_constants_in_so": False,  # the model's own tensors are given by reference
    # without both, 0-d, one-element and small 1-D weights become literals, and other weights answer wrongly
    "always_keep_tensor_constants": True,
    "joint_graph_constant_folding": False,
    # code without an OpenMP region answers an index out of range with an exception, code with one ends the process. On
    # all-MiniLM-L6-v2 this cost nothing (benchmarks/aot_threads.py): the matrix products have torch's threads anyway
    "cpp.threads": 1,
    "aot_inductor.precompile_headers": False,  # needs openssl on PATH, and leaves 280 MB in the temporary directory
    "triton.cudagraphs": False,  # AOTInductor makes none; the engine captures its own
}

_BACKENDS = "max_autotune_gemm_backends"
_KEPT = (".so", ".cubin", ".fatbin", ".hsaco", ".spv", ".json")


def compile_program(
    program: ExportedProgram, directory: Path, *, device: torch.device, mode: str, options: Mapping[str, Any]
) -> str:
    """Compiles into `directory`; returns the library's file name. Inductor's own files are gone afterwards.

    Args:
        mode, options: as for torch.compile; options go on top of the mode's, SETTINGS on top of both.

    Raises:
        Exception: whatever Inductor or the compiler raises.
    """
    configs = {**torch._inductor.list_mode_options(mode), **options, **SETTINGS}
    configs[_BACKENDS] = _without_packed_weights(
        configs.get(_BACKENDS, torch._inductor.config.max_autotune_gemm_backends)
    )
    # inside of the directory, so that who finds it half written removes all of it; but Inductor's command lines break
    # at a space (2.13.0)
    parent = None if " " in str(directory) else directory
    with tempfile.TemporaryDirectory(prefix=".compiling-", dir=parent) as work:
        archive = Path(work, "package.pt2")
        with (
            inductor_cache(Path(work, "cache"), self_contained=False),
            # AOTInductor notes there what it has compiled for, which later became part of torch.compile's cache keys
            torch._inductor.config.patch({"aot_inductor.metadata": {}}),
            torch.autocast(device.type, enabled=False),  # the casts are in the traced graph already
        ):
            torch._inductor.aoti_compile_and_package(program, package_path=str(archive), inductor_configs=configs)
        return _unpack(archive, directory, Path(work, "extracted"))


def _without_packed_weights(backends: str) -> str:
    """Inductor's C++ matrix product keeps weights packed while compiling, so that others would not count (2.13.0)."""
    return ",".join(name for name in backends.split(",") if name.strip().upper() != "CPP")


def _unpack(archive: Path, directory: Path, extracted: Path) -> str:
    library, companions = "", []
    with zipfile.ZipFile(archive) as files:
        for member in files.namelist():
            name = Path(member).name
            if "aotinductor" not in member or not name.endswith(_KEPT) or name.endswith("_metadata.json"):
                continue
            with files.open(member) as source, extracted.open("wb") as target:
                shutil.copyfileobj(source, target)
            if name.endswith(".so"):
                name = library = f"{file_hash(extracted)[:32]}.so"
            elif name.endswith(".json"):
                companions.append(name)
            shutil.move(extracted, directory / name)
    if not library:
        raise RuntimeError("AOTInductor made no library")
    for name in companions:  # operators without a C function; looked for under the library's name
        (directory / name).rename((directory / library).with_suffix(".json"))
    return library
