"""Where artifacts are kept on this machine: BENTOML_HOME and the store."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bentoml_compile.artifacts.lock import try_lock
from bentoml_compile.artifacts.manifest import permission_problem
from bentoml_compile.artifacts.store import Store
from bentoml_compile.doctor.check import Finding, in_one_line, ok, problem, warning

LITTLE_SPACE = 1 << 30  # bytes; an artifact has some ten MB, and a compile writes more beside it
NO_SPACE = 100 << 20


def home(path: Path) -> Iterator[Finding]:
    """BENTOML_HOME, below which the store lies unless the config names another place."""
    source = "BENTOML_HOME" if "BENTOML_HOME" in os.environ else "BENTOML_HOME is not set"
    if "$" in str(path) or str(path).startswith("~"):
        yield problem(f"{path}: a variable or user in it is not known ({source})", "export BENTOML_HOME=/a/folder")
        return
    if (reason := cannot_write(path)) is not None:
        yield problem(f"{path} {reason} ({source})", "export BENTOML_HOME=/a/folder/that/can/be/written")
        return
    state = "" if path.exists() else "; it will be made"
    yield ok(f"{path} ({source}){state}")


def store(root: Path, *, max_bytes: int | None = None, write: bool = True) -> Iterator[Finding]:
    """The store of a config. What is tried there is removed again; nothing is made that was not there.

    Args:
        write: boots keep what they compile, so that it must be writable.
    """
    found = [*_permissions(root), *_writing(root, write), *_path(root), *_space(root, max_bytes if write else None)]
    yield from found
    if not found:
        artifacts = Store(root).artifacts()
        size = sum(artifact.size for artifact in artifacts) / 1e6
        limit = f" of at most {max_bytes / 1e6:g} MB" if max_bytes is not None else ""
        state = f"{len(artifacts)} artifacts, {size:.1f} MB{limit}" if root.exists() else "not there yet; can be made"
        free = shutil.disk_usage(_nearest(root)).free / 1e9
        yield ok(f"{root}: {state}; {free:.1f} GB free" + ("" if write else "; only read (artifacts.write: false)"))


def _permissions(root: Path) -> Iterator[Finding]:
    if not os.path.lexists(root):
        return
    if not root.is_dir():
        yield problem(f"{root} is not a folder", f"mv {shlex.quote(str(root))} {shlex.quote(f'{root}.old')}")
        return
    folders = [root, *(path for path in root.glob("*") if path.is_dir())]
    for path in [*folders, *(path for path in root.glob("*/*") if path.is_dir())]:
        with contextlib.suppress(OSError):
            if (reason := permission_problem(path, path.stat())) is not None:
                yield _with_fix(reason)
                return


def _with_fix(reason: str) -> Finding:
    """`permission_problem` ends with the command that ends it."""
    text, fix = re.split(r"(?<=; if you trust it|trust its content): (?=ch(?:own|mod) )", reason, maxsplit=1)
    return problem(text, fix)


def _writing(root: Path, write: bool) -> Iterator[Finding]:
    if os.path.lexists(root) and not root.is_dir():
        return
    if not write:
        if root.exists() and not os.access(root, os.R_OK | os.X_OK):
            yield problem(f"{root} cannot be read", f"chmod u+rx {shlex.quote(str(root))}")
        return
    if (reason := cannot_write(root)) is not None:
        yield problem(f"{root} {reason}: what a boot compiles is lost when it ends", _for_writing(reason))
        return
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=_nearest(root)) as folder:
        yield from _locking(root, Path(folder))


def cannot_write(path: Path) -> str | None:
    """Why nothing can be written there, by trying it in what is there of the path."""
    place = _nearest(path)
    if not place.is_dir():
        return f"cannot be made: {place} is not a folder"
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=place) as folder:
            Path(folder, "probe").write_bytes(os.urandom(4096))
    except OSError as error:
        return f"cannot be written: {error.strerror}" if place == path else f"cannot be made: {place}: {error.strerror}"
    return None


def _for_writing(reason: str) -> str:
    if "No space left" in reason or "quota" in reason:
        return "bentoml-compile artifacts prune --older-than 7d"
    return (
        "export BENTOML_HOME=/a/folder/that/can/be/written, or torch_compile: {artifacts: {store: /such/a/folder}}; "
        "where it is only to be read: torch_compile: {artifacts: {write: false}}"
    )


def _locking(root: Path, folder: Path) -> Iterator[Finding]:
    fix = "torch_compile: {artifacts: {store: /a/folder/on/a/local/disk}}"
    first = second = None
    try:
        first = try_lock(folder, exclusive=True)
        second = try_lock(folder, exclusive=True)
        if first is None or second is not None:
            yield problem(f"{root}: two processes can have one lock on its file system", fix)
    except OSError as error:
        yield problem(f"{root}: its file system has no locks: {in_one_line(error)}", fix)
    finally:
        for lock in filter(None, (first, second)):
            lock.release()
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        yield problem(f"{root} is mounted noexec: compiled code cannot be loaded from it", fix)


def _path(root: Path) -> Iterator[Finding]:
    if any(character.isspace() for character in str(root)):
        yield warning(
            f"the path {str(root)!r} has a space: what only torch.compile can serve (engine jit) is not kept there",
            "torch_compile: {artifacts: {store: /a/path/without/spaces}}",
        )


def _space(root: Path, max_bytes: int | None) -> Iterator[Finding]:
    free = shutil.disk_usage(_nearest(root)).free
    if free < LITTLE_SPACE:
        make = problem if free < NO_SPACE else warning
        yield make(f"{root}: {free / 1e6:.0f} MB are free", "bentoml-compile artifacts prune --older-than 7d")
    if max_bytes is None:
        return
    sizes = [artifact.size for artifact in Store(root).artifacts()]
    if sizes and max(sizes) > max_bytes:
        yield problem(
            f"{root}: one artifact has {max(sizes) / 1e6:.1f} MB, max_bytes allows {max_bytes / 1e6:g} MB for all",
            f"torch_compile: {{artifacts: {{max_bytes: {2 * sum(sizes)}}}}}",
        )
    elif sum(sizes) > max_bytes:
        yield warning(
            f"{root}: {len(sizes)} artifacts of {sum(sizes) / 1e6:.1f} MB, max_bytes allows {max_bytes / 1e6:g} MB: "
            "the least recently used go at the next compile",
            f"bentoml-compile artifacts --store {shlex.quote(str(root))} prune --max-size {max_bytes}B",
        )


def _nearest(path: Path) -> Path:
    """The path, or the folder above it that is there."""
    return next((place for place in (path, *path.parents) if os.path.lexists(place)), Path("/"))
