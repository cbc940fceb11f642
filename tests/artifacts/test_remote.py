"""A remote: what one machine uploads another finds, whatever lies beside it."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bentoml_compile.artifacts.hashing import hash_sources
from bentoml_compile.artifacts.manifest import FileEntry, Manifest
from bentoml_compile.artifacts.remote_files import RemoteFiles
from bentoml_compile.artifacts.store import Artifact, Store
from bentoml_compile.errors import ArtifactRejected, ConfigError
from tests.artifacts.faulty_proxy import FaultyProxy
from tests.artifacts.remotes import (
    CREDENTIALS,
    FILES,
    FINGERPRINT,
    KEY,
    OTHER,
    content,
    is_empty,
    make,
    reasons,
    remote,
)

DIRECTORY = f"encoder/{FINGERPRINT.id}"


def test_an_empty_remote_rejects_nothing(uri: str, here: Store) -> None:
    assert reasons(uri, here) == []
    assert is_empty(here)


def test_what_was_uploaded_is_found_by_another_machine_and_copied(uri: str, here: Store, there: Store) -> None:
    made = make(there)
    remote(uri, key=KEY).upload(made)
    found = remote(uri).lookup("encoder", FINGERPRINT, here).artifact
    assert found is not None
    assert found.manifest == made.manifest
    assert content(found) == FILES
    assert here.root in found.path.parents
    assert here.prune(max_bytes=0) == []  # it is held
    found.release()
    again = here.lookup("encoder", FINGERPRINT).artifact
    assert again is not None
    assert again.path == found.path


def test_another_fingerprint_or_model_is_not_found(uri: str, here: Store, there: Store) -> None:
    remote(uri, key=KEY).upload(make(there))
    assert reasons(uri, here, OTHER) == []
    assert reasons(uri, here, model="decoder") == []


def test_a_file_of_several_requests_arrives_whole(
    uri: str, here: Store, there: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bentoml_compile.artifacts.blobs._PIECE", 1000)
    monkeypatch.setattr("bentoml_compile.artifacts.blobs._AT_A_TIME", 3000)
    files = {f"{size}": os.urandom(size) for size in (0, 1, 999, 1000, 1001, 2000, 54_321)}
    remote(uri, key=KEY).upload(make(there, files=files))
    found = remote(uri).lookup("encoder", FINGERPRINT, here).artifact
    assert found is not None
    assert content(found) == files


def test_nothing_is_uploaded_twice(bucket: str, there: Store, proxy: FaultyProxy) -> None:
    made, builder = make(there), remote(bucket, key=KEY)
    assert builder.upload(made)
    assert not builder.upload(made)
    # two files are the same; the envelope last
    puts = [line for line in proxy.requests if line.startswith("PUT")]
    assert ["/blobs/" in line for line in puts] == [True, True, True, False]
    remote(bucket, key=KEY).upload(made)
    assert [line for line in proxy.requests if line.startswith("PUT")] == puts
    builder.upload(make(there))  # the same files in another artifact
    assert len([line for line in proxy.requests if line.startswith("PUT")]) == len(puts) + 1


def test_without_a_key_nothing_is_uploaded(uri: str, there: Store) -> None:
    with pytest.raises(ConfigError, match="keys new"):
        remote(uri).upload(make(there))
    assert RemoteFiles(uri).list("blobs") == []


def test_only_what_travels_and_is_unaltered_is_uploaded(uri: str, there: Store) -> None:
    with pytest.raises(ArtifactRejected, match="only 'aot'"):
        remote(uri, key=KEY).upload(make(there, engine="jit"))
    altered = make(there)
    (altered.cache / "1/package.json").write_bytes(b"[]")
    with pytest.raises(ArtifactRejected, match="altered"):
        remote(uri, key=KEY).upload(altered)
    assert RemoteFiles(uri).list(DIRECTORY) == []


def test_an_edited_source_is_a_miss_that_names_it(uri: str, here: Store, there: Store, tmp_path: Path) -> None:
    source = tmp_path / "model.py"
    source.write_text("SCALE = 1")
    remote(uri, key=KEY).upload(make(there, sources=hash_sources([str(source)])))
    source.write_text("SCALE = 2")
    assert reasons(uri, here) == [f"source changed: {source}"]
    assert is_empty(here)


def test_the_newest_that_fits_is_taken_and_the_others_are_explained(here: Store, there: Store, tmp_path: Path) -> None:
    uri, builder = f"file://{tmp_path}/remote", remote(f"file://{tmp_path}/remote", key=KEY)
    made = [make(there, files={"a": str(number).encode()}) for number in range(3)]
    for age, artifact in zip((20, 30, 10), made, strict=True):
        before = set((tmp_path / "remote" / DIRECTORY).glob("*.json"))
        builder.upload(artifact)
        [envelope] = set((tmp_path / "remote" / DIRECTORY).glob("*.json")) - before
        os.utime(envelope, (time.time() - age,) * 2)
    (tmp_path / "remote" / DIRECTORY / f"{0:064x}.json").write_text("{}")
    found = remote(uri).lookup("encoder", FINGERPRINT, here)
    assert found.artifact is not None
    assert found.artifact.manifest == made[2].manifest
    assert [rejection.artifact for rejection in found.rejected] == [f"{DIRECTORY}/{0:064x}.json"]


def test_of_many_envelopes_only_a_few_are_read(bucket: str, here: Store, proxy: FaultyProxy) -> None:
    files = RemoteFiles(bucket)
    for number in range(30):
        files.write(f"{DIRECTORY}/{number:064x}.json", b"{}")
    looking = remote(bucket)
    assert len(looking.lookup("encoder", FINGERPRINT, here).rejected) == 20
    before = len(proxy.requests)
    assert len(looking.lookup("encoder", FINGERPRINT, here).rejected) == 20
    assert len(proxy.requests) == before + 1  # what was refused is not read again


def test_a_local_store_that_cannot_be_written_is_a_rejection(uri: str, tmp_path: Path, there: Store) -> None:
    remote(uri, key=KEY).upload(make(there))
    (tmp_path / "file").touch()
    [reason] = reasons(uri, Store(tmp_path / "file"))
    assert "FileExistsError" in reason or "NotADirectoryError" in reason


@pytest.mark.parametrize("harm", ["altered", "missing"])
def test_a_blob_that_is_no_longer_right_is_uploaded_again(uri: str, here: Store, there: Store, harm: str) -> None:
    made = make(there)
    assert remote(uri, key=KEY).upload(made)
    entry, files = made.manifest.files["cache/1/model.so"], RemoteFiles(uri)
    blob = f"blobs/{entry.sha256}"
    files.write(blob, b"x" * entry.size) if harm == "altered" else files.remove(blob)
    assert remote(uri).lookup("encoder", FINGERPRINT, here).artifact is None
    assert is_empty(here)
    assert remote(uri, key=KEY).upload(made)  # by a process that has not looked
    assert remote(uri).lookup("encoder", FINGERPRINT, here).artifact is not None
    assert not remote(uri, key=KEY).upload(made)


def test_a_local_writer_that_was_killed_leaves_nothing_that_grows(there: Store, tmp_path: Path) -> None:
    (tmp_path / "remote" / "blobs").mkdir(parents=True)
    old, new = (tmp_path / "remote" / "blobs" / f".{name}.tmp" for name in ("old", "new"))
    for path in (old, new):
        path.touch()
    os.utime(old, (time.time() - 100_000,) * 2)
    remote(f"file://{tmp_path}/remote", key=KEY).upload(make(there))
    assert not old.exists()
    assert new.exists()


def test_a_folder_that_somebody_has_emptied_is_swept(tmp_path: Path) -> None:
    (tmp_path / "remote" / "blobs").mkdir(parents=True)
    RemoteFiles(f"file://{tmp_path}/remote").sweep("blobs")


def test_a_file_of_the_future_does_not_make_those_that_are_being_written_old(there: Store, tmp_path: Path) -> None:
    blobs = tmp_path / "remote" / "blobs"
    blobs.mkdir(parents=True)
    for name in (".new.tmp", "future"):
        (blobs / name).touch()
    os.utime(blobs / "future", (time.time() + 200_000,) * 2)
    remote(f"file://{tmp_path}/remote", key=KEY).upload(make(there))
    assert (blobs / ".new.tmp").exists()


@pytest.mark.parametrize("name", ["x\nINFO loaded\x1b[2J", "0" * 64 + "\n", "A" * 64, "0" * 63])
def test_a_name_that_no_envelope_has_is_not_looked_at(tmp_path: Path, here: Store, name: str) -> None:
    (tmp_path / "remote" / DIRECTORY).mkdir(parents=True)
    (tmp_path / "remote" / DIRECTORY / f"{name}.json").write_text("{}")
    assert reasons(f"file://{tmp_path}/remote", here) == []


def test_a_web_server_that_tells_no_sizes_is_a_remote(tmp_path: Path, here: Store, there: Store) -> None:
    pytest.importorskip("aiohttp")
    made = make(there)
    remote(f"file://{tmp_path}/remote", key=KEY).upload(made)
    serve = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "remote"))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = remote(f"http://127.0.0.1:{server.server_port}").lookup("encoder", FINGERPRINT, here)
        server.shutdown()
    assert not [rejection for rejection in found.rejected if "TypeError" in rejection.reason]


def race(uri: str, store: Path) -> subprocess.Popen[str]:
    code = "from tests.artifacts import test_remote as t; import sys; t.upload_often(*sys.argv[1:])"
    return subprocess.Popen([sys.executable, "-c", code, uri, str(store)], stdout=subprocess.PIPE, text=True)


def upload_often(uri: str, store: str) -> None:
    for _ in range(20):
        remote(uri, key=KEY).upload(make(Store(Path(store))))


def test_many_processes_may_write_the_same_blobs_at_once(tmp_path: Path, here: Store) -> None:
    uri = f"file://{tmp_path}/remote"
    writers = [race(uri, tmp_path / str(number)) for number in range(2)]
    assert [writer.wait() for writer in writers] == [0, 0]
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.close()
    files = [path for path in (tmp_path / "remote").rglob("*") if path.is_file()]
    assert len(files) == 3 + 2 * 20
    assert len(reasons(uri, here)) == 20  # each process has made a key of its own
    assert {path.read_bytes() for path in (tmp_path / "remote" / "blobs").iterdir()} == set(FILES.values())


LOOK = """
import json, pathlib, sys
from bentoml_compile.artifacts.remote import Remote
from bentoml_compile.artifacts.signing import PublicKey
from bentoml_compile.artifacts.store import Store
from bentoml_compile.artifacts.axes import Fingerprint
remote = Remote(sys.argv[1], timeout=60.0, public_keys=[PublicKey.parse(sys.argv[2])])
found = remote.lookup("encoder", Fingerprint(json.loads(sys.argv[4])), Store(pathlib.Path(sys.argv[3])))
print(found.artifact is not None, [rejection.reason for rejection in found.rejected])
"""


def look(uri: str, store: Store, code: str = LOOK, **environment: str) -> str:
    arguments = [uri, str(KEY.public), str(store.root), json.dumps(FINGERPRINT.axes)]
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def test_the_endpoint_may_stand_in_the_environment(
    bucket: str, here: Store, there: Store, s3_server: tuple[str, int]
) -> None:
    remote(bucket, key=KEY).upload(make(there))
    url = "http://{}:{}".format(*s3_server)
    assert look(bucket, here, FSSPEC_S3_ENDPOINT_URL=url, **CREDENTIALS) == "True []"


FORK = """
import os
assert found.artifact is not None
if child := os.fork():
    sys.exit(os.waitpid(child, 0)[1])
