"""What changes a fingerprint and what does not."""

from __future__ import annotations

import array
import collections
import contextvars
import copy
import enum
import functools
import itertools
import operator
import os
import re
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from bentoml_compile.artifacts.describe import Describer
from bentoml_compile.artifacts.fingerprint import Fingerprint, fingerprint
from bentoml_compile.artifacts.hashing import hash_sources
from bentoml_compile.config import CompileConfig


class Net(nn.Module):
    levels = 2

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.scale = 2.0
        self.table = torch.arange(3)
        self.activation: Callable[..., torch.Tensor] = torch.relu
        self.register_buffer("offset", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.second(self.first(x))) * self.scale


def of(model: nn.Module, config: dict[str, Any] | None = None, **changes: Any) -> Fingerprint:
    arguments = {"method": "forward", "shapes": ["x: float32[2, 4]"], **changes}
    return fingerprint(model, config=CompileConfig(**(config or {})), **arguments)


def differing(one: Fingerprint, other: Fingerprint) -> set[str]:
    return {line.partition(":")[0] for line in one.differences(other.axes, other.attributes)}


@pytest.fixture(autouse=True)
def torch_settings_as_before() -> Iterator[None]:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(False)
    torch._inductor.config.freezing = False


def test_two_models_made_alike_have_one_fingerprint() -> None:
    assert of(Net()) == of(Net())
    assert of(Net()).id == of(Net()).id


def test_other_weight_values_hit() -> None:
    model = Net()
    before = of(model)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(1)
    assert of(model).id == before.id


def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output + 1


def tie(model: Net) -> None:
    model.second.weight = model.first.weight


def patch_forward(model: Net) -> None:
    model.first.forward = lambda x: x * 2  # type: ignore[assignment, method-assign]


def transpose_weight(model: Net) -> None:
    model.first.weight = nn.Parameter(torch.empty(4, 4).t())


