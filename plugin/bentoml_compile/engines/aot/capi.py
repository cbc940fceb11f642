"""AOTInductor's C functions: the interface of a compiled library, declared once.

The functions are those of `torch/csrc/inductor/aoti_runtime/interface.h`, which every compiled library exports, and two
of `aoti_torch/c/shim.h`, which torch exports. Checked with torch 2.13.0; `load` raises MissingSymbol where a library
or torch lacks one.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from ctypes import POINTER, c_bool, c_char_p, c_int32, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger("bentoml_compile")


class LibraryError(Exception):
    """A compiled library that cannot be opened, or a call that failed, in AOTInductor's own words."""


class MissingSymbol(LibraryError):
    """A function that this package calls below torch's public surface is not there."""


class ConstantEntry(ctypes.Structure):
    """`AOTInductorConstantMapEntry`: a constant's name and the handle of its tensor."""

    _fields_ = [("name", c_char_p), ("handle", c_void_p)]


_CONTAINER = c_void_p
_RUN = (_CONTAINER, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p, c_void_p)
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "AOTInductorModelContainerCreateWithDevice": (POINTER(_CONTAINER), c_size_t, c_char_p, c_char_p),
    "AOTInductorModelContainerDelete": (_CONTAINER,),
    "AOTInductorModelContainerRun": _RUN,
    "AOTInductorModelContainerRunSingleThreaded": _RUN,
    "AOTInductorModelContainerGetNumInputs": (_CONTAINER, POINTER(c_size_t)),
    "AOTInductorModelContainerGetNumOutputs": (_CONTAINER, POINTER(c_size_t)),
    "AOTInductorModelContainerGetNumConstants": (_CONTAINER, POINTER(c_size_t)),
    "AOTInductorModelContainerGetConstantName": (_CONTAINER, c_size_t, POINTER(c_char_p)),
    "AOTInductorModelContainerGetConstantOriginalFQN": (_CONTAINER, c_size_t, POINTER(c_char_p)),
    "AOTInductorModelContainerGetConstantFromFolded": (_CONTAINER, c_size_t, POINTER(c_bool)),
    "AOTInductorModelContainerGetConstantDtype": (_CONTAINER, c_size_t, POINTER(c_int32)),
    "AOTInductorModelContainerUpdateUserManagedConstantBufferPairs": (
        _CONTAINER,
        POINTER(ConstantEntry),
        c_size_t,
        c_bool,
        c_bool,
    ),
    "AOTInductorModelContainerExtractConstantsMapEntries": (
        _CONTAINER,
        POINTER(POINTER(ConstantEntry)),
        POINTER(c_size_t),
        c_bool,
    ),
    "AOTInductorGetLastError": (POINTER(c_char_p),),
}


def load(path: Path) -> ctypes.CDLL:
    """The library at `path`, mapped in place, with its functions declared. One object for each path and process.

    dlopen never unmaps such a library, and finds it again by its path: another file that has come to stand at that
    path would silently be the old code.

    Raises:
        LibraryError: not a library, or not the file that this process opened under that path before.
        MissingSymbol: not a library of AOTInductor, or of a version without one of its functions.
    """
    name = os.path.realpath(path)
    try:
        status = os.stat(name)
        opened = _opened.get(name) or _opened.setdefault(name, _Opened(status.st_dev, status.st_ino, _declared(name)))
    except OSError as error:
        raise LibraryError(f"{path.name} is not a shared library that this process can open: {error}") from error
    if (opened.device, opened.inode) != (status.st_dev, status.st_ino):
        raise LibraryError(
            f"{path.name} was replaced after this process had opened it, and the old code would answer: "
            "give each compiled library a path of its own"
        )
    return opened.library


@dataclass(frozen=True, slots=True)
class _Opened:
    device: int  # st_dev
    inode: int  # st_ino; not used again by another file while the library is mapped
    library: ctypes.CDLL


_opened: dict[str, _Opened] = {}  # by real path; the dynamic linker's own table, which cannot be asked


