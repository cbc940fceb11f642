"""Legacy runners with compiled models, in one process: config, errors, saved models, and as a Service.

BentoML keeps its config in the process, so each case runs in a process of its own, forked where BentoML is imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bento.test_settings import prepared
from tests.forked import Forked

# `load_config` reads the case's environment, as importing BentoML does in a process of its own
RUNNABLES = """
import logging, os, sys
import bentoml, torch
from bentoml._internal.configuration import load_config
from bentoml_compile import CompiledRunnable, compile_model, compiled, runner_service
from bentoml_compile.bento import settings
from bentoml_compile.errors import ConfigError
from tests.models import classifier, ids

load_config()
method = bentoml.legacy.Runnable.method
EAGER = {"engine": "jit", "backend": "eager", "keep_eager_if_slower": False, "verify": False}
eager = classifier()(ids())["logits"]

class Classify(CompiledRunnable):
    torch_compile = {**EAGER, "time_limit": 11}

    def load_model(self):
        self.config = settings.settings_for("other")
        return classifier()

    def example_inputs(self):
        return [(ids(),)]

    @method(batchable=True)
    def classify(self, rows):
        return self.model(rows)["logits"]

    @method
    def settings(self, **options):
        return {"mode": self.config.mode, "time_limit": self.config.time_limit, "report": self.model.report, **options}

def local(runner):
    runner.init_local(quiet=True)
    return runner

def refused(make):
    try:
        make()
    except ConfigError as error:
        print(str(error).replace("\\n", ""))
    else:
        raise AssertionError("nothing was refused")
"""


@pytest.fixture(scope="module", autouse=True)
def _imported() -> Iterator[None]:
    global _forked
    with Forked(
        "torch._dynamo", "bentoml", "bentoml.pytorch", "bentoml_compile.bento.saved",
        "bentoml_compile.bento.runner_service", "_bentoml_impl.server.app", "tests.models",
    ) as _forked:  # fmt: skip
        yield


_forked: Forked


def output(directory: Path, script: str, **env: str) -> str:
    done = _forked.run(RUNNABLES + script, directory, env=prepared(directory, **env))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def overrides(**sections: object) -> dict[str, str]:
    services = {name: {"torch_compile": section} for name, section in sections.items()}
    return {"BENTOML_CONFIG_OVERRIDES": json.dumps({"services": services})}


def test_a_local_runner_answers_as_its_model_from_code_compiled_under_its_name(tmp_path: Path) -> None:
    script = """
runner = local(bentoml.legacy.Runner(Classify, name="Tiny"))
torch.testing.assert_close(runner.classify.run(ids()), eager)
report = runner.settings.run(extra=1)["report"]
print(report.model, report.engine, report.outcome)
"""
    assert output(tmp_path, script) == "tiny jit compiled\n"


def test_the_class_is_overridden_by_init_params_and_those_by_bentomls_config_key_by_key(tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text("services:\n  tiny:\n    torch_compile: {mode: max-autotune, time_limit: 31, options: {b: 2}}\n")
    env = {
        "BENTOML_CONFIG": str(file),
        **overrides(tiny={"time_limit": 32, "options": {"c": 3}}),
        "BENTOML_CONFIG_OPTIONS": "services.tiny.torch_compile.time_limit=33",
    }
    script = """
given = {"mode": "reduce-overhead", "time_limit": 21, "options": {"a": 1}}
Classify.torch_compile = {"mode": "default", "time_limit": 11, "enabled": False}
plain = local(bentoml.legacy.Runner(Classify, name="plain"))
asked = local(bentoml.legacy.Runner(Classify, name="asked", runnable_init_params={"torch_compile": given}))
tiny = local(bentoml.legacy.Runner(Classify, name="tiny", runnable_init_params={"torch_compile": given}))
for runner in (plain, asked, tiny):
    config = runner._runner_handle._runnable.config
    print(config.mode, config.time_limit, dict(config.options), config.enabled)
