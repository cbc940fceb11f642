"""Packages that were compiled, and loaded again: is their answer eager's?

One compile takes seconds, so each package is compiled once and asked many things.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_outputs import BaseModelOutput

from bentoml_compile.config import VerifyConfig
from bentoml_compile.engines.aot import cuda_graph
from bentoml_compile.engines.aot.capi import LibraryError
from bentoml_compile.engines.aot.cuda_graph import CaptureFailed
from bentoml_compile.engines.aot.export import export_package
from bentoml_compile.engines.aot.package import AotExecutable, Leaf, Package, Weight, _structure, open_package
from bentoml_compile.engines.dynamo import GuardMiss
from bentoml_compile.engines.verify import compare
from bentoml_compile.ranges import free_sizes
from bentoml_compile.shapes import ExampleInput
from tests.architectures import LENGTH, WORDS, make, tokens
from tests.engines.aot.test_cuda_graph import GraphOnCpu

MORE = ("resnet", "t5_encoder", "gpt2")  # of the architectures, in `make soak`
DYNAMIC = {name: {0: (1, 5), 1: (4, 16)} for name in ("input_ids", "attention_mask")}


@dataclass(frozen=True)
class Compiled:
    model: nn.Module
    inputs: dict[str, Any]
    directory: Path
    package: Package
    executable: AotExecutable


def compiled(
    model: nn.Module, inputs: dict[str, Any], directory: Path, *, method: str = "forward", **how: Any
) -> Compiled:
    example = ExampleInput((), inputs)
    sizes = free_sizes(how.pop("dynamic", {}), [example], ())
    options = {"mode": "default", "options": {}, "sizes": sizes, **how}
    package = export_package(model, method, example, directory, **options)
    return Compiled(model, inputs, directory, package, open_package(directory, model, method))


def fresh(inputs: Any) -> Any:
    """Random values in the place of the inputs' own, but for masks."""

    def values(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            return torch.randn_like(tensor)
        return tensor if bool((tensor == 1).all()) else torch.randint_like(tensor, 3, WORDS)

    return pytree.tree_map_only(torch.Tensor, values, inputs)


def assert_equal(function: Callable[..., Any], executable: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with torch.inference_mode():
        expected = function(*args, **kwargs)
    problem = compare(expected, executable(*args, **kwargs), config=VerifyConfig()).problem
    assert not problem, problem


def perturb(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiled]:
    made = compiled(*make("bert"), tmp_path_factory.mktemp("bert"), dynamic=DYNAMIC)
    yield made
    made.executable.close()


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiled]:
    made = compiled(*make("odd"), tmp_path_factory.mktemp("odd"))
    yield made
    made.executable.close()


def test_a_model_output_comes_back_as_the_class_that_the_model_returns(bert: Compiled) -> None:
    output = bert.executable(**bert.inputs)
    expected = bert.model(**bert.inputs)
    assert type(output) is type(expected)
    assert list(output.keys()) == list(expected.keys())
    assert output.hidden_states is None
    assert output.last_hidden_state is output[0]


@pytest.mark.parametrize("length", [4, 7, 16])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_range_is_right_at_its_corners_and_between(bert: Compiled, batch: int, length: int) -> None:
    assert_equal(bert.model, bert.executable, **tokens(batch, length))


def test_a_range_says_which_sizes_are_equal_and_between_which_they_lie(bert: Compiled) -> None:
    ids, mask = bert.package.inputs
    assert ids.sizes == mask.sizes
    assert [bert.package.ranges[str(symbol)] for symbol in ids.sizes] == [(1, 5), (4, 16)]
    assert ids.strides_at({str(ids.sizes[0]): 3, str(ids.sizes[1]): 9}) == (9, 1)


def test_an_argument_may_come_by_position_or_by_name(bert: Compiled) -> None:
    ids, mask = bert.inputs.values()
    assert_equal(bert.model, bert.executable, ids, mask)
    assert_equal(bert.model, bert.executable, ids, attention_mask=mask)
    assert_equal(bert.model, bert.executable, attention_mask=mask, input_ids=ids)


@pytest.mark.parametrize(
    "surroundings",
    [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.device("meta"),
        lambda: FlopCounterMode(display=False),
    ],
    ids=["autocast", "default device", "dispatch mode"],
)
def test_code_is_not_run_where_eager_would_do_something_else(
    bert: Compiled, surroundings: Callable[[], AbstractContextManager[Any]]
) -> None:
    with surroundings(), pytest.raises(GuardMiss):
        bert.executable(**bert.inputs)
    assert_equal(bert.model, bert.executable, **bert.inputs)


def test_code_is_not_run_under_another_default_dtype(bert: Compiled) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(GuardMiss):
            bert.executable(**bert.inputs)
    finally:
        torch.set_default_dtype(before)


def test_every_structure_and_constant_comes_back(odd: Compiled) -> None:
    assert_equal(odd.model, odd.executable, **fresh(odd.inputs))
    output = odd.executable(**odd.inputs)
    assert output["nothing"] is None
    assert output["facts"][:4] == (LENGTH, 0.25, "odd", True)
    assert output["facts"][3] is True
    assert output["facts"][4][1] is None


def test_outputs_alias_inputs_and_each_other_as_in_eager(odd: Compiled) -> None:
    inputs = fresh(odd.inputs)
    image = inputs["batch"]["images"][0]
    output = odd.executable(**inputs)
    same, view, repeated = output["aliases"]
    assert same.data_ptr() == view.data_ptr() == image.data_ptr()
    assert view.stride() == image.transpose(0, 1).stride()
    assert repeated.data_ptr() == output["logits"].data_ptr()


def test_nested_and_absent_arguments_may_come_by_position(odd: Compiled) -> None:
    inputs = fresh(odd.inputs)
    assert_equal(odd.model, odd.executable, inputs["batch"], True, 2)
    assert_equal(odd.model, odd.executable, inputs["batch"], True, power=2, extra=None)


def test_weights_that_change_in_place_count_at_once_and_stay_tied(odd: Compiled) -> None:
    inputs = fresh(odd.inputs)
    before = odd.executable(**inputs)["logits"].clone()
    perturb(odd.model)
    assert_equal(odd.model, odd.executable, **inputs)
    assert not torch.allclose(odd.executable(**inputs)["logits"], before)


def test_other_weights_can_be_given_by_name(odd: Compiled) -> None:
    other, _ = make("odd")
    perturb(other)
    executable = open_package(odd.directory, odd.model, "forward", weights=dict(_tensors(other)))
    inputs = fresh(odd.inputs)
    assert_equal(other, executable, **inputs)
    assert_equal(odd.model, odd.executable, **inputs)
    executable.close()


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def test_all_weights_can_be_replaced_without_the_files(odd: Compiled, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(odd.directory, tmp_path / "package"))
    first, (other, _) = open_package(directory, odd.model, "forward"), make("odd")
    shutil.rmtree(directory)
    perturb(other)
    second, inputs = first.with_weights(dict(_tensors(other))), fresh(odd.inputs)
    assert_equal(other, second, **inputs)
    assert_equal(odd.model, first, **inputs)
    first.close()
    perturb(other)
    assert_equal(other, second, **inputs)
    second.close()


def test_replacing_weights_that_do_not_fit_are_refused_by_name(odd: Compiled) -> None:
    weights = dict(_tensors(odd.model))
    with pytest.raises(LibraryError, match=r"scale .*float64"):
        odd.executable.with_weights({**weights, "scale": weights["scale"].double()})
    del weights["offsets"]
    with pytest.raises(LibraryError, match="offsets is missing"):
        odd.executable.with_weights(weights)
    assert_equal(odd.model, odd.executable, **fresh(odd.inputs))


def test_a_graphed_package_answers_as_eager_and_takes_other_weights(
    odd: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graph, "Graph", GraphOnCpu)
    graphed = open_package(odd.directory, odd.model, "forward", graphed=ExampleInput((), odd.inputs))
    for _ in range(2):
        assert_equal(odd.model, graphed, **fresh(odd.inputs))
    other, _ = make("odd")
    perturb(other)
    second = graphed.with_weights(dict(_tensors(other)))
    graphed.close()
    assert_equal(other, second, **fresh(odd.inputs))
    second.close()


def test_ranges_cannot_be_graphed(bert: Compiled) -> None:
    with pytest.raises(CaptureFailed, match="a graph is of one size"):
        open_package(bert.directory, bert.model, "forward", graphed=ExampleInput((), bert.inputs))


def test_a_package_of_another_gpu_runs_where_the_model_is(odd: Compiled, tmp_path: Path) -> None:
    """Workers with a GPU each share artifacts; here the CPU stands for the worker's own."""
    directory = Path(shutil.copytree(odd.directory, tmp_path / "package"))
    (directory / "package.json").write_text(dataclasses.replace(odd.package, device="cuda:1").to_json())
    executable = open_package(directory, odd.model, "forward", device=torch.device("cpu"))
    assert_equal(odd.model, executable, **fresh(odd.inputs))
    executable.close()


def test_weights_that_do_not_fit_are_refused_by_name(odd: Compiled) -> None:
    weights = dict(_tensors(odd.model))
    with pytest.raises(LibraryError, match="shift"):
        open_package(odd.directory, odd.model, "forward", weights={**weights, "shift": torch.zeros(9)})
    with pytest.raises(LibraryError, match="scale"):
        open_package(odd.directory, odd.model, "forward", weights={**weights, "scale": weights["scale"].double()})
    del weights["offsets"]
    with pytest.raises(LibraryError, match="offsets"):
        open_package(odd.directory, odd.model, "forward", weights=weights)


def test_an_output_structure_that_is_not_the_librarys_is_refused(odd: Compiled, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(odd.directory, tmp_path / "package"))
    altered = dataclasses.replace(odd.package, output_constants=odd.package.output_constants[1:])
    (directory / "package.json").write_text(altered.to_json())
    with pytest.raises(ValueError, match=r"output has \d+ leaves, and its library makes \d+"):
        open_package(directory, odd.model, "forward")


@pytest.mark.parametrize(
    "output",
    [
        1,
        (1, 2),
        [1, 2],
        {"b": 1, "a": 2},
        OrderedDict(b=1, a=2),
        (),
        (1, [2, {"c": 3}]),
        BaseModelOutput(1),  # type: ignore[arg-type]  # any leaf will do
    ],
    ids=str,
)
def test_flat_and_nested_structures_are_rebuilt_as_pytree_does(output: Any) -> None:
    leaves, spec = pytree.tree_flatten(output)
    rebuilt = _structure(pytree.treespec_dumps(spec), len(leaves))(leaves)
    assert type(rebuilt) is type(output)
    assert rebuilt == output
    assert str(rebuilt) == str(output)  # the order of keys too


def test_the_directory_holds_the_package_and_nothing_else(bert: Compiled, odd: Compiled) -> None:
    assert sorted(os.listdir(bert.directory)) == sorted([bert.package.library, "package.json"])
    assert sorted(os.listdir(odd.directory)) == sorted([odd.package.library, "constants.safetensors", "package.json"])


def test_the_package_file_is_the_package(bert: Compiled, odd: Compiled) -> None:
    for made in (bert, odd):
        assert Package.from_json((made.directory / "package.json").read_text()) == made.package


def test_an_index_out_of_range_is_an_exception_and_the_next_call_is_right(odd: Compiled) -> None:
    inputs = fresh(odd.inputs)
    wrong = {**inputs, "batch": {**inputs["batch"], "ids": torch.full((2, LENGTH), WORDS)}}
    code = "from tests.engines.aot import test_package as t; t.index_out_of_range(*t.sys.argv[1:])"
    assert in_new_process(code, str(odd.directory)) == "refused, then right"
    with pytest.raises(LibraryError):
        odd.executable(**wrong)
    assert_equal(odd.model, odd.executable, **inputs)


def index_out_of_range(directory: str) -> None:
    """Run in a process of its own: code that is not safe would end it. Parallel code would show only with threads."""
    torch.set_num_threads(2)
    model, inputs = make("odd")
    executable = open_package(Path(directory), model, "forward")
    ids = inputs["batch"]["ids"]
    kept = ids.clone()
    for wrong in (WORDS, -WORDS - 1, 2**40):
        ids.fill_(wrong)
        try:
            executable(**inputs)
        except LibraryError:
            continue
        raise AssertionError(f"index {wrong} was served")
    ids.copy_(kept)
    assert_equal(model, executable, **inputs)
    print("refused, then right", end="")


def test_another_process_loads_it_without_a_compiler(bert: Compiled, odd: Compiled) -> None:
    code = "from tests.engines.aot import test_package as t; t.load_and_compare(bert=t.sys.argv[1], odd=t.sys.argv[2])"
    assert in_new_process(code, str(bert.directory), str(odd.directory)) == "bert odd "


def load_and_compare(**directories: str) -> None:
    for name, directory in directories.items():
        model, inputs = make(name)
        executable = open_package(Path(directory), model, "forward")
        assert_equal(model, executable, **fresh(inputs))
        perturb(model)
        assert_equal(model, executable, **fresh(inputs))
        print(name, end=" ")


def test_loading_and_calling_imports_neither_dynamo_nor_inductor(encoder: Compiled) -> None:
    code = """if True:
        import json, sys, torch
        from pathlib import Path
        from bentoml_compile.engines.aot.package import open_package
        class Encoder(torch.nn.Module):
            def encode(self, x): raise NotImplementedError
        encoder = Encoder()
        encoder.linear = torch.nn.Linear(4, 4)
        open_package(Path(sys.argv[1]), encoder, "encode")(torch.ones(2, 4))
        loaded = [name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))]
        print(json.dumps(loaded), end="")
    """
    assert json.loads(in_new_process(code, str(encoder.directory))) == []


def in_new_process(code: str, *arguments: str) -> str:
    environment = {**os.environ, "PATH": "/nonexistent", "CXX": "/nonexistent"}
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


class Encoder(nn.Module):
    """A method other than forward, hooks, and a literal that is lifted."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.linear(x)), x.sum(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiled]:
    with torch.inference_mode():
        model = Encoder().eval()
    made = compiled(model, {"x": torch.randn(2, 4)}, tmp_path_factory.mktemp("a path with spaces"), method="encode")
    yield made
    made.executable.close()


def test_a_method_other_than_forward_keeps_the_names_of_the_weights(encoder: Compiled) -> None:
    assert isinstance(encoder.model, Encoder)
    assert_equal(encoder.model.encode, encoder.executable, torch.randn(2, 4))
    assert {weight.name for weight in encoder.package.weights.values()} == {"linear.weight", "linear.bias"}


def test_weights_made_under_inference_mode_can_be_exported(encoder: Compiled) -> None:
    assert isinstance(encoder.model, Encoder)
    assert encoder.model.linear.weight.is_inference()
    assert_equal(encoder.model.encode, encoder.executable, torch.randn(2, 4))


def test_a_closed_executable_refuses_calls(encoder: Compiled) -> None:
    executable = open_package(encoder.directory, encoder.model, "encode")
    executable.close()
    executable.close()
    with pytest.raises(RuntimeError):
        executable(torch.randn(2, 4))


def test_hooks_run_and_autocast_and_autotuning_are_those_of_the_start(tmp_path: Path) -> None:
    """Three claims for one compile: hooks of the root module, autocast at export, weights outside in max-autotune."""
    model = Encoder().eval()
    model.register_forward_pre_hook(lambda module, args, kwargs: (args, {"x": kwargs["x"] + 1}), with_kwargs=True)
    model.register_forward_hook(lambda module, args, output: {"doubled": output * 2})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = compiled(model, {"x": torch.randn(2, 4)}, tmp_path, mode="max-autotune")
    for _ in range(2):
        inputs = fresh(made.inputs)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
            torch.testing.assert_close(made.executable(**inputs), model(**inputs), rtol=0.02, atol=0.02)
        perturb(model)
    made.executable.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", *(pytest.param(name, marks=pytest.mark.soak) for name in MORE)])
def test_public_architectures_equal_eager_with_other_inputs_and_weights(name: str, tmp_path: Path) -> None:
    made = compiled(*make(name), tmp_path)
    assert_equal(made.model, made.executable, **fresh(made.inputs))
    perturb(made.model)
    assert_equal(made.model, made.executable, **fresh(made.inputs))
    made.executable.close()


def test_a_package_survives_json() -> None:
    leaf = Leaf((1, "batch", 0), "torch.int64", ("s0", 3), ("3*s1", 1), "cpu")
    package = Package(
        library="a.so",
        device="cuda:0",
        inputs=(leaf,),
        output_spec="[1, null]",
        output_constants=((0, None), (2, 1.5), (3, "x"), (4, True)),
        ranges={"s0": (1, 8)},
        weights={"model.a": Weight("a", "torch.float32", (2,), (1,))},
        constants={"c": Weight("c", "torch.int64", (2, 3), (0, 1))},
    )
    assert Package.from_json(package.to_json()) == package
    assert package != dataclasses.replace(package, device="cpu")
