"""One of the workers of test_lease.py: `main(STORE, GATE, MODEL, CONFIG)`, in a process of its own.

Prints each stage of its boot as it begins and "sees PID" for each holder that it waits for, waits in "compile" until
the file GATE is there, and prints at last what came of it, in JSON.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from bentoml_compile.artifacts.lease import Lease
from bentoml_compile.errors import GraphBreakError
from bentoml_compile.listener import Listener, Stage
from bentoml_compile.model import compile_model
from tests.models import Broken, classifier, ids


def fail(graph: object, inputs: object) -> Any:
    raise RuntimeError("this compiler always fails")


torch._dynamo.register_backend(fail, name="fail")

MODELS: dict[str, Any] = {
    "classifier": (classifier, {"ids": ids(2, 5)}),
    "broken": (lambda: Broken().eval(), (torch.ones(2, 4),)),
}


class Gated(Listener):
    def __init__(self, gate: Path) -> None:
        self.wait: dict[str, Any] = {}
        self._gate = gate

    def stage_started(self, stage: Stage) -> None:
        if stage.name.startswith("phase."):
            return
        print(stage.name, flush=True)
        while stage.name == "compile" and not self._gate.exists():
            time.sleep(0.02)

    def stage_ended(self, stage: Stage) -> None:
        if stage.name == "wait":
            self.wait = dict(stage.attributes)


def say_holders() -> None:
    read, seen = Lease._read_holder, set[int]()

    def reading(lease: Lease) -> int | None:
        holder = read(lease)
        if holder is not None and holder not in seen:
            seen.add(holder)
            print(f"sees {holder}", flush=True)
        return holder

    Lease._read_holder = reading  # type: ignore[assignment, method-assign]


def main(store: str, gate: str, model: str, config: str) -> None:
    make, example = MODELS[model]
    listener = Gated(Path(gate))
    say_holders()
    result: dict[str, Any] = {}
    try:
        compiled = compile_model(
            make(),
            example_inputs=[example],
            config=json.loads(config),
            listeners=[listener],
            default_store=Path(store),
        )
        [shape] = compiled.report.shapes
        result = {"outcome": compiled.report.outcome, "engine": shape.engine, "reason": shape.reason}
    except GraphBreakError as error:
        result = {"outcome": "refused", "message": str(error)}
    print(json.dumps({**result, "wait": listener.wait}), flush=True)
