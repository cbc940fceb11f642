"""The files of artifacts at a remote, by their content: fetched, and compared with what a signed manifest says."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from bentoml_compile.artifacts.manifest import Damaged, FileEntry
from bentoml_compile.artifacts.remote_files import Range, RemoteFiles

BLOBS = "blobs"
_PIECE = 8 << 20  # bytes of one request
_AT_A_TIME = 4 * _PIECE  # bytes in memory
_MOST_REQUESTS = 16


def path_of(entry: FileEntry) -> str:
    return f"{BLOBS}/{entry.sha256}"


def problem_of(files: RemoteFiles, entry: FileEntry) -> str:
    """Why a file is not what its artifact's manifest says, which takes reading all of it; empty if it is.

    Raises:
        OSError and others, as the file system likes.
    """
    size = files.size(path_of(entry))
    if size is None:
        return f"{path_of(entry)} is missing"
    digest = hashlib.sha256()
    for piece in _pieces(entry) if size == entry.size else ():
        digest.update(files.ranges([piece])[0])
    return "" if (size, digest.hexdigest()) == (entry.size, entry.sha256) else f"{path_of(entry)} was altered"


class Blobs:
    """The blobs of an artifact, fetched in the order of its files, several requests at a time."""

    def __init__(self, files: RemoteFiles, entries: Iterable[FileEntry], is_abandoned: Callable[[], bool]) -> None:
        self._files = files
        self._is_abandoned = is_abandoned
        self._wanted = deque(piece for entry in entries for piece in _pieces(entry))
        self._got: deque[bytes] = deque()

    def fetch(self, entry: FileEntry, path: Path) -> None:
        """Write the next file to `path`, which must be new.

        Raises:
            Damaged: it is longer or shorter than it should be, or another.
            TimeoutError: nobody waits for it any more. Others, as the file system likes.
        """
        digest, size = hashlib.sha256(), 0
        with path.open("xb") as file:  # follows no link
            for piece in _pieces(entry):
                content = self._next()
                size += len(content)
                if size > entry.size or size < min(piece.end, entry.size):
                    than = "longer" if size > entry.size else "shorter"
                    raise Damaged(f"{path_of(entry)} is {than} than {entry.size} bytes")
                digest.update(content)
                file.write(content)
        if digest.hexdigest() != entry.sha256:
            raise Damaged(f"{path_of(entry)} was altered")

    def _next(self) -> bytes:
        if self._is_abandoned():
            raise TimeoutError("the time is up")
        if not self._got:
            batch: list[Range] = []
            while self._wanted and len(batch) < _MOST_REQUESTS and sum(map(_length, batch)) < _AT_A_TIME:
                batch.append(self._wanted.popleft())
            self._got.extend(self._files.ranges(batch))
        return self._got.popleft()


def _pieces(entry: FileEntry) -> list[Range]:
    """The last one asks for a byte more than there should be."""
    path, starts = path_of(entry), range(0, entry.size, _PIECE)
    return [Range(path, start, entry.size + 1 if start == starts[-1] else start + _PIECE) for start in starts]


def _length(piece: Range) -> int:
    return piece.end - piece.start