CHANGES: dict[str, tuple[Callable[[Net], Any], set[str]]] = {
    "a number": (lambda m: setattr(m, "scale", 3.0), {"attributes"}),
    "a number's type": (lambda m: setattr(m, "scale", 2), {"attributes"}),
    "a new attribute": (lambda m: setattr(m, "extra", None), {"attributes"}),
    "a plain tensor's value": (lambda m: setattr(m, "table", torch.tensor([0, 1, 3])), {"attributes"}),
    "an activation": (lambda m: setattr(m, "activation", torch.tanh), {"attributes"}),
    "a lambda": (lambda m: setattr(m, "activation", lambda x: x), {"attributes"}),
    "a forward hook": (lambda m: m.first.register_forward_hook(hook), {"hooks"}),
    "a forward pre-hook": (lambda m: m.first.register_forward_pre_hook(lambda *_: None), {"hooks"}),
    "a backward hook": (lambda m: m.register_full_backward_hook(lambda *_: None), {"hooks"}),
    "the training flag": (lambda m: m.eval(), {"training"}),
    "one module's training flag": (lambda m: m.first.eval(), {"training"}),
    "the dtype": (lambda m: m.half(), {"tensors"}),
    "requires_grad": (lambda m: m.first.requires_grad_(False), {"tensors"}),
    "a tied weight": (tie, {"tensors"}),
    "a weight's strides": (transpose_weight, {"tensors"}),
    "a forward that was replaced on one module": (patch_forward, {"attributes"}),
    "a module of another class": (
        lambda m: setattr(m, "second", nn.Identity()),
        {"structure", "attributes", "tensors"},
    ),
    "the device": (lambda m: m.to("meta"), {"device", "tensors"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_misses_and_says_in_which_axis(change: str) -> None:
    model = Net()
    before = of(model)
    apply, axes = CHANGES[change]
    apply(model)
    assert differing(of(model), before) == axes
    assert of(model).id != before.id


def test_a_hook_with_other_flags_misses() -> None:
    one, other = Net(), Net()
    one.register_forward_hook(hook)
    other.register_forward_hook(hook, always_call=True)
    assert differing(of(one), of(other)) == {"hooks"}


def test_the_number_of_hooks_made_before_in_this_process_does_not_count() -> None:
    one, other = Net(), Net()
    one.register_forward_hook(hook)
    Net().register_forward_hook(hook)
    other.register_forward_hook(hook)
    assert of(one).id == of(other).id


def test_a_hook_on_all_modules_misses() -> None:
    before = of(Net())
    handle = nn.modules.module.register_module_forward_hook(hook)  # type: ignore[arg-type]  # its type wants None back
    try:
        assert differing(of(Net()), before) == {"hooks"}
    finally:
        handle.remove()


def test_a_method_that_was_patched_on_the_class_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    before = of(Net())
    monkeypatch.setattr(Net, "forward", lambda self, x: x)
    assert differing(of(Net()), before) == {"structure"}
    monkeypatch.undo()
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
    assert differing(of(Net()), before) >= {"structure"}


def test_a_class_attribute_that_changed_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    before = of(Net())
    monkeypatch.setattr(Net, "levels", 3)
    assert differing(of(Net()), before) == {"structure"}


class Helper:
    scale: object = 2.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (types.SimpleNamespace(scale=2.0), types.SimpleNamespace(scale=3.0)),
        (frozenset({1, 2}), frozenset({1, 3})),
        (np.array([2.0]), np.array([3.0])),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (staticmethod(lambda: 2.0), staticmethod(lambda: 3.0)),
    ],
)
def test_a_class_attribute_counts_by_its_value_in_a_module_and_in_what_a_module_holds(
    monkeypatch: pytest.MonkeyPatch, one: object, other: object
) -> None:
    model = Net()
    model.activation = Helper()
    model.config = Helper  # type: ignore[assignment]
    seen = []
    for value in (one, other):
        monkeypatch.setattr(Net, "levels", value)
        monkeypatch.setattr(Helper, "scale", value)
        seen.append(of(model))
    names = dict.fromkeys(seen[0].attributes.keys() | seen[1].attributes.keys())
    assert {name for name in names if seen[0].attributes[name] != seen[1].attributes[name]} == {"activation", "config"}
    assert differing(*seen) == {"structure", "attributes"}
    assert seen[0].doubts == ()


def test_a_module_that_is_an_attribute_counts_by_its_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = types.ModuleType("settings_of_a_test")
    settings.scale = 2.0  # type: ignore[attr-defined]
    before = Describer().describe(settings)
    settings.scale = 3.0  # type: ignore[attr-defined]
    assert Describer().describe(settings) != before


def test_a_context_variable_counts_by_its_value() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")
    texts = [Describer().describe(variable) for value in (1, 2) if variable.set(value)]
    assert texts[0] != texts[1]


def doubts_about(value: object) -> set[str]:
    describer = Describer()
    describer.describe([value])
    return describer.doubts


def test_what_no_describer_can_see_is_in_doubt() -> None:
    @functools.lru_cache
    def cached(x: int) -> int:
        return x

    local = threading.local()
    local.scale = 2.0
    assert doubts_about(local) == {"a _thread._local"}
    assert doubts_about(cached) == set()
    cached(1)
    assert len(doubts_about(cached)) == 1


def test_an_ordinary_model_is_not_in_doubt() -> None:
    model = tiny_bert("sdpa")
    model.lock, model.pattern, model.both = threading.Lock(), re.compile("a"), [int | None, list[int]]  # type: ignore[assignment]
    model.register_forward_hook(torch.no_grad()(lambda *_: None))
    assert of(model).doubts == ()


@pytest.mark.parametrize(
    ("config", "axis"),
    [
        ({"mode": "max-autotune"}, "config.mode"),
        ({"fullgraph": "require"}, "config.fullgraph"),
        ({"dynamic": True}, "config.dynamic"),
        ({"backend": "aot_eager"}, "config.backend"),
        ({"options": {"max_autotune": True}}, "config.options"),
        ({"options": {"x": "1"}}, "config.options"),
        ({"verify": {"rtol": 0.1}}, "config.verify"),
        ({"verify": False}, "config.verify"),
    ],
)
def test_a_setting_that_decides_about_code_misses(config: dict[str, Any], axis: str) -> None:
    assert differing(of(Net(), config), of(Net())) == {axis}


@pytest.mark.parametrize(
    "config",
    [
        {"on_unprepared": "reject"},
        {"time_limit": 1},
        {"artifacts": {"refresh": True}},
        {"verify": {"on_load": True}},
    ],
)
def test_a_setting_that_only_decides_about_serving_hits(config: dict[str, Any]) -> None:
    assert of(Net(), config).id == of(Net()).id


def test_the_method_and_the_shapes_count() -> None:
    assert differing(of(Net(), method="encode"), of(Net())) == {"method"}
    assert differing(of(Net(), shapes=["x: float32[3, 4]"]), of(Net())) == {"shapes"}


def test_a_model_that_was_compiled_before_in_this_process_is_still_the_same() -> None:
    model = Net()
    before = of(model)
    with torch.inference_mode():
        torch.compile(model, backend="eager")(torch.ones(2, 4))
    assert differing(of(model), before) == set()


def test_torch_settings_count() -> None:
    before = of(Net())
    torch.set_num_threads(torch.get_num_threads() + 1)
    assert differing(of(Net()), before) == {"threads"}
    torch.set_num_threads(torch.get_num_threads() - 1)
    torch.set_float32_matmul_precision("medium")
    assert "torch.float32_matmul_precision" in differing(of(Net()), before)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(True)
    assert "torch.deterministic" in differing(of(Net()), before)
    torch.use_deterministic_algorithms(False)
    before = of(Net())
    with torch.autocast("cpu", torch.bfloat16):
        assert differing(of(Net()), before) == {"autocast"}
    assert of(Net()).id == before.id


def test_compiler_settings_count_but_where_the_cache_is_kept_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as inductor

    before = of(Net())
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/nowhere")
    assert of(Net()).id == before.id
    monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "1")
    assert differing(of(Net()), before) == {"compiler environment"}
    monkeypatch.delenv("TORCHINDUCTOR_FREEZING")
    inductor.freezing = True
    assert differing(of(Net()), before) == {"compiler settings"}
    with inductor.patch(freezing=False, max_autotune=False):  # leaves an override that equals the default
        pass
    inductor.freezing = False
    assert of(Net()).id == before.id


