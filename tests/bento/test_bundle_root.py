"""Where a service's Bento keeps compiled artifacts, by how the service was loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import Forked

SERVICE = """
import bentoml
from bentoml_compile.bento import settings

settings.install()

class Rooted:
    def __init__(self):
        self.root = settings.bundle_root()

Dependency = bentoml.service(type("Dependency", (Rooted,), {"__module__": __name__}))

@bentoml.service
class Entry:
    dependency = bentoml.depends(Dependency)

    def __init__(self):
        self.dependencys = self.dependency.root
        self.root = settings.bundle_root()
"""
AS_A_WORKER = """
import bentoml, sys
from threading import Thread
from bentoml_compile.bento import settings
service = bentoml.load(sys.argv[1], standalone_load=True)
print(service().root)
print(service().dependencys)
bentoml.server_context.service_name = service.name  # as BentoML's worker sets it, before to_asgi
service.to_asgi()
thread = Thread(target=lambda: print(settings.bundle_root()))
thread.start()
thread.join()
"""


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    with Forked("bentoml", "_bentoml_sdk.service", "_bentoml_sdk.decorators", "bentoml_compile.bento.settings") as fork:
        yield fork


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """With the service's module in a package; the directory beside it is where tests start."""
    (tmp_path / "project" / "package").mkdir(parents=True)
    (tmp_path / "project" / "package" / "service.py").write_text(SERVICE)
    (tmp_path / "project" / "bentofile.yaml").write_text("service: package.service:Entry\n")
    (tmp_path / "beside").mkdir()
    return tmp_path / "project"


def roots(forked: Forked, directory: Path, target: str, code: str = AS_A_WORKER, **env: str) -> set[str]:
    environment = {**os.environ, "BENTOML_HOME": str(directory / "home"), "BENTOML_DO_NOT_TRACK": "True", **env}
    done = forked.run(code, directory, target, env=environment)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
    return set(done.stdout.splitlines())


@pytest.mark.parametrize("made", ["compiled", "nowhere"])
def test_it_is_the_working_directorys_for_the_service_and_its_dependency_in_every_thread(
    forked: Forked, project: Path, made: str
) -> None:
    (project / made).mkdir()
    assert roots(forked, project, "package.service:Entry") == {str(project / "compiled")}


def test_it_is_the_folders_that_is_served_from_another_directory(forked: Forked, project: Path) -> None:
    beside = project.parent / "beside"
    (beside / "compiled").mkdir()
    assert roots(forked, beside, str(project)) == {str(project / "compiled")}


def test_it_lies_beside_the_services_module_where_the_working_directory_has_none(forked: Forked, project: Path) -> None:
    (project / "package" / "compiled").mkdir()
    assert roots(forked, project, "package.service:Entry") == {str(project / "package" / "compiled")}
    (project / "compiled").mkdir()
    assert roots(forked, project, "package.service:Entry") == {str(project / "compiled")}


def test_it_lies_beside_a_module_that_is_imported_from_elsewhere(forked: Forked, project: Path) -> None:
    beside = project.parent / "beside"
    (project / "package" / "compiled").mkdir()
    code = f"import sys\nsys.path.append({str(project)!r})\n{AS_A_WORKER}"
    assert roots(forked, beside, "package.service:Entry", code) == {str(project / "package" / "compiled")}


def test_a_working_directory_that_python_does_not_import_from_is_not_looked_into(forked: Forked, project: Path) -> None:
    """Others may write there, e.g. where a script is started in /tmp."""
    beside = project.parent / "beside"
    (beside / "compiled").mkdir()
    code = f"""
import sys
sys.path[:] = [entry for entry in sys.path if entry] + [{str(project)!r}]
from package.service import Dependency, Entry
print(Dependency().root, Entry().root, Entry().dependencys, sep="\\n")
"""
    assert roots(forked, beside, "", code) == {str(project / "package" / "compiled")}


def test_outside_of_a_service_there_is_none(forked: Forked, tmp_path: Path) -> None:
    done = forked.run("from bentoml_compile.bento import settings; print(settings.bundle_root())", tmp_path)
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