found = remote.lookup("encoder", Fingerprint(json.loads(sys.argv[4])), Store(pathlib.Path(sys.argv[3]) / "child"))
print(found.artifact is not None, [rejection.reason for rejection in found.rejected])
"""


def test_a_forked_process_has_connections_of_its_own(
    bucket: str, here: Store, there: Store, s3_server: tuple[str, int]
) -> None:
    remote(bucket, key=KEY).upload(make(there))
    url = "http://{}:{}".format(*s3_server)
    code = LOOK[: LOOK.rindex("print(")] + FORK
    assert look(bucket, here, code, FSSPEC_S3_ENDPOINT_URL=url, **CREDENTIALS) == "True []"


@pytest.mark.parametrize(
    ("missing", "uri", "command"),
    [
        ("fsspec", "s3://bucket", r"pip install 'bentoml-compile\[remote\]'"),
        ("cryptography", "s3://bucket", r"pip install 'bentoml-compile\[remote\]'"),
        ("s3fs", "s3://bucket", r"pip install 'bentoml-compile\[s3\]'"),
        ("gcsfs", "gs://bucket", "pip install gcsfs"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(missing: str, uri: str, command: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None\n"
    code += f"from bentoml_compile.artifacts.remote import Remote; Remote({uri!r}, timeout=1.0, public_keys=[])"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ConfigError" in process.stderr
    assert re.search(command, process.stderr)


def test_a_scheme_that_no_file_system_has_is_an_error() -> None:
    with pytest.raises(ConfigError, match="nowhere://"):
        remote("nowhere://bucket")


def test_a_password_in_the_uri_is_not_shown() -> None:
    assert remote("ftp://me:secret@host/folder").uri == "ftp://me:***@host/folder"


def test_a_file_is_written_where_no_link_leads(uri: str, here: Store, there: Store, tmp_path: Path) -> None:
    class Planted(Store):
        """A store in which somebody is faster than the one who fetches."""

        def adopt(self, manifest: Manifest, fetch: Callable[[FileEntry, Path], None]) -> Artifact:
            def planted(entry: FileEntry, path: Path) -> None:
                path.symlink_to(victim)
                fetch(entry, path)

            return super().adopt(manifest, planted)

    victim = tmp_path / "victim"
    victim.write_text("mine")
    remote(uri, key=KEY).upload(make(there))
    assert "FileExistsError" in reasons(uri, Planted(here.root))[0]
    assert victim.read_text() == "mine"
    assert is_empty(here)
