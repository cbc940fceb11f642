"""The lease of a fingerprint: one process has it, and however that one ends, the others go on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bentoml_compile.artifacts.fingerprint import Fingerprint
from bentoml_compile.artifacts.lease import Lease
from bentoml_compile.artifacts.store import Store
from bentoml_compile.errors import ArtifactRejected
from bentoml_compile.keeping import Keeping
from tests.artifacts.test_store import open_below

FINGERPRINT = Fingerprint({"torch": "2.13.0"})
OTHER = Fingerprint({"torch": "2.12.1"})
DEADLINE = 60.0  # seconds; none of the waits that end by themselves comes near it


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "compile")


def files(store: Store) -> list[Path]:
    return list(store.root.rglob("lease"))


def wait(lease: Lease, seconds: float = DEADLINE) -> str:
    return lease.wait(seconds, say=lambda waited: None)


HOLDER = """
import os, pathlib, subprocess, sys, time
from bentoml_compile.artifacts.fingerprint import Fingerprint
from bentoml_compile.artifacts.store import Store
lease = Store(pathlib.Path(sys.argv[1])).lease("encoder", Fingerprint({"torch": "2.13.0"}))
child = 0
if sys.argv[2] == "fork" and (child := os.fork()) == 0:
    time.sleep(600)
    os._exit(0)
if sys.argv[2] == "compile":
    child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, close_fds=False).pid
print(lease.held, child, flush=True)
sys.stdin.read()  # until it is killed, or told to end by the end of its input
lease.release()
"""


class Holder:
    """A process that has the lease, and perhaps a child."""

    def __init__(self, store: Store, child: str = "none") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(store.root), child],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        held, pid = self.process.stdout.readline().split()
        assert held == "True"
        self.child = int(pid)

    @property
    def pid(self) -> int:
        return self.process.pid

    def close(self) -> None:
        if self.child:
            os.kill(self.child, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def holder(store: Store) -> Iterator[Holder]:
    holder = Holder(store)
    yield holder
    holder.close()


def test_one_process_has_it_and_another_learns_who(store: Store, holder: Holder) -> None:
    lease = store.lease("encoder", FINGERPRINT)
    assert (lease.held, lease.holder) == (False, holder.pid)
    assert wait(lease, 0.2) == "timed_out"


def test_two_fingerprints_or_models_have_a_lease_each(store: Store) -> None:
    leases = [store.lease("encoder", FINGERPRINT), store.lease("encoder", OTHER), store.lease("decoder", FINGERPRINT)]
    assert [lease.held for lease in leases] == [True, True, True]
    assert not store.lease("encoder", FINGERPRINT).held


def test_a_holder_that_is_done_is_no_longer_waited_for(store: Store, holder: Holder) -> None:
    lease = store.lease("encoder", FINGERPRINT)
    assert holder.process.stdin is not None
    holder.process.stdin.close()
    assert wait(lease) == "done"
    assert not lease.held
    assert files(store) == []


@pytest.mark.parametrize("child", ["none", "fork", "compile"])
def test_a_killed_holders_lease_goes_to_one_that_waits(store: Store, child: str) -> None:
    holder = Holder(store, child)
    try:
        lease, another = store.lease("encoder", FINGERPRINT), store.lease("encoder", FINGERPRINT)
        holder.process.kill()
        assert wait(lease) == "died"
        assert (lease.held, lease.holder) == (True, holder.pid)
        assert wait(another, 0.2) == "timed_out"
        assert another.holder == os.getpid()
        lease.release()
        assert wait(another) == "done"
        assert files(store) == []
    finally:
        holder.close()


def test_a_killed_holders_lease_is_free_for_a_later_boot(store: Store, holder: Holder) -> None:
    holder.process.kill()
    holder.process.wait()
    assert store.lease("encoder", FINGERPRINT).held


def test_progress_is_told_while_it_waits(store: Store, holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bentoml_compile.artifacts.lease._SAY_EVERY", 0.0)
    said: list[float] = []

    def say(waited: float) -> None:
        said.append(waited)
        if len(said) == 3:
            assert holder.process.stdin is not None
            holder.process.stdin.close()

    assert store.lease("encoder", FINGERPRINT).wait(DEADLINE, say) == "done"
    assert said == sorted(said)
    assert len(said) >= 3


@pytest.mark.parametrize(("error", "ended"), [(ValueError, "done"), (SystemExit, "died"), (KeyboardInterrupt, "died")])
def test_work_that_fails_is_over_and_work_that_is_cut_short_is_taken_up(
    store: Store, error: type[BaseException], ended: str
) -> None:
    lease, other = store.lease("encoder", FINGERPRINT), store.lease("encoder", FINGERPRINT)
    with contextlib.suppress(error), lease:
        raise error
    assert wait(other) == ended
    assert other.held == (ended == "died")


def test_a_store_that_is_removed_is_not_waited_for(store: Store) -> None:
    lease, other = store.lease("encoder", FINGERPRINT), store.lease("encoder", FINGERPRINT)
    assert lease.held
    store.root.rename(store.root.with_name("away"))
    assert wait(other) == "done"
    another = store.lease("encoder", FINGERPRINT)
    lease.release()
    assert another.held
    assert len(files(store)) == 1


def test_a_lease_that_is_held_is_not_pruned_and_one_of_a_dead_holder_is(store: Store, holder: Holder) -> None:
    store.prune(older_than=0, max_bytes=0)
    assert len(files(store)) == 1
    assert not store.lease("encoder", FINGERPRINT).held
    holder.process.kill()
    holder.process.wait()
    store.prune()
    assert list(store.root.iterdir()) == []


def test_where_the_store_cannot_be_written_there_is_none(store: Store) -> None:
    store.root.write_text("not a directory")
    with pytest.raises(OSError):  # noqa: PT011 its kind depends on the system
        store.lease("encoder", FINGERPRINT)
    store.root.unlink()
    store.root.mkdir()
    store.root.chmod(0o777)
    with pytest.raises(ArtifactRejected, match="chmod"):
        store.lease("encoder", FINGERPRINT)
    kept = Keeping("encoder", FINGERPRINT, store, write=True)
    assert not kept.take_lease()
    assert kept.lease is None


def test_a_boot_whose_result_cannot_be_kept_lets_the_others_go_on_at_once(tmp_path: Path) -> None:
    kept = Keeping("encoder", FINGERPRINT, Store(tmp_path / "a space"), write=True)
    assert kept.take_lease()
    with pytest.raises(ValueError, match="space"):
        kept.open_draft(path_with_space=False)
    assert kept.take_lease()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_no_file_stays_open(store: Store) -> None:
    with store.lease("encoder", FINGERPRINT) as lease:
        assert wait(store.lease("encoder", FINGERPRINT), 0.2) == "timed_out"
        assert lease.held
    assert open_below(store.root) == []
