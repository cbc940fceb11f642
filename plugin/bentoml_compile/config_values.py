"""Values of the config as they may be written, and what is made of them; each refuses the rest with ValueError."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

_MAX_PATH = 3000  # Linux allows 4096 bytes, and an artifact's files lie below
SECONDS = "a number above 0, at most 1e8"  # in words
_MAX_SECONDS = 1e8  # three years; the system's calls take no more than about 9e9


def fullgraph_word(value: Any) -> Any:
    return {True: "require", False: "allow_breaks"}[value] if isinstance(value, bool) else value


def verify_mapping(value: Any) -> Any:
    return {} if value is True else value


def _number(value: Any) -> Any:
    # YAML 1.1, which BentoML reads, takes 1e-3 for text
    return float(value) if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value) else value


def _dim(value: Any) -> Any:
    """A dimension's number: text, as every key of BentoML's config, or an int."""
    if isinstance(value, str) and re.fullmatch("0|[1-9][0-9]*", value):  # in one way: 0 and 00 would be one dimension
        return int(value)
    return value


def _range(value: Any) -> Any:
    if not isinstance(value, (list, tuple)) or len(value) != 2 or not all(type(size) is int for size in value):
        raise ValueError("not two sizes")
    low, high = value
    if not 1 <= low <= high:
        raise ValueError("not in order, or below 1")
    return low, high


def _rule(value: Any) -> Any:
    if value == "repeat" or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value
    raise ValueError("neither repeat nor a number")


def _path(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    expanded = os.path.expandvars(os.path.expanduser(value))
    if not expanded or "$" in expanded or "\0" in expanded or expanded.startswith("~") or len(expanded) > _MAX_PATH:
        raise ValueError("empty, too long, or a user or an environment variable that is not known")
    return Path(expanded)


def _uri(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    expanded = os.path.expandvars(value)
    if "$" in expanded or not re.fullmatch(r"[a-z][a-z0-9+.-]*:(:[a-z][a-z0-9+.-]*:)*//[^\0]+", expanded):
        raise ValueError("no URI, or an environment variable that is not known")
    start = re.match(r"[^/]*//+", expanded)
    assert start is not None
    return start[0] + expanded[start.end() :].rstrip("/")


def _public_key(value: str) -> str:
    from bentoml_compile.artifacts.signing import PublicKey

    return str(PublicKey.parse(value))


Dim = Annotated[int, BeforeValidator(_dim), Field(ge=0)]
Rule = Annotated[Literal["repeat"] | int | float, BeforeValidator(_rule)]
Range = Annotated[tuple[int, int], BeforeValidator(_range)]
Seconds = Annotated[float, BeforeValidator(_number), Field(gt=0, le=_MAX_SECONDS)]
Tolerance = Annotated[Annotated[float, Field(ge=0)] | None, BeforeValidator(_number)]
StorePath = Annotated[Path | None, BeforeValidator(_path)]
RemoteUri = Annotated[str | None, BeforeValidator(_uri)]
PublicKeyText = Annotated[str, AfterValidator(_public_key)]