"""
    assert output(tmp_path, script, **env).splitlines() == [
        "default 11.0 {} False",
        "reduce-overhead 21.0 {'a': 1} False",
        "max-autotune 33.0 {'a': 1, 'b': 2, 'c': 3} False",
    ]


def test_a_runner_embedded_in_an_api_worker_has_its_own_config_not_the_services(tmp_path: Path) -> None:
    script = """
bentoml.server_context.service_name = "api"  # as BentoML's API worker sets it
print(local(bentoml.legacy.Runner(Classify, name="tiny", embedded=True)).settings.run()["time_limit"])
"""
    assert output(tmp_path, script, **overrides(tiny={"time_limit": 5}, api={"time_limit": 6})) == "5.0\n"


def test_a_hand_written_runnable_compiles_with_its_runners_config(tmp_path: Path) -> None:
    script = """
class HandWritten(bentoml.legacy.Runnable):
    SUPPORTED_RESOURCES, SUPPORTS_CPU_MULTI_THREADING = ("cpu",), True
    torch_compile = EAGER

    def __init__(self):
        self.model = compile_model(classifier(), example_inputs=[(ids(),)], name="inner")

    @method
    def mode(self):
        return self.model.report.mode

print(local(bentoml.legacy.Runner(HandWritten, name="tiny")).run())
"""
    assert output(tmp_path, script, **overrides(tiny={"mode": "reduce-overhead"})) == "reduce-overhead\n"


def test_a_runnable_made_without_a_runner_has_its_classs_config_and_name(tmp_path: Path) -> None:
    script = """
one = Classify({"mode": "reduce-overhead"})
print(one.model.report.model, one.model.report.mode, one.config.time_limit)
"""
    assert output(tmp_path, script, **overrides(classify={"time_limit": 5})) == "classify reduce-overhead 5.0\n"


def test_a_wrong_setting_is_refused_where_the_runner_is_defined_with_its_name(tmp_path: Path) -> None:
    script = """
Runner = bentoml.legacy.Runner
refused(lambda: Runner(Classify, name="tiny", runnable_init_params={"torch_compile": {"mode": "max_autotune"}}))
refused(lambda: Runner(Classify, name="other"))
Classify.torch_compile = {"options": {3: 1}}
refused(lambda: Runner(Classify, name="third"))
"""
    one, two, three = output(tmp_path, script, **overrides(other={"verfy": False})).splitlines()
    assert "runner 'tiny': torch_compile" in one
    assert "'max_autotune' is not allowed (did you mean 'max-autotune'?)" in one
    assert "runner 'other': torch_compile" in two
    assert "torch_compile.verfy: unknown key (did you mean 'verify'?)" in two
    assert "runner 'third': torch_compile.options: the key 3 is not text; write '3'" in three


def test_a_section_of_another_model_is_warned_about_with_the_runners_name(tmp_path: Path) -> None:
    script = 'logging.basicConfig(stream=sys.stdout, force=True)\nlocal(bentoml.legacy.Runner(Classify, name="tiny"))'
    printed = output(tmp_path, script, **overrides(tiny={"models": {"tinyy": {"mode": "default"}}}))
    assert "runner 'tiny': torch_compile.models.tinyy is not used (did you mean 'tiny'?)" in printed


def test_a_subclass_must_say_what_to_load_and_with_which_examples(tmp_path: Path) -> None:
    script = """
class Nothing(CompiledRunnable):
    pass

class Model(CompiledRunnable):
    def load_model(self):
        return classifier()

for cls in (Nothing, Model):
    try:
        cls()
    except NotImplementedError as error:
        print(error)
"""
    assert output(tmp_path, script).splitlines() == [
        "Nothing must define load_model()",
        "Model must define example_inputs()",
    ]


def test_an_init_of_its_own_that_does_not_call_the_compiled_runnables_is_refused_where_it_runs(tmp_path: Path) -> None:
    script = """
