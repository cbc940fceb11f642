"""What a trace leaves in a model's own caches, which no copy of the model has: nothing, or the model is refused."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bentoml_compile.config import CompileConfig, VerifyConfig
from bentoml_compile.engines.aot import build, export
from bentoml_compile.engines.aot.errors import NotExportable
from bentoml_compile.engines.aot.leftovers import FakesLeft
from bentoml_compile.engines.eager import call
from bentoml_compile.prepared import Target
from bentoml_compile.ranges import free_sizes
from bentoml_compile.shapes import ExampleInput


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "compile_program", lambda *_, **__: "library.so")


def export_range(model: nn.Module, directory: Path, **how: Any) -> None:
    """The example's size is 1, and eager has run at the ends of the range; it is traced at 2."""
    example = ExampleInput((torch.rand(1, 6),), {})
    for size in (1, 8):
        call(model, ExampleInput((torch.rand(size, 6),), {}))
    sizes = free_sizes({"x": {0: (1, 8)}}, [example], ("x",))
    export.export_package(model, "forward", example, directory, mode="default", options={}, sizes=sizes, **how)


# kept by size

_ramps: dict[int, torch.Tensor] = {}


def ramp(size: int) -> torch.Tensor:
    return torch.ones(size).cumsum(0)[:, None]


def kept(where: dict[int, torch.Tensor], size: int) -> torch.Tensor:
    if size not in where:
        where[size] = ramp(size)
    return where[size]


class Memo(nn.Module):
    cached = staticmethod(functools.lru_cache(ramp))
    last = staticmethod(functools.lru_cache(maxsize=1)(ramp))
    ramps: dict[int, torch.Tensor] = {}  # noqa: RUF012

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor, ramps: dict[int, torch.Tensor] = {}) -> torch.Tensor:  # noqa: B006
        size = int(x.shape[0])
        if self.kind.startswith("lru_cache"):
            return x * (self.cached if self.kind == "lru_cache" else self.last)(size)
        where = {"global": _ramps, "class": Memo.ramps, "default argument": ramps}[self.kind]
        return x * kept(where, size)


@pytest.mark.parametrize("kind", ["lru_cache", "lru_cache of one", "global", "class", "default argument"])
def test_what_a_model_keeps_by_size_outside_of_its_modules_stays_real(kind: str, tmp_path: Path) -> None:
    model, x = Memo(kind), torch.rand(2, 6)
    with pytest.raises(NotExportable, match="specialized"):
        export_range(model, tmp_path)
    result = call(model, ExampleInput((x,), {}))
    assert type(result) is torch.Tensor
    assert torch.equal(result, x * torch.tensor([[1.0], [2.0]]))


# kept whenever it is traced

_kept: dict[str, Any] = {}


@pytest.fixture
def _forgetting() -> Iterator[None]:
    yield
    _kept.clear()


class KeptWhileTraced(nn.Module):
    def __init__(self, output: str) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: torch.Tensor) -> Any:
        scale = _kept.get("scale", torch.ones(6))
        if torch.compiler.is_compiling():
            _kept["scale"] = torch.ones(6) * 2
        if self.output == "beside what export refuses":
            return x * scale, object()
        return (x, scale) if self.output == "itself" else x * scale


@pytest.mark.usefixtures("_forgetting")
@pytest.mark.parametrize("output", ["a product", "itself", "beside what export refuses"])
def test_a_model_that_a_trace_has_done_harm_to_is_refused_and_told(
    output: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where export itself refuses the model for another reason."""
    with pytest.raises(FakesLeft, match=r"the model itself returns fake tensors for \(x: float32\[2, 6\]\)"):
        export_range(KeptWhileTraced(output), tmp_path)
    assert "in a global, a class, a cache" in caplog.text


class FailsOnceTraced(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            _kept["traced"] = True
        elif "traced" in _kept:
            raise ValueError("no more")
        return x + 1


@pytest.mark.usefixtures("_forgetting")
def test_a_model_that_raises_since_it_was_traced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FakesLeft, match="the model itself raises ValueError: no more"):
        export_range(FailsOnceTraced(), tmp_path)


class OnlyTheEnds(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and 1 < x.shape[0] < 8:
            raise ValueError("not that many")
        return x + 1


def test_sizes_to_trace_that_the_model_cannot_run_are_named(tmp_path: Path) -> None:
    with pytest.raises(NotExportable, match=r"x: float32\[2, 6\].*ValueError: not that many"):
        export_range(OnlyTheEnds(), tmp_path)


def test_a_copy_runs_in_place_of_the_live_model_where_there_is_one(tmp_path: Path) -> None:
    sizes: list[int] = []

    def eager(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return x

    export_range(OnlyTheEnds(), tmp_path, eager=eager)  # which itself would raise
    assert sizes == [2, 2]  # before and after


# made of weights

_of_weights: dict[int, torch.Tensor] = {}


class OfWeights(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = int(x.shape[0])
        if size not in _of_weights:
            _of_weights[size] = self.weight.sum() * ramp(size)
        return super().forward(x) * _of_weights[size]


def test_what_a_model_keeps_of_its_weights_is_not_of_those_that_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Opened:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            raise NotExportable("tried")

        def close(self) -> None: ...

    model, example = OfWeights(6, 6).eval(), ExampleInput((torch.rand(3, 6),), {})
    config = CompileConfig.model_validate({"dynamic": {"x": {"0": [1, 8]}}})
    target = Target(model, "forward", "weights", config, ("x",), (example,))
    target.shapes[0].run = model
    monkeypatch.setattr(build, "open_package", lambda *_: Opened())
    with pytest.raises(NotExportable, match="tried"):
        build._verify_with_other_weights(target, tmp_path, VerifyConfig())
    with torch.no_grad():
        torch.testing.assert_close(_of_weights[3], model.weight.sum() * ramp(3))
