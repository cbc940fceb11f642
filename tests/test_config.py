"""CompileConfig: what is accepted, and in which words the rest is refused."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pydantic
import pytest

from bentoml_compile.artifacts.signing import PrivateKey
from bentoml_compile.config import CompileConfig, VerifyConfig, parse_config, parse_service_section
from bentoml_compile.errors import ConfigError

WHERE = "compile_model(name='encoder')"


@pytest.fixture(autouse=True)
def enabled_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        monkeypatch.delenv(name, raising=False)


def refusal(value: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(value, where=WHERE)
    return str(caught.value)


def test_nothing_set_gives_the_defaults() -> None:
    assert parse_config(None, where=WHERE) == parse_config({}, where=WHERE) == CompileConfig()


def test_a_config_object_is_taken_as_it_is() -> None:
    config = CompileConfig(mode="max-autotune", verify=VerifyConfig(rtol=0.1))
    assert parse_config(config, where=WHERE) == config


@pytest.mark.parametrize(
    ("key", "given", "meant"),
    [
        ("fullgraph", True, "require"),
        ("fullgraph", False, "allow_breaks"),
        ("verify", True, VerifyConfig()),
        ("verify", False, False),
        ("verify", {"rtol": 1}, VerifyConfig(rtol=1.0)),
        ("dynamic", None, None),
        ("dynamic", {"ids": {"0": [1, 8]}}, {"ids": {0: (1, 8)}}),
        ("time_limit", 5, 5.0),
        ("options", {"triton.cudagraphs": True}, {"triton.cudagraphs": True}),
    ],
)
def test_short_forms_mean_what_they_stand_for(key: str, given: object, meant: object) -> None:
    assert getattr(parse_config({key: given}, where=WHERE), key) == meant


@pytest.mark.parametrize(
    ("section", "path", "value", "allowed"),
    [
        ({"enabled": "yes"}, "torch_compile.enabled", "'yes'", "true, false"),
        ({"enabled": 1}, "torch_compile.enabled", "1", "true, false"),
        ({"mode": "fast"}, "torch_compile.mode", "'fast'", "default, reduce-overhead, max-autotune"),
        ({"fullgraph": 1}, "torch_compile.fullgraph", "1", "require (true), prefer, allow_breaks (false)"),
        (
            {"dynamic": "yes"},
            "torch_compile.dynamic",
            "'yes'",
            "null, true, false, {argument: {dimension: [min, max]}}",
        ),
        ({"dynamic": {}}, "torch_compile.dynamic", "{}", "null, true, false, {argument: {dimension: [min, max]}}"),
        (
            {"dynamic": {"ids": {}}},
            "torch_compile.dynamic.ids",
            "{}",
            "null, true, false, {argument: {dimension: [min, max]}}",
        ),
        (
            {"dynamic": {"ids": [1, 8]}},
            "torch_compile.dynamic.ids",
            "[1, 8]",
            "null, true, false, {argument: {dimension: [min, max]}}",
        ),
        (
            {"dynamic": {"ids": {"0": [8, 1]}}},
            "torch_compile.dynamic.ids.0",
            "[8, 1]",
            "null, true, false, {argument: {dimension: [min, max]}}",
        ),
        (
            {"dynamic": {"ids": {"0": [0, 8]}}},
            "torch_compile.dynamic.ids.0",
            "[0, 8]",
            "null, true, false, {argument: {dimension: [min, max]}}",
        ),
        (
            {"dynamic": {"ids": {"0": 8}}},
            "torch_compile.dynamic.ids.0",
            "8",
            "null, true, false, {argument: {dimension: [min, max]}}",
        ),
        (
            {"dynamic": {"ids": {"-1": [1, 8]}}},
            "torch_compile.dynamic.ids.-1",
            "'-1'",
            "null, true, false, {argument: {dimension: [min, max]}}",
        ),
        (
            {"dynamic": {"ids": {"00": [1, 8]}}},
            "torch_compile.dynamic.ids.00",
            "'00'",
            "null, true, false, {argument: {dimension: [min, max]}}",
        ),
        (
            {"dynamic": {"ids": {"x": [1, 8]}}},
            "torch_compile.dynamic.ids.x",
            "'x'",
            "null, true, false, {argument: {dimension: [min, max]}}",
        ),
        ({"engine": "aoti"}, "torch_compile.engine", "'aoti'", "auto, jit, aot"),
        ({"backend": ""}, "torch_compile.backend", "''", "the name of a torch.compile backend"),
        ({"options": {1: 2}}, "torch_compile.options.1", "1", "a mapping of option names"),
        ({"on_unprepared": "refuse"}, "torch_compile.on_unprepared", "'refuse'", "eager, reject, compile"),
        ({"prepare_after": 0}, "torch_compile.prepare_after", "0", "null, a whole number from 1"),
        ({"prepare_after": True}, "torch_compile.prepare_after", "True", "null, a whole number from 1"),
        ({"startup": "later"}, "torch_compile.startup", "'later'", "block, background"),
        ({"ready_when": None}, "torch_compile.ready_when", "None", "compiled, eager"),
        ({"pad": {}}, "torch_compile.pad", "{}", 'null, {argument: {dimension: "repeat" or a number to fill with}}'),
        ({"pad": {"ids": {"0": "last"}}}, "torch_compile.pad.ids.0", "'last'", "null, {argument: {dimension: "),
        ({"pad": {"ids": {"0": True}}}, "torch_compile.pad.ids.0", "True", "null, {argument: {dimension: "),
        ({"time_limit": "3"}, "torch_compile.time_limit", "'3'", "a number above 0"),
        ({"time_limit": True}, "torch_compile.time_limit", "True", "a number above 0"),
        ({"time_limit": float("inf")}, "torch_compile.time_limit", "inf", "a number above 0"),
        ({"time_limit": 0}, "torch_compile.time_limit", "0", "a number above 0"),
        ({"time_limit": 1.1e8}, "torch_compile.time_limit", "110000000.0", "a number above 0, at most 1e8"),
        (
            {"artifacts": {"remote_timeout": 1e20}},
            "torch_compile.artifacts.remote_timeout",
            "1e+20",
            "a number above 0, at most 1e8",
        ),
        ({"verify": None}, "torch_compile.verify", "None", "false, true, a mapping"),
        ({"verify": {"rtol": -1}}, "torch_compile.verify.rtol", "-1", "a number of at least 0, null"),
        (
            {"artifacts": None},
            "torch_compile.artifacts",
            "None",
            "a mapping (store, write, refresh, max_bytes, remote, remote_timeout, public_keys)",
        ),
        ({"artifacts": {"store": 3}}, "torch_compile.artifacts.store", "3", "a path"),
        ("fast", "torch_compile", "'fast'", "a mapping"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path_and_what_is_allowed(
    section: Any, path: str, value: str, allowed: str
) -> None:
    message = refusal(section)
    assert message.startswith(WHERE)
    (line,) = (line.strip() for line in message.splitlines()[1:])
    assert line.startswith(f"{path}: {value} is not allowed")
    assert f"allowed: {allowed}" in line


@pytest.mark.parametrize(
    ("section", "path", "nearest"),
    [
        ({"mode": "max_autotune"}, "torch_compile.mode", "max-autotune"),
        ({"mode": "MAX-AUTOTUNE"}, "torch_compile.mode", "max-autotune"),
        ({"fullgraph": "allow-breaks"}, "torch_compile.fullgraph", "allow_breaks"),
        ({"moed": "default"}, "torch_compile.moed", "mode"),
        ({"verify": {"rtoll": 1}}, "torch_compile.verify.rtoll", "rtol"),
        ({"verify": {"on_laod": True}}, "torch_compile.verify.on_laod", "on_load"),
        ({"artifacts": {"refesh": True}}, "torch_compile.artifacts.refesh", "refresh"),
    ],
)
def test_a_near_miss_is_told_the_nearest_known_name(section: dict[str, Any], path: str, nearest: str) -> None:
    message = refusal(section)
    assert f"{path}: " in message
    assert f"(did you mean '{nearest}'?)" in message


@pytest.mark.parametrize("other", ["remote", "models"])
def test_a_key_of_another_place_is_unknown_and_the_known_ones_are_listed(other: str) -> None:
    message = refusal({other: None})
    assert f"torch_compile.{other}: unknown key" in message
    assert "known: enabled, mode, fullgraph" in message


def test_all_problems_stand_in_one_message() -> None:
    message = refusal({"mode": "fast", "enabled": 3, "verify": {"rtol": "a", "what": 1}})
    paths = [line.split(":")[0].strip() for line in message.splitlines()[1:]]
    assert sorted(paths) == [
        "torch_compile.enabled",
        "torch_compile.mode",
        "torch_compile.verify.rtol",
        "torch_compile.verify.what",
    ]


def test_a_config_object_made_by_hand_is_refused_in_the_same_words() -> None:
    with pytest.raises(ConfigError, match=r"torch_compile\.mode: 'max_autotune' .*did you mean 'max-autotune'"):
        CompileConfig(mode="max_autotune")  # type: ignore[arg-type]


def test_a_config_is_frozen_and_keeps_its_own_copy_of_the_options() -> None:
    options = {"nested": {"a": 1}}
    config = parse_config({"options": options}, where=WHERE)
    options["nested"]["a"] = 2
    assert config.options == {"nested": {"a": 1}}
    with pytest.raises(pydantic.ValidationError):
        config.mode = "max-autotune"


def test_the_store_expands_home_and_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("CACHE", "kept")
    config = parse_config({"artifacts": {"store": "~/$CACHE/compile"}}, where=WHERE)
    assert config.artifacts.store == Path("/home/me/kept/compile")


def test_a_store_in_an_environment_variable_that_is_not_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CACHE", raising=False)
    assert "torch_compile.artifacts.store: '$CACHE/compile'" in refusal({"artifacts": {"store": "$CACHE/compile"}})


GOOD_KEY = str(PrivateKey.new().public)


@pytest.mark.parametrize(
    "key",
    [
        "ed25519:" + base64.b64encode(bytes(32)).decode(),  # of small order
        "ed25519:" + "A" * 41 + "AB=",  # the last character has bits that no encoder sets
        GOOD_KEY.removeprefix("ed25519:"),
        GOOD_KEY + "\n",
        "",
    ],
    ids=["small order", "not canonical", "bare", "newline", "empty"],
)
def test_a_public_key_that_counts_for_nobody_is_refused_by_its_index(key: str) -> None:
    message = refusal({"artifacts": {"public_keys": [GOOD_KEY, key]}})
    assert f"torch_compile.artifacts.public_keys.1: {key!r} is not allowed" in message
    assert "public_keys.0" not in message


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("file:///", "file:///"),
        ("memory:///", "memory:///"),
        ("memory://", "refused"),
        ("file:///a/b//", "file:///a/b"),
        ("s3://bucket/", "s3://bucket"),
        ("simplecache::s3://bucket/models/", "simplecache::s3://bucket/models"),
    ],
)
def test_a_remote_loses_only_the_slashes_behind_its_path(given: str, meant: str) -> None:
    if meant == "refused":
        assert f"torch_compile.artifacts.remote: {given!r}" in refusal({"artifacts": {"remote": given}})
        return
    config = parse_config({"artifacts": {"remote": given}}, where=WHERE)
    assert config.artifacts.remote == meant
    assert parse_config(config.model_dump(), where=WHERE) == config


@pytest.mark.parametrize("variable", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
@pytest.mark.parametrize(("value", "enabled"), [("1", False), ("0", True), ("true", True)])
def test_torchs_own_switches_turn_compiling_off_by_torchs_own_rule(
    variable: str, value: str, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert parse_config({"enabled": True}, where=WHERE).enabled is enabled
    assert parse_config(CompileConfig(), where=WHERE).enabled is enabled


def test_a_models_section_is_merged_over_the_services_keys() -> None:
    section = parse_service_section(
        {
            "mode": "max-autotune",
            "verify": {"rtol": 0.1},
            "models": {"encoder": {"mode": "default", "verify": {"strict": True}}},
        },
        service="Embedder",
    )
    encoder, other = section.for_model("encoder"), section.for_model("other")
    assert (encoder.mode, encoder.verify) == ("default", VerifyConfig(rtol=0.1, strict=True))
    assert (other.mode, other.verify) == ("max-autotune", VerifyConfig(rtol=0.1))


@pytest.mark.parametrize("below", [True, False])
def test_a_models_mapping_replaces_a_services_plain_switch(below: bool) -> None:
    section = parse_service_section({"verify": below, "models": {"encoder": {"verify": {"rtol": 1}}}}, service="S")
    assert section.for_model("encoder").verify == VerifyConfig(rtol=1.0)


def test_every_models_section_is_checked_at_once_and_named() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_service_section(
            {"model": {}, "models": {"encoder": {"verify": {"rtol": "a"}}, "decoder": None, "head": {"models": {}}}},
            service="Embedder",
        )
    message = str(caught.value)
    assert message.startswith("service 'Embedder'")
    assert "torch_compile.model: unknown key (did you mean 'models'?)" in message
    assert "torch_compile.models.encoder.verify.rtol: 'a' is not allowed" in message
    assert "torch_compile.models.decoder: None is not allowed" in message
    assert "torch_compile.models.head.models: unknown key" in message


@pytest.mark.parametrize("models", [None, "encoder", ["encoder"]])
def test_models_must_be_a_mapping(models: object) -> None:
    with pytest.raises(ConfigError, match=r"torch_compile\.models: .* a mapping of model names"):
        parse_service_section({"models": models}, service="Embedder")


def test_sections_that_no_model_used_are_told() -> None:
    section = parse_service_section({"models": {"encoder": {}, "decoder": {}}}, service="Embedder")
    assert section.unused({"encoder", "other"}) == ["decoder"]
