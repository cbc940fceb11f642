"""pack: a service's artifacts into `compiled/`, and boots elsewhere that load them from there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bentoml_compile.artifacts.axes import Fingerprint
from bentoml_compile.artifacts.bundle import Bundle
from bentoml_compile.artifacts.store import Store
from tests.cli.conftest import Project

OTHER = Fingerprint({"torch": "2.12.1"})
FOREIGN = Fingerprint({"torch": "2.11.0"})


def make(store: Store, fingerprint: Fingerprint, **sealed: object) -> None:
    with store.draft("tiny", fingerprint) as draft:
        (draft.cache / "kernel.so").write_bytes(b"\x7fELF")
        draft.seal(**{"decisions": {}, "sources": {}, "engine": "aot", **sealed}).release()  # type: ignore[arg-type]


def packed(project: Project) -> list[str]:
    return sorted(artifact.fingerprint for artifact in Bundle(project.folder / "compiled").artifacts())


def own(project: Project) -> str:
    found = Store(project.store).artifacts()
    return next(each.fingerprint for each in found if each.model == "tiny" and len(each.axes) > 1)


def test_what_was_packed_is_loaded_elsewhere_without_a_store_or_a_compiler(project: Project, tmp_path: Path) -> None:
    done = project.run("pack", "service:Entry")
    assert done.returncode == 0, done.stderr
    assert f"packed: compiled/tiny/{own(project)}/" in done.stdout
    assert done.stdout.splitlines()[-1] == '  - "/compiled/**"'

    elsewhere = project.copied(tmp_path / "elsewhere")
    assert not elsewhere.store.exists()
    booted = elsewhere.run("warm", "service:Entry", "--json", PATH="/nowhere", CXX="")
    assert booted.returncode == 0, booted.stderr
    [report] = json.loads(booted.stdout)
    assert (report["outcome"], report["engine"], report["rejected"]) == ("loaded", "aot", [])
    assert not Store(elsewhere.store).artifacts()


def test_a_bento_whose_artifact_was_altered_is_passed_over_with_the_reason(project: Project) -> None:
    assert project.run("pack", "service:Entry").returncode == 0
    [library] = project.folder.glob("compiled/**/*.so")
    library.write_bytes(library.read_bytes()[:-1])
    done = project.run("warm", "service:Entry", "--json")
    [report] = json.loads(done.stdout)
    assert report["outcome"] == "loaded"  # from the store
    [rejection] = report["rejected"]
    assert rejection["artifact"].startswith(f"compiled/tiny/{own(project)}/")
    assert f"bytes instead of {library.stat().st_size + 1}" in rejection["reason"]


def test_packing_again_without_the_store_keeps_what_is_there(project: Project) -> None:
    assert project.run("pack", "service:Entry").returncode == 0
    before = packed(project)
    shutil.rmtree(project.folder / "home")
    done = project.run("pack", "service:Entry")
    assert done.returncode == 0, done.stderr
    assert "tiny  loaded  aot" in done.stdout
    assert packed(project) == before


def test_what_other_machines_have_packed_is_kept(project: Project) -> None:
    make(store := Store(project.folder / "other"), OTHER)
    [artifact] = store.artifacts()
    Bundle(project.folder / "compiled").add(artifact)
    assert project.run("pack", "service:Entry").returncode == 0
    assert packed(project) == sorted([own(project), OTHER.id])


def test_all_takes_other_fingerprints_of_the_same_models_that_can_travel(project: Project) -> None:
    store = Store(project.store)
    make(store, OTHER)
    make(store, FOREIGN, engine="jit")
    with store.draft("another", OTHER) as draft:
        draft.seal({}, {}, "aot").release()
    assert project.run("pack", "service:Entry").returncode == 0
    assert packed(project) == [own(project)]
    done = project.run("pack", "service:Entry", "--all")
    assert done.returncode == 0, done.stderr
    assert packed(project) == sorted([own(project), OTHER.id])
    assert f"passed over: {FOREIGN.id}: made by engine 'jit'" in done.stdout


def test_a_model_that_cannot_travel_is_status_1_and_the_others_are_packed(project: Project) -> None:
    done = project.run("pack", "service:Mixed")
    assert done.returncode == 1, done.stderr
    assert packed(project) == [own(project)]
    assert "not packed: it is served eagerly" in done.stdout
    assert "not packed: made by engine 'jit'; only 'aot' artifacts leave the machine" in done.stdout


def test_a_model_that_was_not_stored_cannot_be_packed(project: Project) -> None:
    done = project.run("pack", "service:Unkept")
    assert done.returncode == 1, done.stderr
    assert "not packed: its artifact was not kept" in done.stdout
    assert "include" not in done.stdout


@pytest.mark.parametrize("target", ["service:Entry", "."])
def test_another_folder_is_said_to_be_none_that_a_boot_looks_into(project: Project, target: str) -> None:
    (project.folder / "bentofile.yaml").write_text("service: service:Entry\n")
    done = project.run("pack", target, "--into", "away")
    assert done.returncode == 0, done.stderr
    assert [artifact.model for artifact in Bundle(project.folder / "away").artifacts()] == ["tiny"]
    assert f"A boot looks into {project.folder / 'compiled'}" in done.stdout
    assert not (project.folder / "compiled").exists()


def test_a_built_bento_carries_what_is_packed_for_its_tag(project: Project) -> None:
    build = 'bentoml.build("service:Entry", include=["service.py"], python={"lock_packages": False})'
    built = project.python(f"import bentoml, sys; sys.stderr.write(str({build}.tag))")
    assert built.returncode == 0, built.stderr
    tag = built.stderr.splitlines()[-1]
    done = project.run("pack", tag)
    assert done.returncode == 0, done.stderr
    inside = project.folder / "home" / "bentos" / tag.replace(":", "/") / "src" / "compiled"
    assert [artifact.model for artifact in Bundle(inside).artifacts()] == ["tiny"]
    assert f"The Bento {tag} now carries it, in {inside};" in done.stdout
    assert "include" not in done.stdout
    booted = project.run("warm", tag, "--json")
    [report] = json.loads(booted.stdout)
    assert (report["outcome"], report["place"]) == ("loaded", "bento")


def test_a_folder_that_cannot_be_written_is_status_2(project: Project) -> None:
    (project.folder / "compiled").mkdir()
    (project.folder / "compiled" / "tiny").write_text("in the way")
    done = project.run("pack", "service:Entry")
    assert done.returncode == 2
    assert f"{project.folder / 'compiled'} cannot be written" in done.stderr


def test_a_service_that_cannot_be_made_is_status_2(project: Project) -> None:
    done = project.run("pack", "service:Crash")
    assert done.returncode == 2
    assert "no weights" in done.stderr
    assert not (project.folder / "compiled").exists()
