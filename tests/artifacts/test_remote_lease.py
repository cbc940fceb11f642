"""The lease among machines: one has it, and however that one ends, the others go on."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bentoml_compile.artifacts import remote_lease
from bentoml_compile.artifacts.patience import Patience
from bentoml_compile.artifacts.remote_files import RemoteFiles
from bentoml_compile.artifacts.remote_lease import LeaseOf, RemoteLease
from bentoml_compile.artifacts.signing import KEY as ENV
from bentoml_compile.artifacts.signing import PAYLOAD_TYPE, PrivateKey, open_envelope
from bentoml_compile.errors import ConfigError
from tests.artifacts.conftest import make_uri
from tests.artifacts.faulty_proxy import Fault, FaultyProxy
from tests.artifacts.remotes import CREDENTIALS, FINGERPRINT, HANG, KEY, OTHER, STRANGER, poll, remote

PATH = f"encoder/{FINGERPRINT.id}/lease"
OF = LeaseOf("encoder", FINGERPRINT.id)
BRIEF = 1.0  # seconds until a holder counts as dead


def lease_at(
    uri: str, ttl: float = HANG, timeout: float = HANG, key: PrivateKey | None = KEY, patience: float | None = None
) -> RemoteLease:
    """A machine's lease. By default a holder outlives the test, even one whose machine is busy with other tests."""
    files = RemoteFiles(uri, seconds=timeout)
    return RemoteLease(files, PATH, Patience(patience or timeout), of=OF, public_keys=[KEY.public], key=key, ttl=ttl)


def wait(lease: RemoteLease, seconds: float = HANG, found: Callable[[], bool] = lambda: False) -> str:
    return lease.wait(seconds, found=found, say=lambda waited: None)


def content(uri: str) -> bytes | None:
    try:
        return RemoteFiles(uri).read(PATH, 100_000)
    except FileNotFoundError:
        return None


def payload(uri: str) -> Any:
    """What the holder has signed."""
    return json.loads(open_envelope(content(uri) or b"", {KEY.public}, remote_lease.PAYLOAD_TYPE)[0])


def fields(**changed: Any) -> dict[str, Any]:
    same = {"model": OF.model, "fingerprint": OF.fingerprint, "holder": "another", "host": "there", "pid": 7, "beat": 1}
    return {**same, "written": time.time(), **changed}


def signed(key: PrivateKey = KEY, kind: str = remote_lease.PAYLOAD_TYPE, **changed: Any) -> bytes:
    return key.sign(json.dumps(fields(**changed)).encode(), kind)


HOLDER = """
import os, sys
from bentoml_compile.artifacts.signing import PrivateKey
from tests.artifacts.test_remote_lease import lease_at
import tests.artifacts.test_remote_lease as here
here.KEY = PrivateKey.from_environment()
lease = lease_at(sys.argv[1], float(sys.argv[2]), key=here.KEY)
print(lease.take(), flush=True)
sys.stdin.read()  # until it is killed, or told to end by the end of its input
lease.release()
"""