class Own(Classify):
    def __init__(self, scale, torch_compile=None):
        if scale:
            super().__init__(torch_compile)
            assert self.model.report.engine == "jit"  # it is there before the rest of __init__
        self.scale = scale

class Below(Own):
    pass

class Later(Own):
    def __init__(self):
        Own.__init__(self, 0)
        CompiledRunnable.__init__(self)

def runner(cls, **params):
    return bentoml.legacy.Runner(cls, name="tiny", runnable_init_params=params)

for cls in (Own, Below):
    refused(lambda: local(runner(cls, scale=0)))
refused(lambda: Own(0))
for made in (runner(Own, scale=2, torch_compile={"time_limit": 7}), runner(Below, scale=3), runner(Later)):
    made = local(made)
    torch.testing.assert_close(made.classify.run(ids()), eager)
    print(made._runner_handle._runnable.scale, made._runner_handle._runnable.config.time_limit)
    made._runner_handle._runnable.model.close()
refused(runner_service(runner(Own, scale=0)))  # last: a service's config has none for runners
"""
    *refusals, own, below, later, service = output(tmp_path, script).splitlines()
    words = (
        "has compiled nothing; call super().__init__(torch_compile) in it, with its own parameter torch_compile=None"
    )
    assert [*refusals, service] == [f"{name}.__init__ {words}" for name in ("Own", "Below", "Own", "Own")]
    assert [own, below, later] == ["2 7.0", "3 11.0", "0 11.0"]


def test_a_runner_that_compiles_in_the_background_is_not_ready_until_it_is_over(tmp_path: Path) -> None:
    script = """
import asyncio, threading
from bentoml._internal.server.runner_app import RunnerAppFactory
from starlette.exceptions import HTTPException

go_on = threading.Event()

def waiting(graph, inputs):
    go_on.wait(60)
    return graph

torch._dynamo.register_backend(waiting, name="waiting")
runner = local(bentoml.legacy.Runner(Classify, name="tiny"))
app = RunnerAppFactory(runner)

async def readyz():
    try:
        return (await app.readyz(None)).status_code
    except HTTPException as error:
        return error.status_code

app.mark_as_ready(None)
print(asyncio.run(readyz()), asyncio.run(runner.runner_handle_is_ready()))
go_on.set()
model = runner._runner_handle._runnable.model
while not model.is_ready:
    threading.Event().wait(0.01)
print(asyncio.run(readyz()), asyncio.run(runner.runner_handle_is_ready()))
"""
    env = overrides(tiny={"startup": "background", "backend": "waiting"})
    assert output(tmp_path, script, **env) == "503 False\n200 True\n"


SAVED = """
class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x):
        return torch.tanh(self.linear(x))

    def embed(self, x):
        return self.linear(x) * 2

    def eager(self, x):
        return x + 1

module, x = Two().eval(), torch.ones(2, 4)
signatures = {"__call__": {"batchable": True, "batch_dim": 0}, "embed": {"batchable": False}, "eager": {}}
saved = bentoml.pytorch.save_model("two", module, signatures=signatures)
"""


def test_a_saved_pytorch_model_is_compiled_in_a_runner_that_is_otherwise_the_same(tmp_path: Path) -> None:
    script = f"""{SAVED}
plain = bentoml.pytorch.get("two").to_runner(name="pair", max_batch_size=7, max_latency_ms=90, embedded=True)
runner = compiled(plain, example_inputs=[(x,)], **EAGER)
for name in ("name", "models", "embedded", "scheduling_strategy", "runnable_init_params", "resource_config"):
    assert getattr(runner, name) == getattr(plain, name), name
rows = lambda one: [(m.name, m.config, m.max_batch_size, m.max_latency_ms) for m in one.runner_methods]
assert rows(runner) == rows(plain), rows(runner)
local(runner)
for given in (x, x.numpy()):
    torch.testing.assert_close(runner.run(given), module(x))
    torch.testing.assert_close(runner.embed.run(given), module.embed(x))
    torch.testing.assert_close(runner.eager.run(x=given), x + 1)
