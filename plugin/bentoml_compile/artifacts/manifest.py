"""What an artifact's directory holds: the manifest that completes it, and the check of one against the other."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from bentoml_compile.artifacts.axes import FORMAT, Fingerprint
from bentoml_compile.artifacts.hashing import file_hash
from bentoml_compile.artifacts.lock import LOCK
from bentoml_compile.errors import ArtifactRejected

MANIFEST = "manifest.json"
CACHE = "cache"
USED = "used"
MAX_PORTABLE_BYTES = 4 * 2**30  # weights stay outside of an artifact: a large one has some hundred MB
MAX_PORTABLE_FILES = 10_000
_TOP = {LOCK, MANIFEST, CACHE, USED}
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class Damaged(ArtifactRejected):
    """Not what was written: it will never fit again."""


class FileEntry(BaseModel):
    """One file of the cache directory."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    size: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


def _inside_cache(name: str) -> str:
    """A manifest may come from elsewhere: its files lie in the artifact's own directory, whatever it says."""
    parts = name.split("/")
    if parts[0] != CACHE or len(parts) < 2 or {"", ".", ".."}.intersection(parts) or "\0" in name:
        raise ValueError(f"{name!r} is no file below {CACHE}/")
    return name


class Manifest(BaseModel):
    """The last file that is written: an artifact without it is incomplete."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    format: int
    model: str
    fingerprint: str
    engine: str
    axes: dict[str, str]
    attributes: dict[str, str]
    decisions: dict[str, JsonValue]
    sources: dict[str, str]
    files: dict[Annotated[str, AfterValidator(_inside_cache)], FileEntry]
    creator: str
    created: AwareDatetime

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(entry.size for entry in self.files.values())


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a complete artifact.

    Raises:
        ArtifactRejected: of a format that this version does not read.
        Damaged: it is not what was written.
        OSError: it is missing or cannot be read.
    """
    return parse_manifest(read_checked(directory / MANIFEST))


