"""Remotes of several kinds, empty for each test; the bucket's server speaks S3's protocol."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import fsspec.config
import pytest
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer

from bentoml_compile.artifacts.store import Store
from tests.artifacts.faulty_proxy import FaultyProxy
from tests.artifacts.remotes import CREDENTIALS, asking, poll


@pytest.fixture(scope="session")
def s3_server() -> Iterator[tuple[str, int]]:
    put, alone = S3Response.put_object, threading.Lock()

    def put_alone(response: S3Response) -> Any:
        """As S3 does: moto looks whether there is one, and then writes."""
        with alone:
            return put(response)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S3Response, "put_object", put_alone)
        server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        server.start()
        yield server.get_host_and_port()
        server.stop()


@pytest.fixture
def proxy(s3_server: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Between this process and the server of `bucket`."""
    before = asking()
    with FaultyProxy(*s3_server) as proxy:
        for name, value in CREDENTIALS.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": proxy.url})
        yield proxy
    # what was given up goes on, and would find the next test's proxy if it has not opened this one's yet
    poll(lambda: asking() <= before, "the remote is still asked")


@pytest.fixture
def bucket(s3_server: tuple[str, int], proxy: FaultyProxy) -> str:
    """The URI of a folder in a new bucket."""
    name = f"bucket-{secrets.token_hex(4)}"
    boto3.client("s3", endpoint_url="http://{}:{}".format(*s3_server)).create_bucket(Bucket=name)
    return f"s3://{name}/models"


@pytest.fixture(params=["file", "memory", "s3"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return make_uri(request, tmp_path)


def make_uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A remote of the kind that the fixture's parameter says."""
    if request.param == "s3":
        return str(request.getfixturevalue("bucket"))
    return f"file://{tmp_path}/remote" if request.param == "file" else f"memory://{secrets.token_hex(4)}"


@pytest.fixture
def here(tmp_path: Path) -> Store:
    """The store of a machine that has nothing yet."""
    return Store(tmp_path / "here")


@pytest.fixture
def there(tmp_path: Path) -> Store:
    """The store of the machine that compiles."""
    return Store(tmp_path / "there")
