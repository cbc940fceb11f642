"""docs/configuration.md says what CompileConfig does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from bentoml_compile.config import CompileConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"


def rows(section: BaseModel, prefix: str = "") -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        assert isinstance(field.json_schema_extra, dict)
        default = getattr(section, name)
        nested = isinstance(default, BaseModel)
        shown = "each of its keys' own" if nested else str(default) if isinstance(default, str) else json.dumps(default)
        yield f"| `{prefix}{name}` | {field.json_schema_extra['allowed']} | {shown} | {field.description} |"
        if nested:
            yield from rows(default, f"{prefix}{name}.")


def test_the_table_has_every_key_with_its_values_default_and_meaning() -> None:
    table = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    expected = list(rows(CompileConfig()))
    assert table == expected, "the table should be:\n" + "\n".join(expected)
