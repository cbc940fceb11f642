"""CompileConfig: how one model is compiled. Knows neither BentoML nor where a setting came from."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    Tag,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.fields import FieldInfo
from typing_extensions import Self

from bentoml_compile.config_values import (
    SECONDS,
    Dim,
    PublicKeyText,
    Range,
    RemoteUri,
    Rule,
    Seconds,
    StorePath,
    Tolerance,
    fullgraph_word,
    verify_mapping,
)
from bentoml_compile.errors import ConfigError

Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
FullGraph = Literal["require", "prefer", "allow_breaks"]
Engine = Literal["auto", "jit", "aot"]
OnUnprepared = Literal["eager", "reject", "compile"]
When = Literal["block", "background"]
Ready = Literal["compiled", "eager"]

SECTION = "torch_compile"  # the key under a BentoML service's config, and the start of every dotted path in a message


def _key(default: Any, allowed: str, description: str, **constraints: Any) -> Any:
    """A key of the config: what it may be and what it means, in the words of error messages and docs."""
    extra: dict[str, Any] = {"allowed": allowed}
    return Field(default=default, description=description, json_schema_extra=extra, **constraints)


def _words(literal: Any) -> str:
    return ", ".join(get_args(literal))


def _verify_branch(value: Any) -> str | None:
    if value is False:
        return "off"
    return "on" if isinstance(value, dict | VerifyConfig) else None


def _mapping_branch(value: Any) -> str:
    return "mapping" if isinstance(value, dict) else "none"


def _dynamic_branch(value: Any) -> str | None:
    return "ranges" if isinstance(value, dict) else "flag"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class VerifyConfig(_Section):
    """How far a compiled model's results may be from the eager model's."""

    rtol: Tolerance = _key(None, "a number of at least 0, null", "relative tolerance; null: by the dtype")
    atol: Tolerance = _key(None, "a number of at least 0, null", "absolute tolerance; null: by the dtype")
    strict: bool = _key(False, "true, false", "a mismatch stops the boot instead of serving eagerly")
    on_load: bool = _key(False, "true, false", "verify a model that was loaded from an artifact, too")


class ArtifactsConfig(_Section):
    """Where compiled artifacts are kept, on this machine and for others."""

    store: StorePath = _key(
        None, "a path (~ and environment variables are expanded), null", "folder; null: $BENTOML_HOME/compile"
    )
    write: bool = _key(True, "true, false", "keep what this boot compiles")
    refresh: bool = _key(False, "true, false", "compile again, whatever is stored")
    max_bytes: Annotated[int | None, Field(ge=0)] = _key(
        None,
        "null, a whole number from 0",
        "the folder's size; the least recently used that is not in use goes first",
    )
    remote: RemoteUri = _key(
        None, "an fsspec URI (s3://, gs://, abfs://, file://, ...), null", "a place that machines share"
    )
    remote_timeout: Seconds = _key(5.0, SECONDS, "seconds that the remote may delay a boot")
    public_keys: list[PublicKeyText] = _key(
        [], "a list of ed25519:<base64>", "whose signatures make an artifact of the remote loadable"
    )


class CompileConfig(_Section):
    """How one model is compiled; every value is checked, and frozen.

    Raises:
        ConfigError: a key or value that is not known, with the nearest one that is.
    """

    enabled: bool = _key(True, "true, false", "false: serve eagerly, as with TORCH_COMPILE_DISABLE=1")
    mode: Mode = _key("default", _words(Mode), "torch.compile's mode")
    fullgraph: Annotated[FullGraph, BeforeValidator(fullgraph_word)] = _key(
        "prefer",
        "require (true), prefer, allow_breaks (false)",
        "require: a graph break stops the boot; prefer: one graph if possible",
    )
    dynamic: Annotated[
        Annotated[dict[str, Annotated[dict[Dim, Range], Field(min_length=1)]], Tag("ranges"), Field(min_length=1)]
        | Annotated[bool | None, Tag("flag")],
        Discriminator(_dynamic_branch),
    ] = _key(
        None,
        "null, true, false, {argument: {dimension: [min, max]}} with 1 <= min <= max",
        "sizes that one compiled graph serves: these ranges; or torch.compile's dynamic (null: sizes that change)",
    )
    engine: Engine = _key(
        "auto",
        _words(Engine),
        "jit: torch.compile; aot: torch.export and AOTInductor; auto: aot where the model can be exported",
    )
    backend: str = _key("inductor", "the name of a torch.compile backend", "torch.compile's backend", min_length=1)
    options: dict[str, Any] = _key(
        {}, "a mapping of option names (text) to values", "the backend's options; for inductor they override the mode's"
    )
    on_unprepared: OnUnprepared = _key(
        "eager",
        _words(OnUnprepared),
        "what answers an input of a shape not prepared: the model, HTTP 422, or code compiled while the request waits",
    )
    prepare_after: Annotated[int | None, Field(ge=1)] = _key(
        None, "null, a whole number from 1", "a shape not prepared that is seen so often is compiled in the background"
    )
    pad: Annotated[
        Annotated[dict[str, Annotated[dict[Dim, Rule], Field(min_length=1)]], Tag("mapping"), Field(min_length=1)]
        | Annotated[None, Tag("none")],
        Discriminator(_mapping_branch),
    ] = _key(
        None,
        'null, {argument: {dimension: "repeat" or a number to fill with}}',
        "dimensions that are padded up to the next prepared size; switched on where real rows stay the same",
    )
    startup: When = _key(
        "block", _words(When), "background: the model answers eagerly until a compile in the background is over"
    )
    ready_when: Ready = _key(
        "compiled", _words(Ready), "with startup: background, when /readyz says so; eager: as soon as the model answers"
    )
    time_limit: Seconds = _key(1800.0, SECONDS, "seconds for compiling at start-up, then eager")
    keep_eager_if_slower: bool = _key(True, "true, false", "serve a shape eagerly where compiled is slower")
    verify: Annotated[
        Annotated[VerifyConfig, Tag("on")] | Annotated[Literal[False], Tag("off")],
        Discriminator(_verify_branch),
        BeforeValidator(verify_mapping),
    ] = _key(VerifyConfig(), "false, true, a mapping (rtol, atol, strict, on_load)", "compare with the eager model")
    artifacts: ArtifactsConfig = _key(
        ArtifactsConfig(),
        "a mapping (store, write, refresh, max_bytes, remote, remote_timeout, public_keys)",
        "what is kept for the next boot",
    )

    @property
    def ranges(self) -> Mapping[str, Mapping[int, tuple[int, int]]]:
        """`dynamic`, where it gives ranges; else empty."""
        return self.dynamic if isinstance(self.dynamic, dict) else {}

    @property
    def may_export(self) -> bool:
        """Whether the ahead-of-time engine is to be tried, and can make what these keys ask for together."""
        return self.engine != "jit" and self.makes_one_graph

    @property
    def makes_one_graph(self) -> bool:
        """Whether the keys ask for one graph of fixed sizes or given ranges by Inductor."""
        return self.fullgraph != "allow_breaks" and self.backend == "inductor" and self.dynamic is not True

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_in_our_words(cls, value: Any, check: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        try:
            return check(value)
        except ValidationError as error:
            if info.context == _WORDED_BY_CALLER:
                raise
            raise _refusal("CompileConfig", _lines(error, SECTION)) from None


_WORDED_BY_CALLER = "worded by caller"  # a validation context: the caller knows the place and words the errors


def parse_config(value: Mapping[str, Any] | CompileConfig | None, *, where: str) -> CompileConfig:
    """The config of one model.

    Args:
        value: keys of CompileConfig, such a config, or None for the defaults.
        where: who asks, for messages, e.g. "compile_model(name='encoder')".

    Returns:
        The config; not `enabled` if TORCH_COMPILE_DISABLE=1 or TORCHDYNAMO_DISABLE=1 is set.

    Raises:
        ConfigError: all that is wrong, one line each: the key, the value, what is allowed, the nearest known name.
    """
    if isinstance(value, CompileConfig):
        config = value
    else:
        section = {} if value is None else value
        _refuse(where, _problems(section, SECTION))
        config = CompileConfig.model_validate(_plain(section))
    return config.model_copy(update={"enabled": False}) if _disabled_by_environment() else config


@dataclass(frozen=True, slots=True)
class ServiceSection:
    """The checked `torch_compile` section of one service or runner; made by `parse_service_section`.

    Attributes:
        where: whose it is, for messages, e.g. "service 'Embedder'".
    """

    where: str
    keys: Mapping[str, Any]
    models: Mapping[str, Mapping[str, Any]]

    def for_model(self, name: str) -> CompileConfig:
        """The service's keys, with those of `models.<name>` merged over them, mapping by mapping."""
        return parse_config(merged(self.keys, self.models.get(name, {})), where=self.where)

    def unused(self, used: Collection[str]) -> list[str]:
        """The names under `models` that are not in `used`."""
        return [name for name in self.models if name not in used]


