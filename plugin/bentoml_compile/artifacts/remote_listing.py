"""What lies at a remote for a model, whoever put it there: the envelopes for boots, all about them for people."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from bentoml_compile.artifacts.axes import Fingerprint
from bentoml_compile.artifacts.blobs import problem_of
from bentoml_compile.artifacts.folder import slug
from bentoml_compile.artifacts.manifest import FileEntry, Manifest, check_portable, parse_manifest
from bentoml_compile.artifacts.remote_files import Listed, RemoteFiles
from bentoml_compile.artifacts.signing import MAX_ENVELOPE, PublicKey, open_envelope
from bentoml_compile.errors import ArtifactRejected

ENVELOPE = ".json"
MOST_FINGERPRINTS = 50  # that people are told of, the one that is asked for first
MOST_ENVELOPES = 20  # of the one that is asked for, the newest first
MOST_OTHERS = 5  # of each other one

# no other name reaches a log or a terminal
_ENVELOPE_NAME = re.compile(r"[0-9a-f]{64}\.json")
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Stored:
    """An artifact at a remote.

    Attributes:
        path: its envelope's.
        fingerprint: by its place; the manifest's is the one that counts.
        manifest: None where no listed key has signed it: nothing of it is then read.
        signature: whose it is, in words.
        problem: why it cannot be loaded anywhere; empty if nothing is known against it.
    """

    path: str
    fingerprint: str
    manifest: Manifest | None
    signature: str
    problem: str = ""


def newest(files: RemoteFiles, directory: str, most: int = MOST_ENVELOPES) -> list[Listed]:
    """The envelopes of one fingerprint, the newest first."""
    found = [listed for listed in files.list(directory) if _ENVELOPE_NAME.fullmatch(listed.name)]
    return sorted(found, key=lambda listed: (listed.modified, listed.name), reverse=True)[:most]


def stored_at(
    files: RemoteFiles, model: str, fingerprint: Fingerprint, keys: Collection[PublicKey]
) -> Iterator[Stored]:
    """The newest artifacts of a model, those of the fingerprint first; of these, whether their files are whole.

    Raises:
        OSError and others, as the file system likes.
    """
    names = filter(_FINGERPRINT.fullmatch, files.directories(slug(model)))
    known: dict[FileEntry, str] = {}
    for name in sorted(names, key=lambda name: (name != fingerprint.id, name))[:MOST_FINGERPRINTS]:
        directory = f"{slug(model)}/{name}"
        for envelope in newest(files, directory, MOST_ENVELOPES if name == fingerprint.id else MOST_OTHERS):
            stored = _opened(files, f"{directory}/{envelope.name}", name, envelope, keys)
            yield _with_files(files, stored, model, fingerprint, known)


def _opened(files: RemoteFiles, path: str, fingerprint: str, envelope: Listed, keys: Collection[PublicKey]) -> Stored:
    if envelope.size > MAX_ENVELOPE:
        return Stored(path, fingerprint, None, "not read", f"an envelope of {envelope.size} bytes")
    content = files.read(path, MAX_ENVELOPE)
    try:
        payload, key = open_envelope(content, keys)
    except ArtifactRejected as error:
        return Stored(path, fingerprint, None, _claimed(content), str(error))
    try:
        manifest = parse_manifest(json.loads(payload))
        check_portable(manifest)
    except (ArtifactRejected, ValueError, AttributeError) as error:
        return Stored(path, fingerprint, None, f"signed by {key}", str(error))
    return Stored(path, fingerprint, manifest, f"signed by {key}")


def _claimed(envelope: bytes) -> str:
    """Whose signature it is, though that key is not listed."""
    try:
        signatures = json.loads(envelope)["signatures"][:16]
        if not signatures:
            return "not signed"
        keys = {PublicKey.parse(signature["keyid"]) for signature in signatures}
        _, key = open_envelope(envelope, keys)
    except (ArtifactRejected, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "not signed by a key that it names"
    return f"signed by {key}, which artifacts.public_keys does not list"


def _with_files(
    files: RemoteFiles, stored: Stored, model: str, fingerprint: Fingerprint, known: dict[FileEntry, str]
) -> Stored:
    """Args:
    known: of each file that was read, its problem; artifacts may share files.
    """
    manifest = stored.manifest
    if manifest is None:
        return stored
    if (manifest.model, manifest.fingerprint) != (model, stored.fingerprint):
        problem = f"made for {manifest.model!r} {manifest.fingerprint}, and put here"
        return Stored(stored.path, stored.fingerprint, manifest, stored.signature, problem)
    if manifest.fingerprint == fingerprint.id:
        for entry in manifest.files.values():
            if entry not in known:
                known[entry] = problem_of(files, entry)
            if known[entry]:
                return Stored(stored.path, stored.fingerprint, manifest, stored.signature, known[entry])
    return stored