def tiny_bert(attention: str) -> transformers.BertModel:
    config = transformers.BertConfig(  # type: ignore[call-arg]  # it takes what any config does
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=16, attn_implementation=attention,
    )  # fmt: skip
    return transformers.BertModel(config).eval()  # type: ignore[no-untyped-call]


def test_the_attention_implementation_of_a_transformers_model_counts() -> None:
    assert of(tiny_bert("sdpa")).id == of(tiny_bert("sdpa")).id
    assert differing(of(tiny_bert("sdpa")), of(tiny_bert("eager"))) == {"attributes"}


def test_where_a_transformers_model_was_loaded_from_does_not_count() -> None:
    model = tiny_bert("sdpa")
    before = of(model)
    model.config._name_or_path = model.name_or_path = "/somewhere/else"
    assert of(model).id == before.id


def test_a_difference_names_the_attribute_and_both_values() -> None:
    one, other = Net(), Net()
    one.first.scale = 0.5  # type: ignore[assignment]  # no Linear has it
    assert of(one).differences(of(other).axes, of(other).attributes) == [
        "attributes: first.scale is float 0.5 here, unset there"
    ]


def test_a_difference_names_axes_that_only_one_side_has() -> None:
    one = Fingerprint({"torch": "2.13.0", "old": "x"})
    assert one.differences({"torch": "2.12.1", "new": "y"}) == [
        "torch: 2.13.0 here, 2.12.1 there",
        "old: x here, nothing there",
        "new: nothing here, y there",
    ]


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Settings:
    depth: int
    color: Color


class Slots:
    __slots__ = ("left", "right")

    def __init__(self, left: object) -> None:
        self.left = left


def closure(value: object) -> Callable[[], object]:
    return lambda: value