def parse_service_section(section: Mapping[str, Any] | None, *, service: str, kind: str = "service") -> ServiceSection:
    """Check a service's whole `torch_compile` section, each of its per-model sections included.

    Args:
        section: keys of CompileConfig and `models`: a mapping of model names to such keys. None: nothing is set.
        service: the service's name, for messages.
        kind: what it is, for messages.

    Raises:
        ConfigError: all that is wrong, one line each, as for `parse_config`.
    """
    where = f"{kind} {service!r}"
    if section is None:
        return ServiceSection(where, {}, {})
    if not isinstance(section, Mapping):
        raise _refusal(where, _problems(section, SECTION))
    keys = {key: value for key, value in section.items() if key != "models"}
    models = section.get("models", {})
    problems = _problems(keys, SECTION, also_known=("models",))
    if isinstance(models, Mapping):
        for name, overrides in models.items():
            problems += _problems(overrides, f"{SECTION}.models.{name}")
    else:
        problems.append(f"{SECTION}.models: {models!r} is not allowed; allowed: a mapping of model names to mappings")
    _refuse(where, problems)
    return ServiceSection(where, _plain(keys), _plain(models))


def nearest(word: object, known: Iterable[str]) -> str:
    """' (did you mean ...?)' for a word close to a known one, else ''."""
    matches = difflib.get_close_matches(str(word).lower(), list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `over` laid on it, mapping by mapping; neither is changed."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


def _disabled_by_environment() -> bool:
    # torch knows no other value than "1" (torch 2.13: torch/_dynamo/config.py and eval_frame.py).
    return any(os.environ.get(name) == "1" for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"))


def _refuse(where: str, problems: list[str]) -> None:
    if problems:
        raise _refusal(where, problems)


def _refusal(where: str, problems: list[str]) -> ConfigError:
    return ConfigError("\n  ".join([f"{where}: torch_compile cannot be used like this", *problems]))


def _problems(section: object, path: str, also_known: tuple[str, ...] = ()) -> list[str]:
    if not isinstance(section, Mapping):
        return [f"{path}: {section!r} is not allowed; allowed: a mapping of keys to values"]
    try:
        CompileConfig.model_validate(_plain(section), context=_WORDED_BY_CALLER)
    except ValidationError as error:
        return _lines(error, path, also_known)
    return []


def _lines(error: ValidationError, path: str, also_known: tuple[str, ...] = ()) -> list[str]:
    return [
        _line(detail["type"], detail["loc"], detail["input"], path, also_known)
        for detail in error.errors(include_url=False, include_context=False)
    ]


def _line(kind: str, location: tuple[int | str, ...], value: object, path: str, also_known: tuple[str, ...]) -> str:
    names, field, section = _locate(location)
    dotted = ".".join([path, *names])
    if kind in ("extra_forbidden", "invalid_key"):
        known = [*section.model_fields, *(also_known if section is CompileConfig else ())]
        return f"{dotted}: unknown key{nearest(names[-1], known)}, value {value!r}; known: {', '.join(known)}"
    assert field is not None
    assert isinstance(field.json_schema_extra, dict)  # every key is made by _key
    hint = nearest(value, filter(_is_text, get_args(field.annotation))) if isinstance(value, str) else ""
    return f"{dotted}: {value!r} is not allowed{hint}; allowed: {field.json_schema_extra['allowed']}"


def _locate(location: tuple[int | str, ...]) -> tuple[list[str], FieldInfo | None, type[BaseModel]]:
    """The names on the way to an error, the last known key on it, and the section that the last name stands in."""
    names: list[str] = []
    section: type[BaseModel] = CompileConfig
    field: FieldInfo | None = None
    parts = iter(location)
    for part in parts:
        names.append(str(part))
        found = section.model_fields.get(str(part))
        if found is None:
            break
        field = found
        nested = _section_in(field)
        if any(isinstance(item, Discriminator) for item in field.metadata):
            next(parts, None)  # pydantic puts the branch's tag into the location
        if nested is None:
            break
        section = nested
    names += [str(part) for part in parts if part != "[key]"]
    return names, field, section


def _section_in(field: FieldInfo) -> type[BaseModel] | None:
    for kind in (field.annotation, *(get_args(part)[0] for part in get_args(field.annotation) if get_args(part))):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _plain(value: Any) -> Any:
    """A deep copy in which every mapping is a dict, as pydantic's strict mode wants it."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value