class Holder:
    """A process that has the lease."""

    def __init__(self, uri: str, endpoint: str, ttl: float = BRIEF) -> None:
        environment = {**os.environ, **CREDENTIALS, "FSSPEC_S3_ENDPOINT_URL": endpoint, ENV: KEY.to_pem().decode()}
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, uri, str(ttl)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "True\n"

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture(params=["file", pytest.param("memory", marks=pytest.mark.soak), "s3"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return make_uri(request, tmp_path)


@pytest.fixture(params=["file", "s3"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A remote that processes share."""
    return str(request.getfixturevalue("bucket")) if request.param == "s3" else f"file://{tmp_path}/remote"


@pytest.fixture
def holder(shared: str, s3_server: tuple[str, int]) -> Iterator[Holder]:
    holder = Holder(shared, "http://{}:{}".format(*s3_server))
    yield holder
    holder.close()


def test_one_has_it_and_another_learns_who(uri: str) -> None:
    one, other = lease_at(uri), lease_at(uri)
    assert not other.exists()
    assert one.take()
    assert one.take()
    assert other.exists()
    assert not other.take()
    assert (one.held, other.held) == (True, False)
    assert (other.holder or "").startswith(f"{os.getpid()} on ")
    assert wait(other, 0.2) == "timed_out"
    one.release()
    assert not one.held
    assert content(uri) is None
    assert other.take()
    other.release()


def test_two_fingerprints_or_models_have_a_lease_each(uri: str) -> None:
    machine = remote(uri, key=KEY)
    leases = [machine.lease(*which) for which in (("encoder", FINGERPRINT), ("encoder", OTHER), ("decoder", OTHER))]
    assert [lease.take() for lease in leases] == [True, True, True]
    assert not remote(uri, key=KEY).lease("encoder", FINGERPRINT).take()
    for lease in leases:
        lease.release()


def test_of_many_that_ask_at_once_one_has_it(uri: str) -> None:
    leases = [lease_at(uri) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(RemoteLease.take, leases))
    assert sum(taken) == 1
    assert [lease.held for lease in leases] == taken
    leases[taken.index(True)].release()


@pytest.mark.parametrize("has_links", [True, False], ids=["hard links", "no hard links"])
def test_one_that_is_there_is_not_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    if not has_links:
        monkeypatch.setattr(os, "link", refuse_links)
    files = RemoteFiles(f"file://{tmp_path}/remote")
    files.create(PATH, b"first")
    with pytest.raises(FileExistsError):
        files.create(PATH, b"second")
    assert files.read(PATH, 100) == b"first"
    assert [path.name for path in (tmp_path / "remote" / PATH).parent.iterdir()] == ["lease"]


def refuse_links(source: object, target: object) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted", str(source))  # as vfat says


def test_it_is_seen_whole_or_not_at_all(tmp_path: Path) -> None:
    files, whole = RemoteFiles(f"file://{tmp_path}/remote"), bytes(64 << 20)
    with ThreadPoolExecutor(1) as pool:
        created = pool.submit(files.create, PATH, whole)
        seen = {files.size(PATH)}
        while not created.done():
            seen.add(files.size(PATH))
    created.result()
    assert seen <= {None, len(whole)}
    assert files.size(PATH) == len(whole)


def test_anothers_that_is_still_half_written_is_read_again(tmp_path: Path) -> None:
    """Where a file system cannot do better."""

    class HalfWritten(RemoteFiles):
        reads = iter([None, b"", signed()])

        def read(self, path: str, most: int) -> bytes:
            content = next(self.reads)
            if content is None:
                raise FileNotFoundError(path)
            return content

        def create(self, path: str, content: bytes) -> None:
            raise FileExistsError(path)

    files = HalfWritten(f"file://{tmp_path}/remote")
    lease = RemoteLease(files, PATH, Patience(HANG), of=OF, public_keys=[KEY.public], key=KEY)
    assert not lease.take()
    assert lease.holder == "7 on there"


def test_a_holder_that_is_done_is_no_longer_waited_for(shared: str, holder: Holder) -> None:
    other = lease_at(shared)
    assert not other.take()
    assert (other.holder or "").startswith(f"{holder.process.pid} on ")
    holder.end()
    assert wait(other) == "done"
    assert not other.held


def test_a_killed_holders_lease_goes_to_one_that_waits(
    shared: str, holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Watch(remote_lease._Watch):
        """Soon takes the one that is killed for dead, and no heir that this busy machine does not let write."""

        def is_dead(self, lease: remote_lease._Content, now: float) -> bool:
            self._ttl = BRIEF if lease.pid == holder.process.pid else HANG
            return super().is_dead(lease, now)

    take_over, turn = RemoteLease._take_over, threading.Lock()

    def take_over_in_turn(lease: RemoteLease, dead: remote_lease._Content) -> bool:
        with turn:  # one that is stopped for long between its look and its write would have it, too
            return take_over(lease, dead)

    monkeypatch.setattr(remote_lease, "_Watch", Watch)
    monkeypatch.setattr(RemoteLease, "_take_over", take_over_in_turn)
    others = [lease_at(shared) for _ in range(3)]
    assert [other.take() for other in others] == [False] * 3
    holder.process.kill()
    with ThreadPoolExecutor(3) as pool:
        waits = [pool.submit(wait, other) for other in others]
        poll(lambda: any(other.held for other in others), "nobody has taken it over")
        [heir] = [other for other in others if other.held]
        assert waits[others.index(heir)].result() == "died"
        assert [other.held for other in others].count(True) == 1
        assert payload(shared)["pid"] == os.getpid()
        heir.release()
        ended = [waited.result() for waited in waits]
    assert sorted(ended) == ["died", "done", "done"]


def test_of_two_that_take_it_over_at_once_one_has_it(tmp_path: Path) -> None:
    both = threading.Barrier(2)

    class Together(RemoteFiles):
        """Each has looked before either writes, and each has written before either looks again."""

        def write(self, path: str, content: bytes) -> None:
            both.wait(HANG)
            super().write(path, content)
            both.wait(HANG)

    uri = f"file://{tmp_path}/remote"
    RemoteFiles(uri).write(PATH, signed(written=time.time() - 960.0))
    leases = [lease_at(uri, ttl=10 * HANG) for _ in range(2)]
    for lease in leases:
        lease._files = Together(uri)
    with ThreadPoolExecutor(2) as pool:
        taken = list(pool.map(RemoteLease.take, leases))
    assert sorted(taken) == [False, True]
    assert [lease.held for lease in leases] == taken
    leases[taken.index(True)].release()
    assert content(uri) is None


def test_one_that_has_not_asked_for_it_does_not_take_it_over(shared: str, holder: Holder) -> None:
    other = lease_at(shared, BRIEF)
    assert other.exists()
    holder.process.kill()
    assert wait(other) == "died"
    assert not other.held


def test_a_holder_keeps_rewriting_it_and_stops_when_it_is_done(uri: str) -> None:
    lease = lease_at(uri, BRIEF)
    assert lease.take()
    first = content(uri)
    poll(lambda: content(uri) not in (first, None, b""), "not rewritten")
    lease.release()
    assert content(uri) is None


def test_a_holder_that_was_taken_for_dead_leaves_anothers_lease_alone(uri: str) -> None:
    lease, others = lease_at(uri, BRIEF), signed()
    assert lease.take()
    with lease._rewriting:
        RemoteFiles(uri).write(PATH, others)
    poll(lambda: not lease.held, "still thinks that it has it")
    lease.release()
    assert content(uri) == others


def test_a_holder_puts_its_lease_back_where_it_was_spoiled(uri: str) -> None:
    lease = lease_at(uri, BRIEF)
    assert lease.take()
    with lease._rewriting:
        RemoteFiles(uri).write(PATH, b"x")
    poll(lambda: lease_at(uri).exists(), "not put back")
    assert lease.held
    lease.release()
    assert content(uri) is None


def test_a_lease_says_whose_it_is_and_when_it_was_written(uri: str) -> None:
    lease = lease_at(uri)
    before = time.time()
    assert lease.take()
    said = payload(uri)
    assert set(said) == set(fields())
    assert (said["model"], said["fingerprint"], said["pid"]) == ("encoder", FINGERPRINT.id, os.getpid())
    assert before <= said["written"] <= time.time()
    lease.release()


@pytest.mark.parametrize("key", [None, KEY], ids=["without a key", "with a key"])
@pytest.mark.parametrize("ahead", [-840.0, 0.0, 4e9])
def test_a_lease_whose_clock_is_a_little_behind_or_ahead_is_waited_for(
    tmp_path: Path, ahead: float, key: PrivateKey | None
) -> None:
    uri = f"file://{tmp_path}/remote"
    RemoteFiles(uri).write(PATH, signed(written=time.time() + ahead))
    other = lease_at(uri, key=key)
    assert other.exists()
    assert key is None or not other.take()
    assert wait(other, 0.2) == "timed_out"
    assert other.holder == "7 on there"


def test_a_lease_that_was_written_long_ago_is_nobodys(uri: str) -> None:
    """And what a killed builder has left is not watched, for which a test would run out of time."""
    left = signed(written=time.time() - 960.0)
    RemoteFiles(uri).write(PATH, left)
    watching, taking = lease_at(uri, ttl=10 * HANG, key=None), lease_at(uri)
    assert not watching.exists()
    assert wait(watching) == "died"
    assert content(uri) == left
    assert taking.take()
    assert wait(watching, 0.2) == "timed_out"
    taking.release()


def test_one_that_waits_takes_a_lease_that_was_written_long_ago(uri: str) -> None:
    RemoteFiles(uri).write(PATH, signed())
    lease = lease_at(uri, ttl=10 * HANG)
    assert not lease.take()
    RemoteFiles(uri).write(PATH, signed(written=time.time() - 960.0))
    assert wait(lease) == "died"
    assert lease.held
    lease.release()


def test_only_seconds_that_were_observed_count() -> None:
    looks = [(1, 0.0), (1, 9.0), (2, 18.0), (2, 27.0), (2, 36.0), (2, 10_000.0), (2, 10_003.0)]
    assert watched([("a", beat, now) for beat, now in looks]) == [False] * 6 + [True]


def test_what_was_there_before_keeps_no_lease_alive() -> None:
    """Of the same holder's beats only a higher one counts, and another holder's only the first time."""
    growing = [("a", beat, 10.0 * beat) for beat in range(9)]
    assert not any(watched(growing))
    replayed = [("a", 5, 0.0), ("a", 4, 10.0), ("a", 5, 20.0), ("a", 3, 30.0)]
    assert watched(replayed) == [False] * 3 + [True]
    in_turn = [("a", 1, 0.0), ("b", 1, 10.0), ("a", 2, 20.0), ("b", 2, 30.0), ("a", 3, 40.0)]
    assert watched(in_turn) == [False] * 4 + [True]
    followed = [("a", 1, 0.0), ("a", 1, 10.0), ("b", 1, 20.0), ("b", 1, 30.0), ("b", 2, 40.0), ("b", 2, 50.0)]
    assert not any(watched(followed))


def watched(looks: list[tuple[str, int, float]]) -> list[bool]:
    """Whether the holder counts as dead, at each look: a holder, its beat and the time."""
    watch = remote_lease._Watch(30.0)
    return [
        watch.is_dead(remote_lease._Content(**fields(holder=holder, beat=beat)), now) for holder, beat, now in looks
    ]


def test_a_lease_that_is_put_back_again_and_again_ends_a_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can write at the remote, and signs nothing, does not hold a boot."""
    monkeypatch.setattr(remote_lease, "_LONGEST_POLL", 0.5)  # it may take twenty looks to have seen all four
    uri = f"file://{tmp_path}/remote"
    old = [signed(holder=name, beat=beat) for beat in (1, 2) for name in ("one", "two")]
    files, stopped = RemoteFiles(uri), threading.Event()
    files.write(PATH, old[0])
    lease = lease_at(uri, BRIEF)
    assert not lease.take()

    def put_back() -> None:
        while not stopped.is_set():
            for envelope in old:
                files.write(PATH, envelope)

    attacker = threading.Thread(target=put_back)
    attacker.start()
    ended = wait(lease)
    stopped.set()
    attacker.join()
    assert ended in ("done", "died")
    lease.release()


def test_what_is_found_ends_the_wait(uri: str) -> None:
    lease, other = lease_at(uri), lease_at(uri)
    assert lease.take()
    looks = iter((False, False, True))
    assert wait(other, found=lambda: next(looks)) == "done"
    assert other.exists()
    lease.release()


def test_the_artifact_is_looked_for_once_more_when_the_holder_is_done(uri: str) -> None:
    looks = iter((False,))
    assert wait(lease_at(uri), found=lambda: next(looks)) == "done"
    assert next(looks, None) is None


def test_progress_is_told_while_it_waits(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bentoml_compile.artifacts.lease._SAY_EVERY", 0.0)
    lease, said = lease_at(uri), list[float]()
    assert lease.take()

    def say(waited: float) -> None:
        said.append(waited)
        if len(said) == 2:
            lease.release()

    assert lease_at(uri).wait(HANG, found=lambda: False, say=say) == "done"
    assert said == sorted(said)
    assert len(said) >= 2


@pytest.mark.parametrize(("error", "is_left"), [(ValueError, False), (SystemExit, True), (KeyboardInterrupt, True)])
def test_work_that_fails_is_over_and_work_that_is_cut_short_is_taken_up(
    uri: str, error: type[BaseException], is_left: bool
) -> None:
    lease, other = lease_at(uri, BRIEF), lease_at(uri, BRIEF)
    assert lease.take()
    assert not other.take()
    with contextlib.suppress(error), lease:
        raise error
    assert not lease.held
    assert wait(other) == ("died" if is_left else "done")
    assert other.held == is_left
    other.release()


UNSIGNED = {
    "empty": b"",
    "pickle": b"\x80\x04",
    "list": b"[]",
    "cut": b"{",
    "deep": b"[" * 4000,
    "long": b"x" * 100_000,
}
FOREIGN = {
    "unsigned": json.dumps(fields()).encode(),
    "stranger": signed(STRANGER),
    "a manifest's type": signed(kind=PAYLOAD_TYPE),
    "a manifest's type renamed": signed(kind=PAYLOAD_TYPE).replace(b".manifest+", b".lease+"),
    "another model": signed(model="decoder"),
    "another fingerprint": signed(fingerprint=OTHER.id),
    "a field of another kind": signed(pid="7"),
    "no date": signed(written=float("nan")),
}


def lefts() -> Iterator[Any]:
    """One of each kind on S3, where an empty file is read in another way."""
    for name, left in {**UNSIGNED, **FOREIGN}.items():
        yield pytest.param("file", left, id=f"file-{name}")
        yield pytest.param("s3", left, id=f"s3-{name}", marks=[] if name in ("empty", "stranger") else pytest.mark.soak)


@pytest.mark.parametrize(("uri", "left"), lefts(), indirect=["uri"])
def test_what_no_listed_key_signed_for_this_is_not_there_and_is_overwritten(uri: str, left: bytes) -> None:
    RemoteFiles(uri).write(PATH, left)
    lease, watching = lease_at(uri), lease_at(uri, key=None)
    assert not watching.exists()
    assert wait(watching) == "done"
    assert watching.holder is None
    assert lease.take()
    assert payload(uri)["pid"] == os.getpid()
    lease.release()
    assert content(uri) is None


@pytest.mark.parametrize("key", [None, STRANGER], ids=["no key", "a key that is not listed"])
def test_it_is_observed_and_not_taken_without_a_listed_key(uri: str, key: PrivateKey | None) -> None:
    holder, other = lease_at(uri), lease_at(uri, BRIEF, key=key)
    with pytest.raises(ConfigError, match="public_keys"):
        other.take()
    assert content(uri) is None
    assert holder.take()
    assert other.exists()
    holder.abandon()
    assert wait(other) == "died"
    assert not other.held
    assert payload(uri)["holder"] == holder._id


@pytest.mark.parametrize("kind", ["reset", "403", "500", "truncate", "silence"])
def test_a_remote_that_fails_gives_no_lease_and_ends_a_wait(bucket: str, proxy: FaultyProxy, kind: str) -> None:
    # the holder does not write meanwhile, which might hang; and with all at its best nobody is in a hurry
    holder, other = lease_at(bucket, ttl=10 * HANG), lease_at(bucket, timeout=2.0, patience=HANG)
    assert holder.take()
    assert not other.take()
    other._patience.seconds = 2.0
    proxy.fault = Fault(kind, bytes=5)
    with pytest.raises(Exception, match=r"\w"):
        lease_at(bucket, timeout=2.0).take()
    assert wait(other) == "done"
    assert other.failure
    proxy.fault = None
    holder.release()
    assert content(bucket) is None


def test_a_moments_fault_does_not_end_a_wait(bucket: str, proxy: FaultyProxy) -> None:
    holder, other = lease_at(bucket), lease_at(bucket)
    assert holder.take()
    proxy.fault = Fault("403", when="GET", times=2)
    looks = iter((False, True))
    assert wait(other, found=lambda: next(looks)) == "done"
    assert next(looks, None) is None
    assert proxy.fault.times == 0
    proxy.fault = None
    holder.release()


def test_an_answer_that_gets_lost_does_not_lose_the_lease(bucket: str, proxy: FaultyProxy) -> None:
    proxy.fault = Fault("truncate", when=f"PUT \\S+{PATH}", bytes=60)  # after two times "100 Continue"
    lease = lease_at(bucket)
    assert lease.take()
    proxy.fault = None
    lease.release()
    assert content(bucket) is None


def test_a_lease_that_came_too_late_is_given_back(bucket: str, proxy: FaultyProxy) -> None:
    slow, given_up = lease_at(bucket, patience=0.1), threading.Event()

    class Slow(RemoteFiles):
        def create(self, path: str, content: bytes) -> None:
            given_up.wait(HANG)
            super().create(path, content)

    slow._files = Slow(bucket)
    with pytest.raises(TimeoutError):
        slow.take()
    given_up.set()
    poll(lambda: any(line.startswith("DELETE") for line in proxy.requests), "not given back")
    poll(lambda: content(bucket) is None, "still there")
    assert not slow.held


def test_a_forked_child_neither_has_nor_removes_its_parents_lease(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/remote"
    lease = lease_at(uri)
    assert lease.take()
    if (child := os.fork()) == 0:
        held = lease.held
        lease.release()
        os._exit(int(held))
    assert os.waitpid(child, 0)[1] == 0
    assert lease.held
    assert content(uri) is not None
    lease.release()


def test_no_thread_is_left(uri: str) -> None:
    before = threading.active_count()
    lease = lease_at(uri)
    assert lease.take()
    lease.release()
    poll(lambda: threading.active_count() <= before + (1 if uri.startswith("s3") else 0), "a thread goes on")
