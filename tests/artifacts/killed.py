"""What test_kills.py kills: one thing that is done to a store or a remote, in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import bentoml_compile.artifacts
from bentoml_compile.artifacts.axes import Fingerprint
from bentoml_compile.artifacts.manifest import CACHE, USED, FileEntry, Manifest
from bentoml_compile.artifacts.remote import Remote
from bentoml_compile.artifacts.signing import PrivateKey
from bentoml_compile.artifacts.store import Artifact, Refusal, Store
from bentoml_compile.model import compile_model
from tests.models import classifier, ids

MODEL = "encoder"
OTHER = Fingerprint({"torch": "1.0"})
_TRACED = (str(Path(bentoml_compile.artifacts.__file__).parent), shutil.__file__, tempfile.__file__)


def boot(store: str, config: str, bundle: str | None = None) -> None:
    """Prints what came of it, in JSON."""
    model, example = classifier(), {"ids": ids()}
    compiled = compile_model(
        model,
        example_inputs=[example],
        name=MODEL,
        config=json.loads(config),
        default_store=Path(store),
        bundle=Path(bundle) if bundle is not None else None,
    )
    is_right = torch.allclose(compiled(**example)["logits"], model(**example)["logits"], atol=1e-5)
    print(json.dumps({"outcome": compiled.report.outcome, "is_right": is_right}), flush=True)


def seal(store: Store, original: Artifact, remote: str) -> None:
    with store.draft(MODEL, fingerprint_of(original.manifest)) as draft:
        shutil.copytree(original.cache, draft.cache, dirs_exist_ok=True)
        artifact = draft.seal(original.decisions, original.sources, original.engine)
    artifact.reseal(original.decisions)
    artifact.release()


def adopt(store: Store, original: Artifact, remote: str) -> None:
    store.adopt(original.manifest, fetch_from(original)).release()


def prune(store: Store, original: Artifact, remote: str) -> None:
    for number in range(3):
        with store.draft(MODEL, Fingerprint({"number": str(number)})) as draft:
            shutil.copytree(original.cache, draft.cache, dirs_exist_ok=True)
            sealed = draft.seal({}, {})
        os.utime(sealed.path / USED, (number, number))  # clocks are coarse
        sealed.release()
    found = store.lookup(MODEL, fingerprint_of(original.manifest)).artifact
    assert found is not None
    found.release()  # the last used, which stays
    store.prune(max_bytes=original.size)


def look_up(store: Store, original: Artifact, remote: str) -> None:
    """Of an artifact that is damaged, which a lookup removes."""
    damaged = store.adopt(original.manifest, fetch_from(original))
    damaged.release()
    min(path for path in damaged.cache.rglob("*") if path.is_file()).write_bytes(b"damaged")
    found = store.lookup(MODEL, fingerprint_of(original.manifest)).artifact
    assert found is not None
    found.release()


def refuse(store: Store, original: Artifact, remote: str) -> None:
    used = store.lookup(MODEL, fingerprint_of(original.manifest)).artifact
    assert used is not None  # which is not to be pruned
    with store.lease(MODEL, OTHER):
        store.remember_refusal(MODEL, OTHER, Refusal("graph breaks", (), {}))
        store.refusal(MODEL, OTHER)
    store.prune(older_than=0, max_bytes=original.size)
    used.release()


def upload(store: Store, original: Artifact, remote: str) -> None:
    Remote(remote, timeout=60.0, public_keys=(), key=PrivateKey.from_environment()).upload(original)


OPERATIONS = {operation.__name__: operation for operation in (seal, adopt, prune, look_up, refuse, upload)}


def operate(name: str, store: str, original: str, remote: str, last: str) -> None:
    """Prints the number of lines that ran in the package's files, and in those of the library that it uses to write.

    Args:
        last: at this line the process is killed; 0: at none.
    """
    found = Store(Path(original)).artifacts()[0]
    tempfile.tempdir = None  # the environment's, which is not that of the process that imported all this
    count = _counting(lambda: OPERATIONS[name](Store(Path(store)), found, remote), int(last))
    print(count, flush=True)


def _counting(work: Callable[[], None], last: int) -> int:
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(_TRACED):
            return None
        if event == "line":
            count += 1
            if count == last:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return count


def fingerprint_of(manifest: Manifest) -> Fingerprint:
    return Fingerprint(manifest.axes, manifest.attributes)


def fetch_from(artifact: Artifact) -> Callable[[FileEntry, Path], None]:
    """What `Store.adopt` is given; files that are alike have one entry."""

    def fetch(entry: FileEntry, path: Path) -> None:
        name = next(name for name, known in artifact.manifest.files.items() if known == entry)
        shutil.copyfile(artifact.path / name, path)

    assert all(name.startswith(CACHE) for name in artifact.manifest.files)
    return fetch
