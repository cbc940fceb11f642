"""Forked processes that run what is in killed.py, each with a directory for temporary files of its own."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bentoml_compile.artifacts.bundle import Bundle
from bentoml_compile.artifacts.store import Store
from tests.forked import Child, Forked

CONFIG: dict[str, Any] = {"keep_eager_if_slower": False}


@dataclass
class Processes:
    """Their files lie in `directory`."""

    forked: Forked
    directory: Path
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.temporary = self.directory / "tmp"
        self.temporary.mkdir()
        self.env = {**os.environ, "TMPDIR": str(self.temporary)}
        self.env.pop("TORCHINDUCTOR_CACHE_DIR", None)

    def start(self, function: str, *arguments: object) -> Child:
        code = f"import sys; from tests.artifacts.killed import {function}; {function}(*sys.argv[1:])"
        return self.forked.start(code, self.directory, *map(str, arguments), env=self.env)

    def boot(self, store: Store, config: dict[str, Any] = CONFIG, bundle: Bundle | None = None) -> str:
        """Its outcome; the result is right."""
        child = self.start("boot", store.root, json.dumps(config), *([bundle.root] if bundle is not None else []))
        assert self.forked.wait(child) == 0, child.errors.read_text()
        result = json.loads(child.output.read_text())
        assert result["is_right"]
        return str(result["outcome"])
