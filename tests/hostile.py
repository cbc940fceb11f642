"""Calls that a compiled model was not made for, drawn by hypothesis: small, printable and repeatable values.

A call starts from the prepared one; up to two tensors in it, its structure and what it runs under may be wrong.
"""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

WORDS, WIDTH, BATCH, LENGTH, COLUMNS = 11, 8, 2, 128, 5  # long enough for jit code to run in several threads

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Tagger(nn.Module):
    """Looks up what its inputs say, directly and (if `positions`) by a sum over the mask, and returns many things."""

    def __init__(self, positions: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH) if positions else None
        self.head = nn.Linear(WIDTH, 3)

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, extra: dict[str, Any], flag: bool = False, scale: float = 1.0
    ) -> dict[str, Any]:
        hidden = self.embedding(ids) * mask.unsqueeze(-1)
        if self.positions is not None:
            hidden = hidden + self.positions(mask.cumsum(1) - 1)
        left, right = extra["pair"]
        [image] = extra["images"]
        pooled = torch.tanh(hidden.sum(1) * left + right)
        return {
            "logits": self.head(pooled) * scale,
            "columns": image[:, extra["columns"]] + torch.ones(2),  # of the default dtype
            "alias": image.transpose(0, 1),
            "facts": (flag, None, [ids + 1]),
        }


@dataclass(frozen=True)
class Given:
    """One tensor of a call; `build` makes it, each time the same."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    values: str = "random"
    layout: str = "contiguous"
    kind: str = "plain"
    high: int = 2  # of random integers, exclusive
    seed: int = 0

    def build(self) -> torch.Tensor:
        with torch.inference_mode(self.kind == "inference"):
            return KINDS[self.kind](LAYOUTS[self.layout](VALUES[self.values](self)))


def _random(given: Given) -> torch.Tensor:
    generator = torch.Generator().manual_seed(given.seed)
    if given.dtype.is_floating_point or given.dtype.is_complex:
        return torch.randn(given.sizes, generator=generator, dtype=torch.float64).to(given.dtype)
    return torch.randint(0, given.high, given.sizes, generator=generator).to(given.dtype)


def _with_one(value: float) -> Callable[[Given], torch.Tensor]:
    """Random values but for one, or but for none where the dtype has no such value."""

    def fill(given: Given) -> torch.Tensor:
        tensor = _random(given)
        floating = given.dtype.is_floating_point or given.dtype.is_complex
        if tensor.numel() and (floating or (math.isfinite(value) and given.dtype.is_signed)):
            tensor.view(-1)[given.seed % tensor.numel()] = (
                max(value, torch.iinfo(given.dtype).min) if not floating else value
            )
        return tensor

    return fill


VALUES: dict[str, Callable[[Given], torch.Tensor]] = {
    "random": _random,
    "ones": lambda given: torch.ones(given.sizes, dtype=given.dtype),
    "zeros": lambda given: torch.zeros(given.sizes, dtype=given.dtype),
    "one too high": lambda given: _with_one(given.high)(given),
    "one far too high": _with_one(100),
    "one negative": _with_one(-1),
    "one very negative": _with_one(-(2.0**62)),
    "one NaN": _with_one(math.nan),
    "one infinite": _with_one(math.inf),
}


def _in_larger(tensor: torch.Tensor, *, start: int, step: int) -> torch.Tensor:
    """The same values as a view of every `step`th element of a larger tensor, from the `start`th on."""
    larger = tensor.new_ones(start + step * tensor.numel())
    view = larger[start::step][: tensor.numel()]
    return view.copy_(tensor.reshape(-1)).as_strided(
        tensor.shape, [step * stride for stride in tensor.contiguous().stride()], start
    )


def _negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same values behind the negative bit: the memory holds minus them."""
    return torch.complex(tensor, -tensor).conj().imag if tensor.dtype in (torch.float32, torch.float64) else tensor


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor,
    "expanded": lambda tensor: tensor[:1].expand(tensor.shape) if tensor.dim() and len(tensor) else tensor,
    "flipped": lambda tensor: tensor.flip(0).flip(0) if tensor.dim() else tensor,
    "every second": lambda tensor: _in_larger(tensor, start=0, step=2),
    "with offset": lambda tensor: _in_larger(tensor, start=3, step=1),
    "unaligned": lambda tensor: _in_larger(tensor, start=1, step=1),
    "negative": _negative_view,
    "sparse": lambda tensor: tensor.to_sparse(),
}


class Marked(torch.Tensor):
    """A subclass without behaviour."""


KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "plain": lambda tensor: tensor,
    "requires grad": lambda tensor: tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex()),
    "result of grad": lambda tensor: tensor.requires_grad_() * 1 if tensor.is_floating_point() else tensor,
    "parameter": lambda tensor: nn.Parameter(tensor, requires_grad=False),
    "inference": lambda tensor: tensor,
    "subclass": lambda tensor: tensor.as_subclass(Marked) if tensor.layout is torch.strided else tensor,
    "meta": lambda tensor: tensor.to("meta"),
    "array": lambda tensor: tensor.resolve_neg().numpy() if tensor.layout is torch.strided else tensor,
    "list": lambda tensor: tensor.tolist() if tensor.layout is torch.strided else tensor,
    "none": lambda tensor: None,
}

DTYPES = (
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.float32,
    torch.float64,
    torch.float16,
    torch.complex64,
)
SIZES: tuple[tuple[int, ...], ...] = (
    (BATCH, LENGTH),
    (1, LENGTH),
    (BATCH, LENGTH - 1),
    (LENGTH, BATCH),
    (BATCH, WIDTH),
    (BATCH, 1, LENGTH),
    (LENGTH,),
)
SIZES += ((0, LENGTH), (BATCH, 0), (), (3, COLUMNS), (WIDTH, BATCH), (1,))

PREPARED: dict[str, Given] = {
    "ids": Given((BATCH, LENGTH), torch.int64, high=WORDS),
    "mask": Given((BATCH, LENGTH), torch.int64, values="ones"),
    "left": Given((BATCH, WIDTH), torch.float32),
    "right": Given((BATCH, WIDTH), torch.float32),
    "image": Given((3, COLUMNS), torch.float32),
    "columns": Given((2,), torch.int64, high=COLUMNS),
}


def _as_prepared(ids: Any, mask: Any, extra: dict[str, Any]) -> Arguments:
    return (), {"ids": ids, "mask": mask, "extra": extra, "flag": True, "scale": 2.0}


def _with(**constants: Any) -> Callable[[Any, Any, dict[str, Any]], Arguments]:
    return lambda ids, mask, extra: ((), {**_as_prepared(ids, mask, extra)[1], **constants})


def _with_extra(change: Callable[[dict[str, Any]], Any]) -> Callable[[Any, Any, dict[str, Any]], Arguments]:
    return lambda ids, mask, extra: _as_prepared(ids, mask, change(extra))


RIGHT = {
    "keywords": _as_prepared,
    "positions": lambda ids, mask, extra: ((ids, mask, extra, True, 2.0), {}),
    "mixed": lambda ids, mask, extra: ((ids, mask), {"scale": 2.0, "extra": extra, "flag": True}),
}
WRONG = {
    "nothing": lambda ids, mask, extra: ((), {}),
    "no mask": lambda ids, mask, extra: ((ids,), {"extra": extra, "flag": True, "scale": 2.0}),
    "only tensors": lambda ids, mask, extra: ((ids, mask, extra), {}),
    "too many": lambda ids, mask, extra: ((ids, mask, extra, True, 2.0, ids), {}),
    "twice": lambda ids, mask, extra: ((ids,), _as_prepared(ids, mask, extra)[1]),
    "all twice": lambda ids, mask, extra: ((ids, mask, extra, True, 2.0), _as_prepared(ids, mask, extra)[1]),
    "two ids": lambda ids, mask, extra: ((mask,), _as_prepared(ids, mask, extra)[1]),
    "swapped": lambda ids, mask, extra: _as_prepared(mask, ids, extra),
    "one for two": lambda ids, mask, extra: _as_prepared(mask, mask, extra),
    "unknown": _with(token_type_ids=None),
    "flag off": _with(flag=False),
    "flag 1": _with(flag=1),
    "scale 3": _with(scale=3.0),
    "scale of ints": _with(scale=2),
    "scale NaN": _with(scale=math.nan),
    "scale tensor": _with(scale=torch.tensor(2.0)),
    "scale text": _with(scale="2.0"),
    "no ids": _with(ids=None),
    "ids number": _with(ids=3),
    "ids text": _with(ids="3"),
    "no extra": _with(extra=None),
    "extra list": _with_extra(lambda extra: list(extra.values())),
    "extra key": _with_extra(lambda extra: {**extra, "more": None}),
    "extra reordered": _with_extra(lambda extra: dict(reversed(extra.items()))),
    "extra of another class": _with_extra(collections.UserDict),
    "extra with a default": _with_extra(lambda extra: collections.defaultdict(list, extra)),
    "extra without columns": _with_extra(lambda extra: {key: extra[key] for key in ("pair", "images")}),
    "extra with an object": _with_extra(lambda extra: {**extra, "more": object()}),
    "pair of one": _with_extra(lambda extra: {**extra, "pair": extra["pair"][:1]}),
    "pair of three": _with_extra(lambda extra: {**extra, "pair": extra["pair"] * 2}),
    "pair of the same": _with_extra(lambda extra: {**extra, "pair": (extra["pair"][0],) * 2}),
    "pair as list": _with_extra(lambda extra: {**extra, "pair": list(extra["pair"])}),
    "pair as tensor": _with_extra(lambda extra: {**extra, "pair": extra["pair"][0]}),
    "images as tuple": _with_extra(lambda extra: {**extra, "images": tuple(extra["images"])}),
    "no images": _with_extra(lambda extra: {**extra, "images": []}),
}
STRUCTURES: dict[str, Callable[[Any, Any, dict[str, Any]], Arguments]] = {**RIGHT, **WRONG}


