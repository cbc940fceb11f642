"""Eight threads by 200 mixed calls equal eager, in every mode of both engines.

What CUDA graphs add, a thread of the model's own, is in tests/engines/test_jit_thread.py.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import pytest
import torch

from bentoml_compile.config import Mode
from bentoml_compile.model import compile_model
from tests.models import classifier, ids

THREADS, CALLS = 8, 200
IN_EVERY_RUN = {("aot", "default")}  # the others in `make soak`


def cases() -> list[object]:
    every = [(engine, mode) for engine in ("aot", "jit") for mode in get_args(Mode)]
    return [
        pytest.param(*case, marks=() if case in IN_EVERY_RUN else pytest.mark.soak, id="-".join(case)) for case in every
    ]


@pytest.mark.parametrize(("engine", "mode"), cases())
def test_mixed_calls_of_many_threads_equal_eager(engine: str, mode: str) -> None:
    model = classifier()
    config = {"engine": engine, "mode": mode, "keep_eager_if_slower": False, "verify": {"strict": True}}
    examples = [{"ids": ids(2, 5)}, {"ids": ids(4, 7)}]
    compiled = compile_model(model, example_inputs=examples, name=f"{engine}-{mode}", config=config)
    assert compiled.report.engine == engine
    inputs = [ids(*sizes).roll(shift) for sizes in ((2, 5), (4, 7), (3, 3)) for shift in range(4)]  # (3, 3): eagerly
    with torch.inference_mode():
        expected = [model(given)["logits"] for given in inputs]

    def calls(seed: int) -> None:
        chosen = random.Random(seed)
        for _ in range(CALLS):
            number = chosen.randrange(len(inputs))
            torch.testing.assert_close(compiled(ids=inputs[number])["logits"], expected[number])

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(calls, range(THREADS)))
    assert compiled.recompiles == 0
    compiled.close()
