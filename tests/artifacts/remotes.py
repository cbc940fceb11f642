"""What the tests of remotes share: artifacts that no compiler made, and whose keys are whose."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from bentoml_compile.artifacts.axes import Fingerprint
from bentoml_compile.artifacts.manifest import MANIFEST
from bentoml_compile.artifacts.remote import Remote
from bentoml_compile.artifacts.signing import PrivateKey, PublicKey
from bentoml_compile.artifacts.store import Artifact, Store

KEY = PrivateKey.new()
STRANGER = PrivateKey.new()
FINGERPRINT = Fingerprint({"torch": "2.13.0", "mode": "default"}, {"scale": "float 2.0"})
OTHER = Fingerprint({"torch": "2.12.1", "mode": "default"}, {"scale": "float 2.0"})
FILES = {"1/model.so": b"\x7fELF" * 1000, "1/package.json": b"{}", "2/model.so": b"\x7fELF" * 1000, "2/empty": b""}
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
HANG = 60.0  # seconds; nothing that works comes near it


def make(
    store: Store,
    fingerprint: Fingerprint = FINGERPRINT,
    model: str = "encoder",
    files: dict[str, bytes] = FILES,
    engine: str = "aot",
    sources: dict[str, str] | None = None,
) -> Artifact:
    """An artifact, held."""
    with store.draft(model, fingerprint) as draft:
        for name, content in files.items():
            (draft.cache / name).parent.mkdir(parents=True, exist_ok=True)
            (draft.cache / name).write_bytes(content)
        return draft.seal({"speedup": 1.5}, sources or {}, engine)


def remote(
    uri: str, *, key: PrivateKey | None = None, trusted: Collection[PublicKey] = (KEY.public,), timeout: float = HANG
) -> Remote:
    """With `key` a builder, else a machine that only looks."""
    return Remote(uri, timeout=timeout, public_keys=trusted, key=key)


def reasons(uri: str, store: Store, fingerprint: Fingerprint = FINGERPRINT, model: str = "encoder") -> list[str]:
    """Why nothing is found."""
    found = remote(uri).lookup(model, fingerprint, store)
    assert found.artifact is None
    return [rejection.reason for rejection in found.rejected]


def is_empty(store: Store) -> bool:
    """Whether there is no file in the store."""
    return not [path for path in store.root.rglob("*") if path.is_file()]


def content(artifact: Artifact) -> dict[str, bytes]:
    return {str(path.relative_to(artifact.cache)): path.read_bytes() for path in files_of(artifact.cache)}


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST)


def asking() -> set[threading.Thread]:
    """The threads that ask a remote, also those for which nobody waits any more; see patience.py."""
    return {thread for thread in threading.enumerate() if thread.name == "bentoml-compile-remote"}


def poll(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + HANG
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