report = runner._runner_handle._runnable.model.report
print(report.model, report.engine, report.outcome)
"""
    assert output(tmp_path, script) == "pair jit compiled\n"


def test_several_methods_of_a_saved_model_are_compiled_each_under_a_name(tmp_path: Path) -> None:
    script = f"""{SAVED}
from bentoml_compile.compiled_model import open_models
both = {{"__call__": [(x,)], "embed": [(x,)]}}
runner = local(compiled(saved.to_runner(), example_inputs=both, **EAGER))
torch.testing.assert_close(runner.run(x), module(x))
torch.testing.assert_close(runner.embed.run(x), module.embed(x))
torch.testing.assert_close(runner.eager.run(x), x + 1)
print(*sorted((name, model.report.engine) for name, model in open_models.items()))
"""
    assert output(tmp_path, script) == "('two.embed', 'jit') ('two.forward', 'jit')\n"


def test_a_hand_written_runnable_that_keeps_its_model_is_compiled_as_it_is(tmp_path: Path) -> None:
    script = """
class HandWritten(bentoml.legacy.Runnable):
    SUPPORTED_RESOURCES, SUPPORTS_CPU_MULTI_THREADING = ("cpu",), True

    def __init__(self, scale):
        self.model, self.scale = classifier(), scale

    @method(batchable=True)
    def classify(self, rows):
        return self.model(rows)["logits"] * self.scale

plain = bentoml.legacy.Runner(HandWritten, name="tiny", runnable_init_params={"scale": 3})
runner = local(compiled(plain, example_inputs=[(ids(),)], **EAGER))
torch.testing.assert_close(runner.run(ids()), eager * 3)
print(runner._runner_handle._runnable.model.report.engine, runner._runner_handle._runnable.model.report.mode)
"""
    assert output(tmp_path, script, **overrides(tiny={"mode": "reduce-overhead"})) == "jit reduce-overhead\n"


def test_compiled_refuses_what_it_cannot_compile_with_the_runners_name(tmp_path: Path) -> None:
    script = f"""{SAVED}
class Scripted(bentoml.legacy.Runnable):
    SUPPORTED_RESOURCES, SUPPORTS_CPU_MULTI_THREADING = ("cpu",), True

    def __init__(self):
        self.model = torch.jit.trace(module, x)

    @method
    def run(self, x):
        return self.model(x)

Runner = bentoml.legacy.Runner
refused(lambda: local(compiled(Runner(Scripted, name="scripted"), example_inputs=[(x,)])))
refused(lambda: local(compiled(saved.to_runner(), example_inputs={{"embd": [(x,)]}})))
refused(lambda: compiled(saved.to_runner(), example_inputs={{}}))
refused(lambda: compiled(saved.to_runner(), example_inputs=[(x,)], mdoe="default"))
refused(lambda: compiled(Runner(Classify, name="tiny"), example_inputs=[(x,)]))
"""
    lines = output(tmp_path, script).splitlines()
    assert [line[: line.index("'", 8) + 1] for line in lines] == [
        "runner 'scripted'", "runner 'two'", "runner 'two'", "runner 'two'", "runner 'tiny'"
    ]  # fmt: skip
    assert "of which nothing can be compiled" in lines[0]
    assert "has no method 'embd' (did you mean 'embed'?)" in lines[1]
    assert "mdoe: unknown key (did you mean 'mode'?)" in lines[3]
    assert "compiles its model itself" in lines[4]


STORED_TRANSFORMER = """
import cloudpickle
from bentoml._internal.frameworks import transformers as home
from bentoml._internal.models.model import ModelContext
from transformers import BertConfig, BertModel

