"""The artifacts that came with a Bento: `compiled/<model>/<fingerprint>/<attempt>/` beside service.py.

Laid out as a store, but read by any number of processes of any user on a file system that may be read-only: no locks,
nothing is written at a boot, and it may belong to anybody, since whoever writes it writes service.py, too.

    bundle = Bundle(Path("compiled"))
    bundle.add(artifact)  # of a store
    bundle.lookup("encoder", fingerprint).artifact
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from bentoml_compile.artifacts.artifact import TRASH, Artifact, move_away, sweep
from bentoml_compile.artifacts.axes import Fingerprint
from bentoml_compile.artifacts.folder import Folder, newest_first, read_whole
from bentoml_compile.artifacts.manifest import (
    MANIFEST,
    Damaged,
    Manifest,
    check_files,
    check_portable,
    read_manifest,
    sync_directory,
    write_checked,
)
from bentoml_compile.errors import ArtifactRejected

_DIRECTORY = 0o755  # a Bento is often served by another user than built it
_FILE = 0o644
_ALONE_SECONDS = 10.0
_POLL = 0.05  # seconds; flock(2) cannot wait with a limit


class Bundled(Artifact):
    """An artifact that nobody prunes or changes while it is used, and that is not locked for that reason."""

    def hold(self) -> None:
        """Does nothing."""


class Bundle(Folder):
    """A folder of artifacts for any machine; each boot picks the one that fits, and writes nothing."""

    words = "the Bento's artifacts"

    def add(self, artifact: Artifact) -> Artifact:
        """Copy an artifact in, in place of those of the same model and fingerprint.

        Args:
            artifact: of any folder, held.

        Returns:
            The copy. Any user can read it.

        Raises:
            ArtifactRejected: it was not made ahead of time, or is too large, or is not what its manifest says.
            OSError: the bundle cannot be written.
        """
        check_portable(artifact.manifest)
        directory = self.directory(artifact.model, artifact.fingerprint)
        self.root.parent.mkdir(parents=True, exist_ok=True)
        for path in (self.root, directory.parent, directory):
            _make_directory(path)
        with _alone_in(directory) as is_alone:
            if is_alone:
                sweep(directory)
            path = directory / _digest(artifact.manifest)
            if not self._is_whole(path, artifact.manifest):
                _copy(artifact, path)
            if is_alone:  # else another one may do the same with this copy
                for other in newest_first(directory):
                    if other != path:
                        move_away(other)
        return Bundled(path, artifact.manifest)

    def label(self, attempt: Path) -> str:
        return str(attempt.relative_to(self.root.parent))

    def _complete(self, slug: str) -> Iterator[Artifact]:
        for directory in self._directories(slug):
            for attempt in newest_first(directory):
                with contextlib.suppress(ArtifactRejected, OSError):
                    self._refuse_links(attempt)
                    yield Bundled(attempt, read_manifest(attempt))

    def _checked(self, attempt: Path, model: str, fingerprint: Fingerprint) -> Bundled:
        self._refuse_links(attempt)
        check_portable(read_manifest(attempt))  # before all that it lists is read
        return Bundled(attempt, read_whole(attempt, model, fingerprint))

    def _refuse_links(self, attempt: Path) -> None:
        """On the way to the artifact; those inside of it are found with its files."""
        for path in (attempt.parent.parent, attempt.parent, attempt):
            if path.is_symlink():
                raise Damaged(f"{self.label(path)} is a link")

    def _is_whole(self, attempt: Path, manifest: Manifest) -> bool:
        try:
            self._refuse_links(attempt)
            check_files(attempt, manifest.files)
            return read_manifest(attempt) == manifest
        except (ArtifactRejected, OSError):
            return False


def _copy(artifact: Artifact, path: Path) -> None:
    """Under a temporary name, which no lookup reads, until all of it is on the disk."""
    manifest, temporary = artifact.manifest, path.with_name(f"{TRASH}{secrets.token_hex(6)}")
    temporary.mkdir()
    try:
        for name in manifest.files:
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            _copy_file(artifact.path / name, temporary / name)
        check_files(temporary, manifest.files)
        write_checked(temporary / MANIFEST, manifest.model_dump(mode="json"))
        (temporary / MANIFEST).chmod(_FILE)
        for directory, _, _ in os.walk(temporary):
            os.chmod(directory, _DIRECTORY)
            sync_directory(Path(directory))
        move_away(path)  # a damaged copy of the same
        with contextlib.suppress(FileExistsError):  # another process has made it
            _rename(temporary, path)
        sync_directory(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _copy_file(source: Path, target: Path) -> None:
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as read, target.open("xb") as written:
        shutil.copyfileobj(read, written, 1 << 20)
        os.fchmod(written.fileno(), _FILE)
        written.flush()
        os.fsync(written.fileno())


def _rename(source: Path, target: Path) -> None:
    """Raises FileExistsError where the target is there."""
    try:
        source.rename(target)
    except OSError as error:
        if target.is_dir():  # ENOTEMPTY or EEXIST: rename(2)
            raise FileExistsError(*error.args) from error
        raise


def _make_directory(path: Path) -> None:
    try:
        path.mkdir()
    except FileExistsError:
        return
    path.chmod(_DIRECTORY)  # whatever the umask


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[bool]:
    """Waits until no other process adds to the directory; False where that takes long, or cannot be told.

    The lock is on the directory itself: a Bento takes no lock file along.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield _locked(descriptor)
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    deadline = time.monotonic() + _ALONE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL)
        except OSError:  # a file system without locks
            return False
        else:
            return True


def _digest(manifest: Manifest) -> str:
    """A name for the copy: the same for the same artifact, so that it is copied once."""
    return hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()[:12]