@contextlib.contextmanager
def _setting(get: Callable[[], Any], set_: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = get()
    set_(value)
    try:
        yield
    finally:
        set_(before)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to half": lambda: torch.autocast("cpu", dtype=torch.float16),
    "deterministic": lambda: _setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "float64 by default": lambda: _setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "meta by default": lambda: torch.device("meta"),
    "one thread": lambda: _setting(torch.get_num_threads, torch.set_num_threads, 1),
}


_HARMLESS_SURROUNDINGS = ("nothing", "no_grad", "enable_grad", "inference_mode")


@dataclass(frozen=True)
class HostileCall:
    """A call and what it runs under; tensors that are not `changed` are as prepared, with values of the `seed`."""

    seed: int = 0
    changed: tuple[tuple[str, Given], ...] = ()
    structure: str = "keywords"
    under: str = "nothing"
    length: int = LENGTH

    def is_as_prepared(self, lengths: Container[int]) -> bool:
        """Whether only values, or the length among the prepared ones, differ harmlessly: it must be served compiled."""
        right = self.structure in RIGHT and self.under in _HARMLESS_SURROUNDINGS
        return right and not self.changed and self.length in lengths

    @property
    def has_meta(self) -> bool:
        """Whether one of its tensors has no values."""
        return any(given.kind == "meta" for _, given in self.changed)

    def build(self) -> Arguments:
        """Positional and keyword arguments."""
        tensors = {name: replace(given, seed=self.seed + place) for place, (name, given) in enumerate(PREPARED.items())}
        made = {name: self._sized(name, given).build() for name, given in {**tensors, **dict(self.changed)}.items()}
        extra = {"pair": (made["left"], made["right"]), "images": [made["image"]], "columns": made["columns"]}
        return STRUCTURES[self.structure](made["ids"], made["mask"], extra)

    def _sized(self, name: str, given: Given) -> Given:
        if name not in ("ids", "mask"):
            return given
        return replace(given, sizes=tuple(self.length if size == LENGTH else size for size in given.sizes))

    def surroundings(self) -> AbstractContextManager[Any]:
        return SURROUNDINGS[self.under]()


_CHOICES: dict[str, Sequence[Any]] = {
    "sizes": SIZES,
    "dtype": DTYPES,
    "values": sorted(VALUES),
    "layout": sorted(LAYOUTS),
    "kind": sorted(KINDS),
}


@st.composite
def _changes(draw: st.DrawFn) -> tuple[str, Given]:
    """A tensor with one or two things about it changed."""
    name = draw(st.sampled_from(sorted(PREPARED)))
    aspects = draw(st.lists(st.sampled_from(sorted(_CHOICES)), min_size=1, max_size=2, unique=True))
    return name, replace(PREPARED[name], **{aspect: draw(st.sampled_from(_CHOICES[aspect])) for aspect in aspects})


@st.composite
def hostile_calls(draw: st.DrawFn) -> HostileCall:
    """Wrong and right calls; each part is as prepared more often than by chance, or none would come far."""
    changed = draw(st.lists(_changes(), max_size=2, unique_by=lambda change: change[0]))
    structure = draw(st.one_of(st.sampled_from(sorted(RIGHT)), st.sampled_from(sorted(STRUCTURES))))
    under = draw(st.one_of(st.just("nothing"), st.sampled_from(sorted(SURROUNDINGS))))
    length = draw(st.one_of(st.just(LENGTH), st.integers(0, LENGTH + 2)))
    return HostileCall(draw(st.integers(0, 1000)), tuple(changed), structure, under, length)