def stored(name, metadata):
    # as BentoML 1.x wrote it: its save_model fails with transformers 5
    return bentoml.models._create(
        name, module="bentoml.transformers", api_version="v2", labels={}, options=home.ModelOptions(),
        context=ModelContext(framework_name="transformers", framework_versions={"transformers": "4.30"}),
        signatures={"__call__": {"batchable": False}}, custom_objects=None, external_modules=None, metadata=metadata,
    )
"""


def test_a_transformers_model_that_bentoml_1_saved_is_compiled_and_a_pipeline_refused(tmp_path: Path) -> None:
    script = f"""{STORED_TRANSFORMER}
config = BertConfig(
    hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=11
)
bert, rows = BertModel(config).eval(), ids()
with stored("bert", {{"_pretrained_class": "BertModel", "_framework": "pt"}}) as model:
    bert.save_pretrained(model.path)
    with open(model.path_of(home.PRETRAINED_PROTOCOL_NAME), "wb") as file:
        cloudpickle.dump(BertModel, file)
with stored("pipeline", {{}}):
    pass
runner = compiled(bentoml.transformers.get("bert").to_runner(), example_inputs=[{{"input_ids": rows}}], **EAGER)
answer = local(runner).run(input_ids=rows)
torch.testing.assert_close(answer.last_hidden_state, bert(input_ids=rows).last_hidden_state)
print(type(answer).__name__, runner._runner_handle._runnable.model.report.engine)
refused(lambda: compiled(bentoml.transformers.get("pipeline").to_runner(), example_inputs=[{{"input_ids": rows}}]))
"""
    first, second = output(tmp_path, script).splitlines()[-2:]
    assert first == "BaseModelOutputWithPoolingAndCrossAttentions jit"
    assert "runner 'pipeline': pipeline:" in second
    assert "is a pipeline" in second


def test_a_runner_service_carries_the_runners_config_over_and_keeps_what_it_is_given(tmp_path: Path) -> None:
    env = {
        "BENTOML_CONFIG_OVERRIDES": json.dumps(
            {
                "runners": {
                    "batching": {"max_batch_size": 9, "max_latency_ms": 800},
                    "tiny": {
                        "resources": {"cpu": 1},
                        "workers_per_resource": 2,
                        "traffic": {"timeout": 33, "max_concurrency": 5},
                    },
                },
                "services": {"tiny": {"torch_compile": {"time_limit": 5}}},
            }
        )
    }
    script = """
params = {"torch_compile": {"mode": "reduce-overhead"}}
runner = bentoml.legacy.Runner(Classify, name="tiny", runnable_init_params=params, max_latency_ms=700)
service = runner_service(runner, torch_compile={"time_limit": 4, "fullgraph": True}, threads=3)
print(service.name, *(f"{key}={service.config[key]}" for key in ("workers", "resources", "traffic", "threads")))
api = service.apis["classify"]
print(api.batchable, api.batch_dim, api.max_batch_size, api.max_latency_ms, service.apis["settings"].batchable)
print(*(f"{one.name}={one.value}" for one in service.envs if one.name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")))
instance = service()
torch.testing.assert_close(instance.classify(ids()), eager)
print(instance.config.mode, instance.config.time_limit, instance.config.fullgraph, instance.model.report.model)
"""
    assert output(tmp_path, script, **env).splitlines() == [
        "tiny workers=2 resources={'cpu': 1.0} traffic={'timeout': 33, 'max_concurrency': 10} threads=3",
        "True (0, 0) 9 700 False",
        "CUDA_VISIBLE_DEVICES=-1 OMP_NUM_THREADS=1",
        "reduce-overhead 5.0 require tiny",
    ]


def test_a_runner_service_leaves_bentomls_own_alone(tmp_path: Path) -> None:
    script = "print(bentoml.runner_service.__module__, runner_service.__module__)"
    assert output(tmp_path, script) == "_bentoml_sdk.service.factory bentoml_compile.bento.runner_service\n"
