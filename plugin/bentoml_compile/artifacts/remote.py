"""Artifacts at a place that machines share: an fsspec URI, whose writers are not trusted.

    <uri>/blobs/<sha256>                                            a file of an artifact, by its content
    <uri>/<model>/<fingerprint>/<sha256 of the envelope>.json       its manifest, signed (signing.py), written last
    <uri>/<model>/<fingerprint>/lease                               who compiles it, signed (remote_lease.py)

Nothing of an envelope is parsed before its signature is checked, and nothing is fetched before its manifest fits. What
is fetched is compared with the signed hashes as it is written, into a draft of this machine's own store.

    remote = Remote("s3://bucket/models", timeout=5.0, public_keys=[PublicKey.parse("ed25519:...")])
    found = remote.lookup("encoder", fingerprint, store)
    uploads.add(Remote("s3://bucket/models", timeout=5.0, public_keys=[], key=PrivateKey.new()), artifact)
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from bentoml_compile.artifacts.artifact import Artifact
from bentoml_compile.artifacts.axes import Fingerprint
from bentoml_compile.artifacts.blobs import BLOBS, Blobs, path_of, problem_of
from bentoml_compile.artifacts.folder import Lookup, refuse_changed_sources, slug
from bentoml_compile.artifacts.hashing import file_hash
from bentoml_compile.artifacts.manifest import Damaged, FileEntry, Manifest, check_portable, parse_manifest
from bentoml_compile.artifacts.patience import Patience
from bentoml_compile.artifacts.remote_files import Listed, RemoteFiles
from bentoml_compile.artifacts.remote_lease import LeaseOf, RemoteLease
from bentoml_compile.artifacts.remote_listing import ENVELOPE, Stored, newest, stored_at
from bentoml_compile.artifacts.signing import MAX_ENVELOPE, PrivateKey, PublicKey, open_envelope
from bentoml_compile.artifacts.store import Store
from bentoml_compile.artifacts.uploads import Uploads, uploads
from bentoml_compile.errors import ArtifactRejected, ConfigError
from bentoml_compile.report import Rejection
from bentoml_compile.words import one_line

__all__ = ["Remote", "Uploads", "uploads"]

_MOST_WORDS = 500  # characters


class Remote:
    """One boot's view of a remote.

    Args:
        uri: as fsspec takes it.
        timeout: seconds for all of the boot's look-ups and leases together; a wait for another's lease begins anew.
        public_keys: whose signatures count.
        key: signs what is uploaded; None: nothing is.

    Attributes:
        uri: without a password.

    Raises:
        ConfigError: a package is missing, or fsspec knows no file system for the URI.
    """

    def __init__(
        self, uri: str, *, timeout: float, public_keys: Collection[PublicKey], key: PrivateKey | None = None
    ) -> None:
        self._files = RemoteFiles(uri, seconds=timeout)
        self._uploading = RemoteFiles(uri)
        self._keys = tuple(public_keys)
        self._key = key
        self._patience = Patience(timeout, uri)
        self._refused: dict[str, str] = {}  # envelopes by name: what they say does not change
        self.uri = self._files.uri

    @property
    def gave_up(self) -> str:
        """Why the remote is not asked any more in this boot; empty while it is."""
        return self._patience.gave_up

    def lookup(self, model: str, fingerprint: Fingerprint, store: Store) -> Lookup:
        """Find an artifact that fits in every respect, and copy it into the store.

        Returns:
            The copy, held. Whatever goes wrong is a rejection with its reason, never an exception.
        """
        rejected: list[Rejection] = []

        def find(is_abandoned: Callable[[], bool]) -> Lookup:
            return self._find(model, fingerprint, store, rejected, is_abandoned)

        try:
            return self._patience.call(find, _release)
        except Exception as error:
            return Lookup(None, (*rejected, Rejection(self.uri, _words(error))))

    def stored(self, model: str, fingerprint: Fingerprint) -> list[Stored]:
        """The newest artifacts of a model, those of the fingerprint first, whoever signed them.

        Raises:
            TimeoutError: that takes too long. Others, as the file system likes.
        """
        return self._patience.call(lambda is_abandoned: list(stored_at(self._files, model, fingerprint, self._keys)))

    def lease(self, model: str, fingerprint: Fingerprint) -> RemoteLease:
        """The right to compile this fingerprint, not asked for yet; without a key it can only be observed."""
        path = f"{_directory(model, fingerprint.id)}/lease"
        of = LeaseOf(model, fingerprint.id)
        return RemoteLease(self._files, path, self._patience, of=of, public_keys=self._keys, key=self._key)

    def upload(self, artifact: Artifact) -> bool:
        """Put an artifact there, or what of it is missing or damaged; its manifest last. Blocks as long as it takes.

        Args:
            artifact: held until this is over.

        Returns:
            Whether anything had to be put there.

        Raises:
            ConfigError: there is no key.
            ArtifactRejected: it is not of a kind that travels, or a file is not what its manifest says.
            OSError and others, as the file system likes.
        """
        manifest = artifact.manifest
        check_portable(manifest)
        path, envelope = self._envelope(manifest)
        blobs = {entry.sha256: (name, entry) for name, entry in manifest.files.items()}
        sent = [self._upload_blob(artifact.path / name, entry) for name, entry in blobs.values()]
        if self._uploading.size(path) != len(envelope):
            self._uploading.write(path, envelope)
        elif not any(sent):
            return False
        for directory in (BLOBS, _directory(manifest.model, manifest.fingerprint)):
            self._uploading.sweep(directory)
        return True

    def _find(
        self,
        model: str,
        fingerprint: Fingerprint,
        store: Store,
        rejected: list[Rejection],
        is_abandoned: Callable[[], bool],
    ) -> Lookup:
        """Also fills `rejected`, for who has given it up."""
        directory = _directory(model, fingerprint.id)
        for listed in newest(self._files, directory):
            path = f"{directory}/{listed.name}"
            try:
                if path in self._refused:
                    raise ArtifactRejected(self._refused[path])
                manifest = self._manifest(path, listed, model, fingerprint)
                fetch = Blobs(self._files, manifest.files.values(), is_abandoned).fetch
                return Lookup(store.adopt(manifest, fetch), tuple(rejected))
            except Exception as error:  # of any kind: a manifest can name sources of any name
                self._remember(path, error)
                rejected.append(Rejection(path, _words(error)))
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    return Lookup(None, tuple(rejected), no_room=True)
                if is_abandoned():
                    break
        return Lookup(None, tuple(rejected))

    def _manifest(self, path: str, listed: Listed, model: str, fingerprint: Fingerprint) -> Manifest:
        """What a listed key has signed, and fits here."""
        if listed.size > MAX_ENVELOPE:
            raise ArtifactRejected(f"an envelope of {listed.size} bytes; the most is {MAX_ENVELOPE}")
        envelope = self._files.read(path, MAX_ENVELOPE)
        payload, _ = open_envelope(envelope, self._keys)
        manifest = parse_manifest(_parsed(payload))
        if (manifest.model, manifest.fingerprint) != (model, fingerprint.id):
            raise ArtifactRejected(f"made for {manifest.model!r} {manifest.fingerprint}, and put here")
        check_portable(manifest)
        refuse_changed_sources(manifest.sources)
        return manifest

    def _remember(self, path: str, error: Exception) -> None:
        if isinstance(error, ArtifactRejected) and not isinstance(error, Damaged):
            self._refused[path] = str(error)

    def _envelope(self, manifest: Manifest) -> tuple[str, bytes]:
        """Where the manifest goes, and as what: the same for the same manifest and key."""
        if self._key is None:
            raise ConfigError(f"{self.uri}: nothing is uploaded without a key; see `bentoml-compile keys new`")
        envelope = self._key.sign(json.dumps(manifest.model_dump(mode="json")).encode())
        name = f"{hashlib.sha256(envelope).hexdigest()}{ENVELOPE}"
        return f"{_directory(manifest.model, manifest.fingerprint)}/{name}", envelope

    def _upload_blob(self, source: Path, entry: FileEntry) -> bool:
        if not problem_of(self._uploading, entry):
            return False
        if file_hash(source) != entry.sha256:
            raise ArtifactRejected(f"{source} was altered; remove its artifact and compile again")
        self._uploading.put(path_of(entry), source)
        return True


def _release(found: Lookup) -> None:
    if found.artifact is not None:
        found.artifact.release()


def _directory(model: str, fingerprint: str) -> str:
    return f"{slug(model)}/{fingerprint}"


def _parsed(payload: bytes) -> dict[str, Any]:
    try:
        content = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"its manifest is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise Damaged("its manifest is no JSON object")
    return content


def _words(error: Exception) -> str:
    if isinstance(error, (ArtifactRejected, ConfigError, TimeoutError)) and str(error):
        return str(error)
    text = one_line(error, _MOST_WORDS)  # Azure's errors have many lines
    if isinstance(error, FileNotFoundError):
        return f"not found: {text}"
    if isinstance(error, PermissionError):
        return f"access denied: {text}"
    return f"{type(error).__name__}: {text}"
