"""A remote on a bad day: whatever it does, a look-up ends in time with a reason, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bentoml_compile.artifacts.blobs import Blobs
from bentoml_compile.artifacts.remote_files import RemoteFiles
from bentoml_compile.artifacts.store import Store
from tests.artifacts.faulty_proxy import Fault, FaultyProxy
from tests.artifacts.remotes import (
    CREDENTIALS,
    FINGERPRINT,
    HANG,
    KEY,
    asking,
    content,
    is_empty,
    make,
    poll,
    reasons,
    remote,
)

LISTING, ENVELOPE, BLOB = r"GET \S+list-type=2", r"GET \S+\.json", r"GET \S+/blobs/"
REASONS = {
    "reset": r"closed|reset|disconnected|Could not connect",
    "403": "access denied: a bad day",
    "404": "not found: a bad day",
    "500": "a bad day",
    "503": "a bad day",
    "truncate": r"[Rr]ead|payload|Payload|closed|parse|incomplete|received",
}


@pytest.fixture
def uploaded(bucket: str, there: Store) -> str:
    remote(bucket, key=KEY).upload(make(there))
    return bucket


@pytest.mark.parametrize("when", [LISTING, ENVELOPE, BLOB], ids=["listing", "envelope", "blob"])
@pytest.mark.parametrize("kind", REASONS)
def test_a_fault_is_a_reason_and_when_it_is_over_the_artifact_is_found(
    uploaded: str, here: Store, proxy: FaultyProxy, kind: str, when: str
) -> None:
    proxy.fault = Fault(kind, when=when, bytes=100 if when == LISTING else 700)
    [reason] = reasons(uploaded, here)
    assert re.search(REASONS[kind], reason), reason
    assert is_empty(here)
    proxy.fault = None
    assert remote(uploaded).lookup("encoder", FINGERPRINT, here).artifact is not None


@pytest.mark.parametrize("when", [LISTING, ENVELOPE, BLOB], ids=["listing", "envelope", "blob"])
@pytest.mark.parametrize("kind", ["reset", "500"])
def test_one_fault_is_got_over(uploaded: str, here: Store, proxy: FaultyProxy, kind: str, when: str) -> None:
    proxy.fault = Fault(kind, when=when, times=1)
    assert remote(uploaded).lookup("encoder", FINGERPRINT, here).artifact is not None
    assert proxy.fault.times == 0


def test_a_slow_remote_is_waited_for(uploaded: str, here: Store, proxy: FaultyProxy) -> None:
    proxy.fault = Fault("latency", seconds=0.3)
    assert remote(uploaded).lookup("encoder", FINGERPRINT, here).artifact is not None


@pytest.mark.parametrize("when", [LISTING, ENVELOPE, BLOB], ids=["listing", "envelope", "blob"])
@pytest.mark.parametrize("fault", [Fault("silence"), Fault("latency", seconds=20.0)], ids=["silent", "slow"])
def test_a_remote_that_does_not_answer_is_not_asked_again(
    uploaded: str, here: Store, proxy: FaultyProxy, fault: Fault, when: str
) -> None:
    proxy.fault = Fault(fault.kind, when=when, seconds=fault.seconds)
    looking, before = remote(uploaded, timeout=1.0, key=KEY), asking()
    started = time.monotonic()
    found = looking.lookup("encoder", FINGERPRINT, here)
    assert time.monotonic() - started < HANG
    assert found.artifact is None
    assert found.rejected[-1].reason == looking.gave_up != ""
    poll(lambda: asking() <= before, "what was begun goes on")
    assert is_empty(here)
    asked = len(proxy.requests)
    assert looking.lookup("encoder", FINGERPRINT, here).rejected[-1].reason == looking.gave_up
    with pytest.raises(TimeoutError):
        looking.lease("encoder", FINGERPRINT).take()
    assert len(proxy.requests) == asked


@pytest.mark.parametrize("fault", ["403", "reset", "silence"])
def test_an_address_where_nobody_listens_or_all_is_forbidden(
    bucket: str, here: Store, proxy: FaultyProxy, fault: str
) -> None:
    proxy.fault = Fault(fault)
    assert len(remote(bucket, timeout=2.0).lookup("encoder", FINGERPRINT, here).rejected) == 1


def test_a_bucket_that_is_not_there_is_named(bucket: str, here: Store) -> None:
    [reason] = reasons("s3://no-such-bucket/models", here)
    assert "not found: The specified bucket does not exist" in reason


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    """A file whose reader waits for a writer."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    yield path
    with contextlib.suppress(OSError):  # so that the reader ends; there is none if the time was up before
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))