def default(value: object) -> Callable[[object], object]:
    def given(x: object = value) -> object:
        return x

    return given


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        ("1", b"1"),
        ([1, 2], (1, 2)),
        ([1, [2]], [[1], 2]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1, 2}, {1, 3}),
        (Color.RED, Color.BLUE),
        (Settings(1, Color.RED), Settings(2, Color.RED)),
        (Settings(1, Color.RED), Settings(1, Color.BLUE)),
        (Slots(1), Slots(2)),
        (closure(1), closure(2)),
        (default(1), default(2)),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (types.SimpleNamespace(scale=1), types.SimpleNamespace(scale=2)),
        (operator.itemgetter(1), operator.itemgetter(2)),
        (array.array("d", [1.0]), array.array("d", [2.0])),
        (collections.defaultdict(int), collections.defaultdict(float)),
        (collections.deque([1], 2), collections.deque([1], 3)),
        ({"a": 1}.get, {"a": 2}.get),
        (itertools.count(1), itertools.count(2)),
        (lambda x: x + 1, lambda x: x + 2),
        (torch.float32, torch.float16),
        (torch.ones(2), torch.zeros(2)),
        (int, float),
        (torch.ones(2).numpy(), torch.zeros(2).numpy()),
        ([nn.Linear(2, 2)], [nn.Linear(2, 3)]),
    ],
)
def test_values_that_differ_are_described_differently(one: object, other: object) -> None:
    assert Describer().describe(one) != Describer().describe(other)
    assert Describer().describe(one) == Describer().describe(copy.copy(one))


def test_a_cycle_ends_and_a_difference_inside_of_it_counts() -> None:
    def ring(value: int) -> list[Any]:
        items: list[Any] = [value, {}]
        items[1]["back"] = items
        return items

    assert Describer().describe(ring(1)) == Describer().describe(ring(1))
    assert Describer().describe(ring(1)) != Describer().describe(ring(2))


def test_a_very_deep_value_ends() -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    assert Describer().describe(deep) == Describer().describe([deep[0]])


def test_no_code_of_the_value_runs() -> None:
    class Trap:
        __slots__ = ("__dict__",)

        @property
        def value(self) -> int:
            raise AssertionError("a property was read")

        def __getattr__(self, name: str) -> int:
            raise AssertionError(f"{name} was looked up")

        def __repr__(self) -> str:
            raise AssertionError("repr was called")

        def __eq__(self, other: object) -> bool:
            raise AssertionError("it was compared")

        __hash__ = None  # type: ignore[assignment]

    Describer().describe([Trap(), {"key": Trap()}])


def test_the_source_files_of_hooks_and_classes_are_met_and_torchs_are_not() -> None:
    describer = Describer()
    describer.describe(hook)
    describer.module_class(Net)
    describer.module_class(nn.Linear)
    assert describer.files == {Path(__file__)}


def test_hashed_files_tell_an_edit_and_a_missing_file(tmp_path: Path) -> None:
    helper = tmp_path / "helper.py"
    helper.write_text("x = 1")
    before = hash_sources([str(helper), str(tmp_path / "gone.py")])
    helper.write_text("x = 2")
    after = hash_sources([str(helper), str(tmp_path / "gone.py")])
    assert before[str(helper)] != after[str(helper)]
    assert after[str(tmp_path / "gone.py")] == "missing"


SCRIPT = """
    import sys, threading
    import torch, transformers
    from torch import nn
    from bentoml_compile.artifacts.fingerprint import fingerprint
    from bentoml_compile.config import CompileConfig

    if sys.argv[1:]:
        import torch._inductor.config, torch._dynamo.config
    torch.set_num_threads(1)
    config = transformers.T5Config(vocab_size=11, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    model = transformers.T5ForConditionalGeneration(config)  # it has a generation config
    model.words = {"one", "two", "three", ("four", 4), frozenset(["five", "six"])}
    model.pick = lambda x: x in {"seven", "eight", "nine"}
    model.held = type("Held", (), {"words": frozenset({"ten", "eleven", "twelve"}), "lock": threading.Lock()})()
    model.register_forward_hook(lambda *_: None)
    seen = fingerprint(model, method="forward", config=CompileConfig(), shapes=["a", "b"])
    print(seen.id)
"""


def test_another_process_with_another_hash_seed_has_the_same_fingerprint(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    ids = set()
    for seed, arguments in (("1", []), ("2", ["with the compiler imported"])):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, str(script), *arguments]
        ids.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()[-1])
    assert len(ids) == 1
