"""Where a process's artifacts lie, apart from what the config of a model says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Places:
    """Beside what the config names.

    Attributes:
    store: where artifacts are kept if the config names no place; None: nowhere.
    bundle: the artifacts that came with the Bento; None: there is no Bento and no service.
    """

    store: Path | None = None
    bundle: Path | None = None


NO_PLACES = Places()