def test_a_file_system_that_knows_no_time_out_is_left_alone(
    here: Store, there: Store, tmp_path: Path, pipe: Path
) -> None:
    uri, made = f"file://{tmp_path}/remote", make(there)
    remote(uri, key=KEY).upload(made)
    blob = tmp_path / "remote" / "blobs" / made.manifest.files["cache/2/model.so"].sha256
    blob.unlink()
    blob.symlink_to(pipe)
    looking = remote(uri, timeout=0.5)
    assert looking.lookup("encoder", FINGERPRINT, here).rejected[-1].reason == looking.gave_up != ""


def test_what_nobody_waits_for_any_longer_is_not_fetched(there: Store, tmp_path: Path) -> None:
    uri, made = f"file://{tmp_path}/remote", make(there)
    remote(uri, key=KEY).upload(made)
    entry = made.manifest.files["cache/2/model.so"]
    with pytest.raises(TimeoutError):
        Blobs(RemoteFiles(uri), [entry], lambda: True).fetch(entry, tmp_path / "fetched")


def test_an_upload_that_breaks_off_is_not_found_and_goes_on_where_it_was(
    bucket: str, here: Store, there: Store, proxy: FaultyProxy
) -> None:
    made = make(there)
    proxy.fault = Fault("403", when=r"PUT \S+\.json")
    with pytest.raises(PermissionError):
        remote(bucket, key=KEY).upload(made)
    assert reasons(bucket, here) == []
    proxy.fault, before = None, len(proxy.requests)
    remote(bucket, key=KEY).upload(made)
    assert len([line for line in proxy.requests[before:] if line.startswith("PUT")]) == 1
    found = remote(bucket).lookup("encoder", FINGERPRINT, here).artifact
    assert found is not None
    assert content(found) == content(made)


@pytest.mark.parametrize("kind", ["reset", "403", "truncate"])
def test_an_upload_that_fails_raises(bucket: str, there: Store, proxy: FaultyProxy, kind: str) -> None:
    proxy.fault = Fault(kind, when="PUT|HEAD", bytes=10)
    with pytest.raises(Exception, match=r"\w"):
        remote(bucket, key=KEY).upload(make(there))


PROCESS = """
import pathlib, sys
from tests.artifacts.remotes import FINGERPRINT, KEY, make, remote
from bentoml_compile.artifacts.store import Store
from bentoml_compile.artifacts.uploads import uploads
uri, root = sys.argv[1:]
looking = remote(uri, timeout=1.0)
looking.lookup("encoder", FINGERPRINT, Store(pathlib.Path(root) / "here"))
uploads.add(remote(uri, key=KEY), make(Store(pathlib.Path(root) / "there")))
print(bool(looking.gave_up), uploads.wait(0.5))
"""


def test_a_process_ends_while_the_remote_is_silent(bucket: str, proxy: FaultyProxy, tmp_path: Path) -> None:
    proxy.fault = Fault("silence")
    environment = {**os.environ, **CREDENTIALS, "FSSPEC_S3_ENDPOINT_URL": proxy.url}
    process = subprocess.run(
        [sys.executable, "-c", PROCESS, bucket, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=2 * HANG,  # s3fs alone would try for longer
    )
    assert (process.returncode, process.stdout) == (0, "True False\n"), process.stderr
