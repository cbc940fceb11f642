"""CompileConfig: how one model is compiled. Knows neither BentoML nor where a setting came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
FullGraph = Literal["require", "prefer", "allow_breaks"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class VerifyConfig(_Section):
    rtol: float | None = Field(default=None, ge=0)  # None: torch.testing's default for the output's dtype
    atol: float | None = Field(default=None, ge=0)
    strict: bool = False
    on_load: bool = False


class ArtifactsConfig(_Section):
    store: Path | None = None  # None: $BENTOML_HOME/compile
    write: bool = True
    refresh: bool = False


class CompileConfig(_Section):
    enabled: bool = True
    mode: Mode = "default"
    fullgraph: FullGraph = "prefer"
    dynamic: bool | None = None
    engine: Literal["auto", "jit"] = "auto"
    backend: str = "inductor"
    options: dict[str, Any] = Field(default_factory=dict)
    on_unprepared: Literal["eager", "reject"] = "eager"
    time_limit: float = Field(default=1800, gt=0)
    keep_eager_if_slower: bool = True
    verify: VerifyConfig | Literal[False] = VerifyConfig()
    artifacts: ArtifactsConfig = ArtifactsConfig()
