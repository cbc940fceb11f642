"""Files at an fsspec URI: what a remote (remote.py) and its leases (remote_lease.py) need of a file system.

Endpoints and credentials are fsspec's and the file system's own matter: see the `s3` section of fsspec's config, or
FSSPEC_S3_ENDPOINT_URL=http://minio:9000 (or AWS_ENDPOINT_URL) for a server that speaks S3's protocol.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, ParamSpec, TypeVar

from bentoml_compile.artifacts.manifest import sync_directory
from bentoml_compile.errors import ConfigError
from bentoml_compile.words import one_line

_TEMPORARY = ".tmp"
_LEFT_BEHIND = 24 * 3600.0  # seconds; a file that takes longer to write is not one of ours
_MODIFIED = ("LastModified", "last_modified", "mtime", "created")  # s3fs, adlfs, gcsfs and local, memory
_S3 = ("s3", "s3a")
_NO_BUCKET = "The specified bucket does not exist"

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def _says_denied(method: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """With PermissionError for what a file system of whatever kind raises when it is that."""

    @functools.wraps(method)
    def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            if isinstance(error, PermissionError) or not _is_denied(error):
                raise
            raise PermissionError(one_line(error)) from error

    return call


@dataclass(frozen=True, slots=True)
class Listed:
    """A file in a directory's listing; `modified` only orders files of one remote.

    Attributes:
        size: in bytes; 0 where the file system does not say.
    """

    name: str
    size: int
    modified: float


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of one file, from `start` to before `end`."""

    path: str
    start: int
    end: int


