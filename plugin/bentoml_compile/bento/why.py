"""Which stored artifacts a service's models would load, and why not the others. Nothing is compiled or changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from bentoml_compile.artifacts.axes import Fingerprint
from bentoml_compile.artifacts.bundle import Bundle
from bentoml_compile.artifacts.folder import Folder, newest_first, read_whole
from bentoml_compile.artifacts.hashing import hash_sources
from bentoml_compile.artifacts.manifest import Manifest, check_permissions, permission_problem, read_manifest
from bentoml_compile.artifacts.remote import Remote
from bentoml_compile.artifacts.remote_files import check_installed
from bentoml_compile.artifacts.remote_listing import Stored
from bentoml_compile.artifacts.signing import PublicKey
from bentoml_compile.artifacts.store import Store
from bentoml_compile.bento import settings
from bentoml_compile.bento.live import Worker
from bentoml_compile.bento.warm import ask
from bentoml_compile.errors import ArtifactRejected
from bentoml_compile.model import Inspected, inspecting

_PATIENCE = 60.0  # seconds with the remote, whose artifacts that fit are read; who asks has more than a boot


@dataclass(frozen=True, slots=True)
class Verdict:
    """Attributes:
    artifact: where it lies, below its place.
    fingerprint, engine, created, size: empty and None where its manifest cannot be read.
    reasons: why it is passed over: each axis that differs, what changed, what is damaged; empty: it fits.
    signature: whose it is; empty where none is needed.
    """

    artifact: str
    reasons: tuple[str, ...]
    fingerprint: str = ""
    engine: str = ""
    created: datetime | None = None
    size: int = 0
    signature: str = ""

    @property
    def fits(self) -> bool:
        return not self.reasons


@dataclass(frozen=True, slots=True)
class Place:
    """Attributes:
    name: "Bento", "store" or "remote", in the order in which a boot asks them.
    root: its path or URI.
    problem: why nothing of it can be loaded; empty if something could.
    """

    name: str
    root: str
    verdicts: tuple[Verdict, ...]
    problem: str = ""

    @property
    def fits(self) -> bool:
        return not self.problem and any(verdict.fits for verdict in self.verdicts)


@dataclass(frozen=True, slots=True)
class Explained:
    """Attributes:
    notes: what keeps a boot from looking or loading, whatever is stored.
    """

    model: str
    fingerprint: str
    places: tuple[Place, ...]
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return any(place.fits for place in self.places)


@dataclass(frozen=True, slots=True)
class OfWorker:
    """Attributes:
    models: in the order of its `compile_model` calls.
    dependencies: the names by which the services that it depends on are asked about.
    """

    models: tuple[Explained, ...]
    dependencies: tuple[str, ...]


def why(target: str) -> list[OfWorker]:
    """Make a service as its workers would, without compiling, and judge what is stored for each of its models.

    Args:
        target: what `bentoml serve` takes: "service:Name", a Bento's tag or a folder.

    Returns:
        One entry; of a legacy service, one for each runner and the API.

    Raises:
        As `warm`.
    """
    return ask(target, _of_worker)


def _of_worker(worker: Worker) -> OfWorker:
    with inspecting() as found:
        root, dependencies = worker.warm(lambda warmed: (warmed.bundle, warmed.dependencies))
    return OfWorker(tuple(_explained(model, root) for model in found), dependencies)


def _explained(model: Inspected, bundle: Path | None) -> Explained:
    artifacts = model.config.artifacts
    store = Store(artifacts.store or settings.bentoml_home() / "compile")
    places = [_store(store, model)]
    if bundle is not None:
        places.insert(0, _bundle(Bundle(bundle), model))
    if artifacts.remote is not None:
        places.append(_remote(artifacts.remote, model))
    return Explained(model.name, model.fingerprint.id, tuple(places), tuple(_notes(model, store)))


def _notes(model: Inspected, store: Store) -> Iterator[str]:
    if not model.config.enabled:
        yield "compiling is switched off (enabled: false, or TORCH_COMPILE_DISABLE=1): nothing is loaded"
    if model.config.artifacts.refresh:
        yield "artifacts.refresh is true: every boot compiles, whatever is stored"
    if model.config.fullgraph == "require" and store.refusal(model.name, model.fingerprint) is not None:
        yield "fullgraph is 'require', and a graph break has stopped an earlier boot: so it does until a source changes"


def _bundle(bundle: Bundle, model: Inspected) -> Place:
    refused = {item.artifact: item.reason for item in bundle.lookup(model.name, model.fingerprint).rejected}

    def check(attempt: Path) -> None:
        if (reason := refused.get(bundle.label(attempt))) is not None:
            raise ArtifactRejected(reason)
        read_whole(attempt, model.name, model.fingerprint)

    return Place("Bento", str(bundle.root), tuple(_judged(bundle, model, check)))


def _store(store: Store, model: Inspected) -> Place:
    """By the steps of `Store.lookup`, which removes what is damaged."""

    def check(attempt: Path) -> None:
        check_permissions(attempt)
        read_whole(attempt, model.name, model.fingerprint)

    own = store.directory(model.name, model.fingerprint.id)
    try:
        verdicts = tuple(_judged(store, model, check))
        problems = [permission_problem(path, path.stat()) for path in (store.root, own.parent, own) if path.exists()]
    except OSError as error:
        return Place("store", str(store.root), (), f"it cannot be read: {error.strerror}")
    return Place("store", str(store.root), verdicts, next(filter(None, problems), ""))


def _remote(uri: str, model: Inspected) -> Place:
    if not model.config.may_export:
        return Place("remote", uri, (), "it is not asked: this config is for torch.compile, whose code does not travel")
    try:
        check_installed(uri)
        keys = [PublicKey.parse(text) for text in model.config.artifacts.public_keys]
        seconds = max(model.config.artifacts.remote_timeout, _PATIENCE)
        remote = Remote(uri, timeout=seconds, public_keys=keys)
        stored = remote.stored(model.name, model.fingerprint)
    except Exception as error:  # of any kind, as the file system likes
        return Place("remote", uri, (), f"it cannot be read: {' '.join(str(error).split()) or type(error).__name__}")
    problem = "" if keys else "artifacts.public_keys is empty, so nobody is trusted"
    return Place("remote", remote.uri, tuple(_of_remote(each, model.fingerprint) for each in stored), problem)


def _of_remote(stored: Stored, fingerprint: Fingerprint) -> Verdict:
    manifest = stored.manifest
    reasons = [stored.problem] if stored.problem else []
    if manifest is None:
        return Verdict(stored.path, tuple(reasons), stored.fingerprint, signature=stored.signature)
    reasons += reasons_against(manifest, fingerprint)
    return Verdict(
        stored.path,
        tuple(reasons),
        manifest.fingerprint,
        manifest.engine,
        manifest.created,
        manifest.size,
        stored.signature,
    )


def _judged(folder: Folder, model: Inspected, check: Callable[[Path], None]) -> Iterator[Verdict]:
    """Of each artifact of the model, those of its fingerprint first.

    Args:
        check: of one with this fingerprint, whatever else is to be right; raises ArtifactRejected or OSError.
    """
    own = folder.directory(model.name, model.fingerprint.id)
    others = sorted(path for path in own.parent.glob("*") if path.is_dir() and not path.is_symlink() and path != own)
    for directory in (own, *others):
        for attempt in newest_first(directory):
            yield _verdict(folder.label(attempt), attempt, model.fingerprint, check)


def _verdict(label: str, attempt: Path, fingerprint: Fingerprint, check: Callable[[Path], None]) -> Verdict:
    try:
        manifest = read_manifest(attempt)
    except FileNotFoundError:
        return Verdict(label, ("incomplete: it is being written, or its writer is gone",), attempt.parent.name)
    except (ArtifactRejected, OSError) as error:
        return Verdict(label, (str(error),), attempt.parent.name)
    reasons = reasons_against(manifest, fingerprint)
    if not reasons:
        try:
            check(attempt)
        except (ArtifactRejected, OSError) as error:
            reasons = [str(error)]
    return Verdict(label, tuple(reasons), manifest.fingerprint, manifest.engine, manifest.created, manifest.size)


def reasons_against(manifest: Manifest, fingerprint: Fingerprint) -> list[str]:
    """Each axis that differs, and each source that changed."""
    now = hash_sources(manifest.sources)
    changed = [source for source, known in manifest.sources.items() if now.get(source, known) != known]
    return [
        *fingerprint.differences(manifest.axes, manifest.attributes),
        *(f"source changed: {source}" for source in changed),
    ]