def parse_manifest(content: Mapping[str, Any]) -> Manifest:
    """The manifest that was written as `content`.

    Raises:
        ArtifactRejected: of a format that this version does not read.
        Damaged: it is not what was written.
    """
    if content.get("format") != FORMAT:
        raise ArtifactRejected(f"format {content.get('format')!r}; this version reads {FORMAT}")
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise Damaged(f"{MANIFEST} is damaged: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if Fingerprint(manifest.axes).id != manifest.fingerprint:
        raise Damaged(f"{MANIFEST} is damaged: its axes do not give its fingerprint")
    return manifest


def check_portable(manifest: Manifest) -> None:
    """Make sure that an artifact is of a kind that travels, and of a size that may be copied.

    Raises:
        ArtifactRejected: the reason.
    """
    if manifest.engine != "aot":
        raise ArtifactRejected(f"made by engine {manifest.engine!r}; only 'aot' artifacts leave the machine")
    if manifest.size > MAX_PORTABLE_BYTES or len(manifest.files) > MAX_PORTABLE_FILES:
        raise ArtifactRejected(
            f"{len(manifest.files)} files of {manifest.size} bytes; at most {MAX_PORTABLE_FILES} of "
            f"{MAX_PORTABLE_BYTES} are copied"
        )


def list_files(directory: Path) -> dict[str, FileEntry]:
    """Every file below `cache/` with its size and hash, without Inductor's locks.

    Raises:
        OSError: something cannot be read.
    """
    return {
        name: FileEntry(size=(directory / name).stat().st_size, sha256=_hash_of(directory / name))
        for name in file_names(directory)
    }


def file_names(directory: Path) -> set[str]:
    """What `list_files` lists."""
    return {
        str(path.relative_to(directory))
        for path, status in _walk(directory / CACHE)
        if stat.S_ISREG(status.st_mode) and not _is_inductor_lock(path, status)
    }


def disk_usage(directory: Path) -> int:
    """Bytes of everything in it that can be read."""
    size = 0
    with contextlib.suppress(OSError):
        for _, status in _walk(directory):
            size += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return size


def forbid_writing_by_others(directory: Path) -> None:
    """Inductor writes with the umask, which on many systems lets the group write."""
    for path, status in _walk(directory):
        if status.st_mode & _WRITABLE_BY_OTHERS and not stat.S_ISLNK(status.st_mode):
            path.chmod(stat.S_IMODE(status.st_mode) & ~_WRITABLE_BY_OTHERS)


def check_files(directory: Path, files: Mapping[str, FileEntry]) -> None:
    """Compare the directory with what its manifest lists.

    Raises:
        Damaged: names the first file that is missing, altered, not listed or not a plain file.
        OSError: something cannot be read.
    """
    # A reseal that was killed leaves its temporary manifest, and no harm.
    surplus = sorted(name for name in set(os.listdir(directory)) - _TOP if not name.startswith(f".{MANIFEST}."))
    if surplus:
        raise Damaged(f"{surplus[0]} is not listed in {MANIFEST}")
    for name in (LOCK, MANIFEST, USED):
        if (directory / name).is_symlink() or ((directory / name).exists() and not (directory / name).is_file()):
            raise Damaged(f"{name} is not a file")
    missing = dict(files)
    for path, status in _walk(directory / CACHE):
        name = str(path.relative_to(directory))
        if stat.S_ISDIR(status.st_mode) or _is_inductor_lock(path, status):
            continue
        if not stat.S_ISREG(status.st_mode):
            raise Damaged(f"{name} is neither a file nor a directory")
        entry = missing.pop(name, None)
        if entry is None:
            raise Damaged(f"{name} is not listed in {MANIFEST}")
        if status.st_size != entry.size:
            raise Damaged(f"{name} has {status.st_size} bytes instead of {entry.size}")
        if _hash_of(path) != entry.sha256:
            raise Damaged(f"{name} was altered")
    if missing:
        raise Damaged(f"{min(missing)} is missing")


def _hash_of(path: Path) -> str:
    if (content := file_hash(path)) == "missing":
        raise OSError(f"{path} cannot be read")
    return content


def check_permissions(directory: Path) -> None:
    """Make sure that nobody else could have written anything in the directory.

    Raises:
        ArtifactRejected: with the command that fixes it.
        OSError: something cannot be read.
    """
    for path, status in _walk(directory):
        if (problem := permission_problem(path, status)) is not None:
            raise ArtifactRejected(problem)


def permission_problem(path: Path, status: os.stat_result) -> str | None:
    """Why code from here must not be run by this user, with the command that fixes it."""
    user = os.geteuid()
    if status.st_uid != user:
        return f"{path} belongs to user {status.st_uid}, not {user}; if you trust it: chown -R {user} '{path}'"
    if status.st_mode & _WRITABLE_BY_OTHERS and not stat.S_ISLNK(status.st_mode):
        return f"{path} can be written by other users; if you trust its content: chmod -R go-w '{path}'"
    return None


def write_checked(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON with a checksum, all of it or nothing: a temporary name, fsync, rename.

    Raises:
        OSError: read-only, full, gone.
    """
    body = json.loads(json.dumps(content))
    text = json.dumps({"sha256": _checksum(body), "content": body}, indent=1)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_directory(path.parent)


def remove_temporaries(path: Path) -> None:
    """What a `write_checked` of `path` that was killed has left; nobody may be writing."""
    for name in os.listdir(path.parent):
        if name.startswith(f".{path.name}."):
            with contextlib.suppress(OSError):
                (path.parent / name).unlink()


def read_checked(path: Path) -> dict[str, Any]:
    """The content that `write_checked` wrote.

    Raises:
        Damaged: a byte of it is not what was written, or it is no file.
        OSError: it is missing or cannot be read.
    """
    written = _read_file(path)
    try:
        outer = json.loads(written)
        content: dict[str, Any] = outer["content"]
        if outer["sha256"] == _checksum(content) and isinstance(content, dict):
            return content
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise Damaged(f"{path.name} is damaged")


def _read_file(path: Path) -> bytes:
    """Follows no link, and never waits for who writes into a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise Damaged(f"{path.name} is not a file") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Damaged(f"{path.name} is not a file")
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def timestamp(path: Path) -> datetime | None:
    """When the file was last written (UTC), None if it is not there."""
    with contextlib.suppress(OSError):
        return datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
    return None


def _checksum(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sync_directory(path: Path) -> None:
    """Have the directory's names on the disk, where the file system can."""
    with contextlib.suppress(OSError):  # some network file systems refuse
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _walk(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The directory itself and everything below it, links not followed."""
    yield directory, directory.stat(follow_symlinks=False)
    with os.scandir(directory) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(path)
        else:
            yield path, entry.stat(follow_symlinks=False)


def _is_inductor_lock(path: Path, status: os.stat_result) -> bool:
    """Inductor makes them as it looks things up (locks/*.lock; checked with torch 2.13). They are empty: no code."""
    return path.suffix == ".lock" and stat.S_ISREG(status.st_mode) and status.st_size == 0
