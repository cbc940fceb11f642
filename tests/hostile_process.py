"""The process that makes hostile calls: `python -m tests.hostile_process ENGINE[-ranges] POLICY EXAMPLES STORE LAST`.

Exits with 0 if every call ended as eager's did. What it is about to call stands in the file LAST, for the case that
nothing comes after.
"""

from __future__ import annotations

import logging
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch.utils import _pytree as pytree

from bentoml_compile.config import VerifyConfig
from bentoml_compile.engines.verify import compare
from bentoml_compile.errors import UnpreparedInputError
from bentoml_compile.listener import Call, Listener
from bentoml_compile.model import CompiledModel, compile_model
from tests.hostile import LENGTH, HostileCall, Tagger, hostile_calls


class Recorder(Listener):
    """The last call, as the compiled model tells it."""

    def __init__(self) -> None:
        self.last: Call | None = None

    def called(self, call: Call) -> None:
        self.last = call


@dataclass(frozen=True)
class Outcome:
    """What a call came to: a result or an exception."""

    result: Any = None
    error: Exception | None = None

    @classmethod
    def of(cls, function: Any, call: HostileCall) -> Outcome:
        args, kwargs = call.build()
        try:
            with call.surroundings():
                return cls(result=function(*args, **kwargs))
        except Exception as error:
            return cls(error=error)


def check(
    model: Tagger, compiled: CompiledModel, recorder: Recorder, call: HostileCall, lengths: range, *, rejects: bool
) -> None:
    """Raises AssertionError unless the call ends as eager's, or is refused where that is the policy."""
    expected = Outcome.of(torch.inference_mode()(model.forward), call)
    actual = Outcome.of(compiled, call)
    assert compiled.recompiles == 0, "compiled inside of the call"
    if call.is_as_prepared(lengths):
        last = recorder.last
        assert last is not None
        assert expected.error is None, expected.error
        assert last.executable.prepared, "an input as prepared was taken for another"
        assert last.fallback is None, f"an input as prepared fell back: {last.fallback}"
    elif rejects and isinstance(actual.error, UnpreparedInputError):
        return
    assert type(expected.error) is type(actual.error), f"{actual.error!r} where eager has {expected.error!r}"
    if expected.error is None:
        want, got = (_comparable(outcome.result, call) for outcome in (expected, actual))
        problem = compare(want, got, config=VerifyConfig()).problem
        assert not problem, problem


def _comparable(result: Any, call: HostileCall) -> Any:
    """The result without the values of what has none: eager, too, reads any memory where it is given a meta tensor."""
    no_values = call.has_meta

    def comparable(leaf: torch.Tensor) -> Any:
        return (leaf.dtype, leaf.device.type, tuple(leaf.shape)) if no_values or leaf.is_meta else leaf

    return pytree.tree_map_only(torch.Tensor, comparable, result)


def main(name: str, policy: str, examples: int, store: Path, last: Path) -> None:
    engine, _, ranges = name.partition("-")
    lengths = range(1 if ranges else LENGTH, LENGTH + 1)
    dynamic = {argument: {"1": [lengths[0], lengths[-1]]} for argument in ("ids", "mask")} if ranges else None
    logging.getLogger("bentoml_compile").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = Tagger(positions=engine == "aot").eval()
    _, example = HostileCall().build()
    recorder = Recorder()
    compiled = compile_model(
        model,
        example_inputs=[example],
        name=name,
        config={"engine": engine, "on_unprepared": policy, "keep_eager_if_slower": False, "dynamic": dynamic},
        listeners=[recorder],
        default_store=store,
    )
    assert compiled.report.engine == engine, compiled.report

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        print_blob=False,
    )
    @given(hostile_calls())
    def every_call(call: HostileCall) -> None:
        last.write_text(repr(call))
        check(model, compiled, recorder, call, lengths, rejects=policy == "reject")

    every_call()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]))
