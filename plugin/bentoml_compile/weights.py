"""Other weights for a model that serves: without a compile, and without a call that sees half of them.

New tensors are filled beside the old ones; a copy of the model and second containers of the compiled code, which read
them, take over at once. When the last call with the old weights is over, the model itself is given the new tensors, and
the old ones are freed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from bentoml_compile.engines.aot.package import tensors_of
from bentoml_compile.engines.aot.shadow import shadow
from bentoml_compile.engines.eager import eager_callable
from bentoml_compile.engines.jit import uses_cuda_graphs
from bentoml_compile.prepared import PreparedShape, Target
from bentoml_compile.serving import Serving

_SHOWN = 3  # names in an error message


def replace_weights(
    target: Target, serving: Serving, state_dict: Mapping[str, torch.Tensor], switch: Callable[[Serving], None]
) -> None:
    """Every call that begins after the first `switch` is answered with the new weights, every one before with the old.

    Shapes that torch.compile serves are answered eagerly while the calls that are under way end.

    Raises:
        ValueError, TypeError: as `read_weights`; or torch.compile has the weights in its code (`freezing`).
        LibraryError: compiled code does not take the new weights.
        Exception: the model cannot be copied. Whatever is raised, the old weights still serve.
    """
    by_jit = any(shape.compiled_by == "jit" for shape in serving.shapes)
    if by_jit and (torch._inductor.config.freezing or target.config.options.get("freezing")):
        raise ValueError("torch.compile's option 'freezing' makes weights a part of the code: they cannot be replaced")
    new = read_weights(target.model, state_dict)
    beside = _reading(serving.shapes, new.tensors)
    copied = eager_callable(new.copy_of(target.model), target.method)
    interim = serving.with_shapes(beside, copied, dict(zip(serving.shapes, beside, strict=True)))
    switch(interim)
    serving.drain()
    _close(serving.shapes)
    stays = (by_jit and uses_cuda_graphs(target.model, target.config)) or new.holds_inference_tensors
    new.give_to_model(in_place=stays)
    ahead = _reading(serving.shapes, tensors_of(target.model)) if stays else interim.shapes
    final = [_final(*pair) for pair in zip(serving.shapes, ahead, strict=True)]
    switch(serving.with_shapes(final, target.eager, dict(zip(serving.shapes, final, strict=True))))
    interim.drain()
    if stays:
        _close(interim.shapes)


def _reading(shapes: Sequence[PreparedShape], tensors: Mapping[str, torch.Tensor]) -> list[PreparedShape]:
    made: list[PreparedShape] = []
    try:
        for shape in shapes:
            made.append(shape.reading(tensors))
    except BaseException:
        _close(made)
        raise
    return made


def _final(before: PreparedShape, ahead: PreparedShape) -> PreparedShape:
    return ahead if before.compiled_by == "aot" else before


def _close(shapes: Sequence[PreparedShape]) -> None:
    """The code that was compiled ahead of time; torch.compile's reads the model itself."""
    for shape in shapes:
        if shape.compiled_by == "aot" and (close := getattr(shape.run, "close", None)):
            close()


@dataclass(frozen=True, slots=True)
class NewWeights:
    """New tensors for a model's parameters and buffers; what shares memory in the model does so here.

    Attributes:
        tensors: by each name in the model, those that stay as they are included.
        replaced: (the model's tensor, the new one), each pair once.
    """

    tensors: dict[str, torch.Tensor]
    replaced: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @property
    def holds_inference_tensors(self) -> bool:
        """Their memory cannot be replaced, only written to."""
        return any(old.is_inference() for old, _ in self.replaced)

    def copy_of(self, model: nn.Module) -> nn.Module:
        """A copy of the model that has the new tensors and shares everything else.

        Raises:
            Exception: whatever an attribute raises that cannot be copied.
        """
        new = {id(old): tensor for old, tensor in self.replaced}
        copied = shadow(model)
        for module in copied.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in new:
                    module._parameters[name] = nn.Parameter(new[id(parameter)], requires_grad=parameter.requires_grad)
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) in new:
                    module._buffers[name] = new[id(buffer)]
        return copied

    def give_to_model(self, *, in_place: bool) -> None:
        """The model's own tensors become the new ones; nobody may be reading them.

        `in_place`: their memory stays where it is and is written to, for code that knows it by address.
        """
        for old, tensor in self.replaced:
            with torch.inference_mode(old.is_inference()), torch.no_grad():
                if in_place:
                    old.copy_(tensor)
                else:
                    old.data = tensor


