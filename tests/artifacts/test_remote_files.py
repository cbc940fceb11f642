"""File systems that say things in their own words: as adlfs and gcsfs were found to, on a server of their kind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import fsspec
import pytest

from bentoml_compile.artifacts.remote_files import RemoteFiles
from bentoml_compile.artifacts.store import Store
from bentoml_compile.artifacts.uploads import Uploads
from bentoml_compile.doctor import shared
from tests.artifacts.remotes import HANG, KEY, make, reasons, remote

URI = "worded://bucket/models"
AZURE = "The specified thing is not so.\nRequestId:1f\nContent: <?xml version='1.0'?>\n<Error/>"


class ResourceNotFoundError(Exception):
    """azure.core's, which adlfs does not name as its error's cause."""


class HttpResponseError(Exception):
    """azure.core's."""

    def __init__(self, status: int) -> None:
        super().__init__(AZURE)
        self.status_code = status


class HttpError(Exception):
    """gcsfs's."""

    def __init__(self, code: int) -> None:
        super().__init__(f"Anonymous caller does not have storage.objects.list access, {code}")
        self.code = code


class Worded(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """Fails in the words of the test."""

    protocol = "worded"
    error: Callable[[], Exception]

    def _fail(self, *args: object, **kwargs: object) -> NoReturn:
        raise Worded.error()

    ls = info = cat_file = pipe_file = put_file = rm_file = _fail


Failing = Callable[[Callable[[], Exception]], None]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    """Has the remote at URI fail with an error."""
    fsspec.register_implementation("worded", Worded, clobber=True)

    def fail(error: Callable[[], Exception]) -> None:
        monkeypatch.setattr(Worded, "error", staticmethod(error), raising=False)

    return fail


def adlfs_has_no_bucket() -> Exception:
    try:
        try:
            raise ResourceNotFoundError(AZURE)
        except ResourceNotFoundError:
            raise FileNotFoundError(2, "No such file or directory", "bucket/models/encoder")  # noqa: B904
    except FileNotFoundError as error:
        return error


def gcsfs_has_no_bucket() -> Exception:
    return FileNotFoundError("b/bucket/o")


NO_BUCKET = pytest.mark.parametrize("error", [adlfs_has_no_bucket, gcsfs_has_no_bucket], ids=["adlfs", "gcsfs"])
DENIED = pytest.mark.parametrize(
    "error",
    [
        lambda: HttpResponseError(401),
        lambda: HttpResponseError(403),
        lambda: HttpError(401),
        lambda: OSError("Forbidden: b/bucket/o\nsomebody@example.com does not have storage.objects.list access"),
    ],
    ids=["azure 401", "azure 403", "gcsfs 401", "gcsfs 403"],
)


@NO_BUCKET
def test_a_bucket_that_is_not_there_is_named(error: Callable[[], Exception], failing: Failing, here: Store) -> None:
    failing(error)
    assert reasons(URI, here) == ["not found: The specified bucket does not exist: bucket"]
    [finding] = shared.remote(URI, seconds=HANG, writes=False)
    assert "there is no such bucket" in finding.text


@pytest.mark.parametrize("words", ["bucket/models/encoder", "b/bucket/o/models%2Fencoder", "b/another/o"])
def test_a_directory_that_is_not_there_is_empty(words: str, failing: Failing) -> None:
    failing(lambda: FileNotFoundError(words))
    assert RemoteFiles(URI).list("encoder") == []


@DENIED
def test_what_is_forbidden_is_said_to_be(error: Callable[[], Exception], failing: Failing, here: Store) -> None:
    files = RemoteFiles(URI)
    failing(error)
    asked: list[Callable[[], object]] = [
        lambda: files.list(""),
        lambda: files.directories(""),
        lambda: files.size("a"),
        lambda: files.read("a", 10),
        lambda: files.write("a", b""),
        lambda: files.create("b", b""),
        lambda: files.put("a", Path(__file__)),
        lambda: files.remove("a"),
    ]
    for ask in asked:
        with pytest.raises(PermissionError) as raised:
            ask()
        assert "\n" not in str(raised.value)
    [reason] = reasons(URI, here)
    assert reason.startswith("access denied: ")
    [finding] = shared.remote(URI, seconds=HANG, writes=False)
    assert "let these credentials read and list" in finding.fix


def test_another_error_stays_what_it_is_and_is_told_in_one_line(
    failing: Failing, here: Store, there: Store, caplog: pytest.LogCaptureFixture
) -> None:
    failing(lambda: HttpResponseError(409))
    [reason] = reasons(URI, here)
    assert reason == f"HttpResponseError: {' '.join(AZURE.split())}"
    uploads, told = Uploads(attempts=1), list[Exception | None]()
    uploads.add(remote(URI, key=KEY), make(there), told.append)
    assert uploads.wait(HANG)
    assert [type(error) for error in told] == [HttpResponseError]
    [warning] = [record.getMessage() for record in caplog.records if "not uploaded" in record.getMessage()]
    assert warning.endswith(reason)


def test_a_file_system_that_lacks_a_package_of_its_own_is_a_config_error() -> None:
    """fsspec's words for that are those for a missing gcsfs."""
    code = "import sys; sys.modules['paramiko'] = None\n"
    code += "from bentoml_compile.artifacts.remote import Remote; Remote('sftp://host/a', timeout=1.0, public_keys=[])"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ConfigError: artifacts.remote: the file system for sftp:// fails: import of paramiko" in process.stderr