def _declared(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    for name, arguments in _FUNCTIONS.items():
        declare(library, name, arguments)
    return library


def declare(library: ctypes.CDLL, name: str, arguments: tuple[Any, ...], result: Any = c_int32) -> Any:
    """The library's function `name`, with its argument types and its result (default: an error code) declared."""
    try:
        function = getattr(library, name)
    except AttributeError:
        raise MissingSymbol(f"{Path(library._name).name} has no function {name} (torch {torch.__version__})") from None
    function.argtypes, function.restype = arguments, result
    return function


def check(library: ctypes.CDLL, code: int) -> None:
    """Raises LibraryError with AOTInductor's own message unless `code`, a call's result, is 0."""
    if code:
        raise LibraryError(_last_error(library))


def _last_error(library: ctypes.CDLL) -> str:
    """The message of this thread's last failed call: its first line. The rest is a C++ trace, for the debug log."""
    text = c_char_p()
    library.AOTInductorGetLastError(ctypes.byref(text))
    message = (text.value or b"").decode(errors="replace").strip()
    logger.debug("AOTInductor: %s", message)
    return message.partition("\n")[0] or "the compiled library failed without a message"


def with_index(device: torch.device) -> torch.device:
    """The device as tensors name theirs: "cuda" is the current CUDA device."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def create(library: ctypes.CDLL, device: torch.device, num_models: int, cubin_dir: Path | None = None) -> c_void_p:
    """A new container: `num_models` calls may run in it at once. Its constants are still missing."""
    container = c_void_p()
    folder = None if cubin_dir is None else os.fsencode(cubin_dir)
    name = str(device).encode()
    check(
        library,
        library.AOTInductorModelContainerCreateWithDevice(ctypes.byref(container), num_models, name, folder),
    )
    return container


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor that the library takes from outside."""

    name: bytes  # the library's own
    original: str  # the model's name of the parameter, buffer or lifted constant
    dtype: torch.dtype | None  # None: not one of _DTYPES


@dataclass(frozen=True, slots=True)
class Interface:
    """What goes into a library and comes out of it."""

    inputs: int
    outputs: int
    constants: tuple[Constant, ...]  # without those that the library computes itself (folded ones)


def interface_of(library: ctypes.CDLL, container: c_void_p) -> Interface:
    """Reads the container's own account of itself. Sizes and strides of constants are not part of it."""
    inputs, outputs, constants = (_count(library, container, what) for what in ("Inputs", "Outputs", "Constants"))
    found = (_constant(library, container, index) for index in range(constants))
    return Interface(inputs, outputs, tuple(constant for constant in found if constant is not None))


def _count(library: ctypes.CDLL, container: c_void_p, what: str) -> int:
    count = c_size_t()
    check(library, getattr(library, f"AOTInductorModelContainerGetNum{what}")(container, ctypes.byref(count)))
    return count.value


def _constant(library: ctypes.CDLL, container: c_void_p, index: int) -> Constant | None:
    folded, name, original, dtype = c_bool(), c_char_p(), c_char_p(), c_int32()
    for what, result in (("FromFolded", folded), ("Name", name), ("OriginalFQN", original), ("Dtype", dtype)):
        function = getattr(library, f"AOTInductorModelContainerGetConstant{what}")
        check(library, function(container, index, ctypes.byref(result)))
    if folded.value:
        return None
    return Constant(name.value or b"", (original.value or b"").decode(), _dtypes().get(dtype.value))


_DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64")


@functools.cache
def _dtypes() -> dict[int, torch.dtype]:
    """torch's numbers of the dtypes, by asking each `aoti_torch_dtype_*` function; empty if they are missing."""
    try:
        return {declare(torch_library(), f"aoti_torch_dtype_{name}", ())(): getattr(torch, name) for name in _DTYPES}
    except MissingSymbol as error:
        logger.debug("dtypes of weights are not compared with the compiled library's own: %s", error)
        return {}


@functools.cache
def torch_library() -> ctypes.CDLL:
    """libtorch_cpu, which `import torch` has loaded.

    Raises:
        MissingSymbol: torch was built another way, and it is not where a wheel has it.
    """
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError as error:
        raise MissingSymbol(f"torch {torch.__version__} has no lib/libtorch_cpu.so: {error}") from error