class RemoteFiles:
    """Files below `uri`, by their paths from there.

    Args:
        seconds: that one request may take. Only S3 can be told; see patience.py.

    Raises:
        ConfigError: as `check_installed`.
    """

    def __init__(self, uri: str, *, seconds: float = 60.0) -> None:
        self.uri = re.sub(r"//([^/:@]*):[^/@]*@", r"//\1:***@", uri)  # as it may be shown
        self._uri = uri
        self._seconds = seconds
        self._opened: tuple[int, Any, str] | None = None
        check_installed(uri)
        _import(uri)

    def list(self, directory: str) -> list[Listed]:
        """The files in a directory; none if it is not there.

        Raises:
            FileNotFoundError: there is no such bucket.
            PermissionError: it is forbidden. Others, as the file system likes: as all methods here.
        """
        return [
            Listed(entry["name"].rpartition("/")[2], entry["size"] or 0, _modified(entry))
            for entry in self._entries(directory)
            if entry["type"] == "file"
        ]

    def directories(self, directory: str) -> Sequence[str]:
        """The names of the directories in one; as `list`."""
        entries = self._entries(directory)
        return [entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory"]

    @_says_denied
    def _entries(self, directory: str) -> Sequence[dict[str, Any]]:
        system, path = self._at(directory)
        system.invalidate_cache()
        try:
            return system.ls(path, detail=True)  # type: ignore[no-any-return]
        except FileNotFoundError as error:
            if error.__cause__ is not None:  # an answer of the server: there is no such bucket
                raise
            bucket = path.partition("/")[0]
            if _is_of_bucket(error, bucket):
                raise FileNotFoundError(f"{_NO_BUCKET}: {bucket}") from error
            return []

    @_says_denied
    def size(self, path: str) -> int | None:
        """Of a file, in bytes; None if it is not there."""
        system, path = self._at(path)
        system.invalidate_cache()
        try:
            entry = system.info(path)
        except FileNotFoundError:
            return None
        return entry["size"] if entry["type"] == "file" else None

    def read(self, path: str, most: int) -> bytes:
        """A file's content, cut off one byte after `most`."""
        try:
            return self.ranges([Range(path, 0, most + 1)])[0]
        except FileNotFoundError:
            raise
        except Exception:
            if self.size(path) == 0:  # no bytes are no range, says S3
                return b""
            raise

    @_says_denied
    def ranges(self, ranges: Sequence[Range]) -> Sequence[bytes]:
        """Each range's bytes, as far as its file has them; asked for at the same time where that is possible."""
        system, _ = self._at("")
        contents = system.cat_ranges(
            [self._at(item.path)[1] for item in ranges],
            [item.start for item in ranges],
            [item.end for item in ranges],
            on_error="return",
        )
        for content in contents:
            if isinstance(content, BaseException):
                raise content
        return [bytes(content) for content in contents]

    @_says_denied
    def write(self, path: str, content: bytes) -> None:
        """Make or replace a file, all of it or nothing."""
        system, path = self._at(path)
        if _is_local(system):
            with _complete(Path(path), os.replace) as file:
                file.write(content)
        else:
            system.pipe_file(path, content)

    @_says_denied
    def create(self, path: str, content: bytes) -> None:
        """Make a file that is not there yet. Where a file system cannot do better, it may be seen half written.

        Raises:
            FileExistsError: it is there. Not every file system finds out, or says so: read it again.
        """
        system, path = self._at(path)
        if _is_local(system):
            with _complete(Path(path), _place_new) as file:
                file.write(content)
            return
        try:
            system.pipe_file(path, content, mode="create")
        except TypeError:  # a file system without `mode`
            system.pipe_file(path, content)

    @_says_denied
    def put(self, path: str, source: Path) -> None:
        """Make or replace a file by a copy of a local one, all of it or nothing."""
        system, path = self._at(path)
        if _is_local(system):
            with source.open("rb") as read, _complete(Path(path), os.replace) as file:
                shutil.copyfileobj(read, file, 1 << 20)
        else:
            system.put_file(str(source), path)

    @_says_denied
    def remove(self, path: str) -> None:
        system, path = self._at(path)
        system.rm_file(path)

    def sweep(self, directory: str) -> None:
        """Remove what writers that were killed have left in a local directory."""
        system, path = self._at(directory)
        if not _is_local(system):
            return
        with contextlib.suppress(OSError):
            found = [(Path(entry.path), entry.stat().st_mtime) for entry in os.scandir(path)]
            # by the clock that wrote them, unless one is ahead of this machine's
            now = min(max((modified for _, modified in found), default=0.0), time.time())
            for file, modified in found:
                if file.suffix == _TEMPORARY and modified < now - _LEFT_BEHIND:
                    file.unlink(missing_ok=True)

    def _at(self, path: str) -> tuple[Any, str]:
        """The file system, and what it calls the path. A forked process needs one of its own."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), *_open(self._uri, self._seconds))
        _, system, root = self._opened
        return system, f"{root}/{path}" if path else root


def _open(uri: str, seconds: float) -> tuple[Any, str]:
    from fsspec.config import conf
    from fsspec.core import url_to_fs

    protocol = _protocol(uri)
    options: dict[str, Any] = {"skip_instance_cache": True}
    if protocol in _S3:
        configured = {key: value for name in _S3 for key, value in conf.get(name, {}).get("config_kwargs", {}).items()}
        # Two attempts, not five in each of two layers: what fails is to say why before the time is up.
        retries = {"total_max_attempts": 2, "mode": "standard"}
        limits = {"connect_timeout": seconds, "read_timeout": seconds, "retries": retries}
        options["config_kwargs"] = {**limits, **configured}
    system, root = url_to_fs(uri, **options)
    if protocol in _S3:
        system.retries = 1  # s3fs's own layer around botocore's
    return system, root.rstrip("/")


def _protocol(uri: str) -> str:
    return re.split(r"::|://", uri, maxsplit=1)[0]


def check_installed(uri: str) -> None:
    """That all packages for a remote are there, before anything large is imported.

    Raises:
        ConfigError: it names those that are missing; or no file system is known for the URI.
    """
    protocol = _protocol(uri)
    missing = [name for name in ("fsspec", "cryptography") if importlib.util.find_spec(name) is None]
    install = ["'bentoml-compile[remote]'"] if missing else []
    package = "s3fs" if protocol in _S3 else None if "fsspec" in missing else _package(protocol)
    if package is not None and importlib.util.find_spec(package) is None:
        missing.append(package)
        install = ["'bentoml-compile[s3]'"] if protocol in _S3 else [*install, package]
    if missing:
        raise ConfigError(f"artifacts.remote needs {' and '.join(missing)}: pip install {' '.join(install)}")


def _package(protocol: str) -> str | None:
    """What has the file system; None: it is there.

    Raises:
        ConfigError: fsspec knows of none.
    """
    from fsspec.registry import known_implementations, registry

    if protocol in registry:
        return None
    if protocol not in known_implementations:
        raise ConfigError(
            f"artifacts.remote: fsspec knows no file system for {protocol}://; one of its package may be missing"
        )
    package: str = known_implementations[protocol]["class"].partition(".")[0]
    return package


def _import(uri: str) -> None:
    """Now, since it takes a second, which is not the remote's.

    Raises:
        ConfigError: it cannot be imported, as where a package that it needs is missing or broken.
    """
    from fsspec import get_filesystem_class

    try:
        get_filesystem_class(_protocol(uri))
    except ImportError as error:
        reason = error.__cause__ or error  # fsspec's own words name its package, whatever is missing
        raise ConfigError(f"artifacts.remote: the file system for {_protocol(uri)}:// fails: {reason}") from error


def _is_denied(error: Exception) -> bool:
    """As azure-core 1.41, aiohttp 3.14 and gcsfs 2026.10 say it; elsewhere the error stays what it is."""
    if type(error) is OSError:
        return str(error).startswith("Forbidden")
    status = next((getattr(error, name) for name in ("status_code", "status", "code") if hasattr(error, name)), None)
    return str(status) in ("401", "403")


def _is_of_bucket(error: FileNotFoundError, bucket: str) -> bool:
    """Whether a listing failed because there is no such bucket, as adlfs 2026.8 and gcsfs 2026.10 say it.

    Elsewhere it is taken for a directory that is not there yet.
    """
    return type(error.__context__).__name__ == "ResourceNotFoundError" or str(error) == f"b/{bucket}/o"


def _modified(entry: dict[str, Any]) -> float:
    value = next((entry[key] for key in _MODIFIED if entry.get(key) is not None), 0.0)
    return value.timestamp() if isinstance(value, datetime) else float(value)


def _is_local(system: Any) -> bool:
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(system, LocalFileSystem)


@contextlib.contextmanager
def _complete(path: Path, place: Callable[[Path, Path], None]) -> Iterator[IO[bytes]]:
    """A file that is placed at `path` when it is complete; fsspec's local file system writes in place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:20]}.{secrets.token_hex(6)}{_TEMPORARY}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        place(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_directory(path.parent)


def _place_new(temporary: Path, path: Path) -> None:
    """Raises FileExistsError if there is one at `path`."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        with path.open("xb") as file:
            file.write(temporary.read_bytes())
    temporary.unlink()