def read_weights(model: nn.Module, state_dict: Mapping[str, torch.Tensor]) -> NewWeights:
    """New tensors with the values of a state dict; nothing of the model is changed.

    Args:
        state_dict: a tensor for every name in the model's own state dict, on any device, of a dtype that can be cast.
            Of names that are one tensor, one is enough.

    Raises:
        ValueError: names are missing or unknown, sizes differ, or names of one tensor have different values.
        TypeError: a value is no tensor.
    """
    wanted = model.state_dict(keep_vars=True)
    _check(model, wanted, state_dict)
    own = tensors_of(model)
    given = {name: state_dict[name] for name in wanted if name in state_dict}
    touched = {_storage(own[name]) for name in given}
    storages: dict[int, torch.UntypedStorage] = {}
    new: dict[int, torch.Tensor] = {}
    for tensor in own.values():
        if _storage(tensor) in touched and id(tensor) not in new:
            if _storage(tensor) not in storages:
                storages[_storage(tensor)] = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
            new[id(tensor)] = _view(tensor, storages[_storage(tensor)])
    with torch.no_grad():
        for name, value in given.items():
            new[id(own[name])].copy_(value)
    _refuse_contradictions(own, new, given)
    tensors = {name: new.get(id(tensor), tensor) for name, tensor in own.items()}
    replaced = {id(tensor): (tensor, new[id(tensor)]) for tensor in own.values() if id(tensor) in new}
    return NewWeights(tensors, tuple(replaced.values()))


def _check(model: nn.Module, wanted: Mapping[str, object], state_dict: Mapping[str, object]) -> None:
    for name, value in wanted.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{name!r} in the model's state dict is no tensor, which compiled code would not see")
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a mapping of names to tensors, not {type(state_dict).__name__}")
    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"state_dict[{name!r}] must be a tensor, not {type(value).__name__}")
    unknown = [name for name in state_dict if name not in wanted]
    there = {_place(wanted[name]) for name in state_dict if name in wanted}
    missing = [name for name in wanted if name not in state_dict and _place(wanted[name]) not in there]
    sizes = [
        f"{name} {list(value.shape)} instead of {list(wanted[name].shape)}"  # type: ignore[attr-defined]
        for name, value in state_dict.items()
        if name in wanted and value.shape != wanted[name].shape  # type: ignore[attr-defined]
    ]
    kinds = [
        f"{name} {value.dtype}"  # type: ignore[attr-defined]
        for name, value in state_dict.items()
        if name in wanted and value.is_complex() and not wanted[name].is_complex()  # type: ignore[attr-defined]
    ]
    problems = [
        f"{what}: {', '.join(names[:_SHOWN])}{f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''}"
        for what, names in (
            ("missing", missing),
            ("unknown", unknown),
            ("of other sizes", sizes),
            ("complex for real", kinds),
        )
        if names
    ]
    if problems:
        raise ValueError(f"this state dict does not fit {type(model).__name__}: {'; '.join(problems)}")


def _refuse_contradictions(
    own: Mapping[str, torch.Tensor], new: Mapping[int, torch.Tensor], given: Mapping[str, torch.Tensor]
) -> None:
    """Where several names lie in one memory, the last one written has won."""
    names: dict[int, list[str]] = {}
    for name in given:
        names.setdefault(_storage(own[name]), []).append(name)
    for shared in names.values():
        for name in shared if len(shared) > 1 else ():
            mine = new[id(own[name])]
            if not torch.equal(mine, given[name].to(device=mine.device, dtype=mine.dtype)):
                raise ValueError(f"{', '.join(shared)} share memory in the model, but have different values")


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _place(tensor: object) -> tuple[object, ...]:
    assert isinstance(tensor, torch.Tensor)
    return (_storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())


def _view(like: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    tensor = torch.empty(0, dtype=like.dtype, device=like.device)
    return tensor.set_(storage, like.storage_offset(), like.shape, like.stride())
