"""What answers a compiled model's calls: which prepared shape serves a signature, and eager for the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bentoml_compile.padding import Padded, Padding
from bentoml_compile.prepared import PreparedShape
from bentoml_compile.ranges import Ranges, holds, open_signature, width
from bentoml_compile.shapes import Signature, by_name, fits, fitted, relaxed

_POLL_SECONDS = 0.001
_REMEMBERED = 1024  # signatures of each kind; a range holds many


@dataclass(frozen=True, slots=True)
class Found:
    """What serves a call. The code takes the arguments as they are here, or as `padded` fills them up."""

    shape: PreparedShape
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    padded: Padded | None = None


class Serving:
    """A table from signatures to prepared shapes; replaced whole, so that no call sees half of a change.

    Attributes:
        eager: the model as it is.
        calls: one entry for each call that is under way.
        exact: the prepared shape of each signature that needs nothing but this look-up.
    """

    def __init__(
        self,
        eager: Callable[..., Any],
        shapes: Sequence[PreparedShape],
        names: tuple[str, ...],
        ranges: Ranges,
        padding: Padding | None = None,
        before: Serving | None = None,
    ) -> None:
        self.eager = eager
        self.shapes = tuple(shapes)
        self.calls: list[None] = []  # to append and to pop is atomic, and takes 30 ns
        self._before = before  # the table that was switched from, whose calls may not be over
        if before is not None and before._before is not None and not before._before.calls:
            before._before = None  # or a chain of them would grow
        self.exact: dict[Signature | None, PreparedShape] = {}
        self._names = names
        self._ranges = ranges
        self._padding = padding
        self._learned: dict[Signature, PreparedShape] = {}
        self._by_copy: dict[Signature, PreparedShape] = {}
        self._open: dict[Signature, list[PreparedShape]] = {}
        self._direct: dict[Signature, PreparedShape] = {}  # found further away before: as they are,
        self._fitted: dict[Signature, PreparedShape] = {}  # or as a copy
        for shape in shapes:
            self._enter(shape)

    def _enter(self, shape: PreparedShape) -> None:
        signature = shape.signature
        if signature is None:
            return
        if shape.learned:
            self._learned[signature] = shape
        elif shape.sizes:
            alike = self._open.setdefault(open_signature(signature, self._ranges), [])
            alike.append(shape)
            alike.sort(key=lambda one: width(one.sizes))
            return
        else:
            self.exact[signature] = shape
        if not shape.writes_inputs:
            self._by_copy.setdefault(relaxed(signature), shape)

    def with_shapes(
        self,
        shapes: Sequence[PreparedShape],
        eager: Callable[..., Any],
        replaced: Mapping[PreparedShape, PreparedShape] | None = None,
    ) -> Serving:
        """The same calls, answered by others; `replaced`: which shape now stands for which."""
        padding = self._padding.of_shapes(replaced) if self._padding is not None and replaced else self._padding
        return Serving(eager, shapes, self._names, self._ranges, padding, before=self)

    def drain(self) -> None:
        """Waits for the calls under way, those that began before the switch to this table included; no new one begins
        here once another table is switched to.
        """
        if self._before is not None:
            self._before.drain()
            self._before = None
        while self.calls:
            time.sleep(_POLL_SECONDS)

    def look_further(self, signature: Signature | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found | None:
        """What serves a signature that is not an exact one; None if nothing was prepared for it.

        That is a shape that was learned, one that differs in nothing but what a copy of the tensors puts right, the
        narrowest range that holds the call's sizes, or else a shape that it can be padded up to.
        """
        if signature is None:
            return None
        if (shape := self._direct.get(signature) or self._learned.get(signature)) is not None:
            shape.uses += 1
            return Found(shape, args, kwargs)
        if (shape := self._fitted.get(signature)) is not None:
            shape.uses += 1
            return Found(shape, *fitted(shape.example, self._names, args, kwargs))
        if (shape := self._by_copy.get(relaxed(signature)) or self._range_of(signature, args, kwargs)) is not None:
            return self._found_by_copy(shape, signature, args, kwargs)
        return self._found_by_padding(signature, args, kwargs)

    def _found_by_copy(
        self, shape: PreparedShape, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Found | None:
        if fits(shape.example, self._names, args, kwargs, plainly=shape.compiled_by == "jit"):
            _remember(self._direct, signature, shape)
            return Found(shape, args, kwargs)
        if shape.writes_inputs:
            return None
        _remember(self._fitted, signature, shape)
        return Found(shape, *fitted(shape.example, self._names, args, kwargs))

    def _found_by_padding(self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found | None:
        padded = self._padding.find(signature, args, kwargs) if self._padding is not None else None
        if padded is None or padded.shape.run is None:
            return None
        return Found(padded.shape, args, kwargs, padded)

    def _range_of(self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PreparedShape | None:
        if not self._open:
            return None
        arguments = by_name(args, kwargs, self._names)
        alike = self._open.get(open_signature(signature, self._ranges), ())
        return next((shape for shape in alike if holds(shape.sizes, arguments)), None)


def _remember(found: dict[Signature, PreparedShape], signature: Signature, shape: PreparedShape) -> None:
    if len(found) >= _REMEMBERED:
        found.clear()
    found[signature] = shape
