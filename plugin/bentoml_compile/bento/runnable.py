"""Models compiled in BentoML's legacy runners.

class Encoder(CompiledRunnable):
    torch_compile = {"mode": "max-autotune"}

    def load_model(self):
        return load_encoder()

    def example_inputs(self):
        return [{"input_ids": torch.zeros(8, 128, dtype=torch.int64)}]

    @bentoml.legacy.Runnable.method(batchable=True, batch_dim=0)
    def encode(self, input_ids):
        return self.model(input_ids=input_ids.to(self.device))

encoder = bentoml.legacy.Runner(Encoder, name="encoder")
service = bentoml.legacy.Service("embedder", runners=[encoder])
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import bentoml
import bentoml._internal.frameworks.common.pytorch  # BentoML then carries tensors between processes, and batches them
import torch
from torch.utils import _pytree as pytree

from bentoml_compile.bento import runners, settings
from bentoml_compile.bento.compile import compile_model
from bentoml_compile.errors import ConfigError
from bentoml_compile.model import CompiledModel

Examples = Sequence[Mapping[str, Any] | tuple[Any, ...]]


class CompiledRunnable(bentoml.legacy.Runnable):
    """A Runnable whose model is compiled where the runner runs: in its own processes, or embedded in an API worker.

    A subclass gives `load_model`, `example_inputs` and methods that call `self.model`. The model is called as the
    runner, and may have a section `models.<runner name>`. See `bentoml_compile.bento.runners` for its config.

    Attributes:
        torch_compile: the config that the class gives its runners.
        device: the GPU that BentoML assigned to this process, else the CPU. The model and its examples are moved
            there; a method moves what it is called with.
        model: compiled; it takes and returns exactly what the module does.

    Args:
        torch_compile: config over the class's, by `Runner(..., runnable_init_params={"torch_compile": {...}})`.

    Raises:
        ConfigError, GraphBreakError, VerificationError: as `compile_model`. ConfigError: a subclass's own `__init__`
            has not called this one.
    """

    SUPPORTED_RESOURCES = ("nvidia.com/gpu", "cpu")
    SUPPORTS_CPU_MULTI_THREADING = True

    torch_compile: ClassVar[Mapping[str, Any]] = {}

    device: torch.device
    model: CompiledModel

    _is_made = False  # until `__init__` here is over

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__init__ = _made_whole(cls, cls.__init__)  # type: ignore[method-assign]

    def __init__(self, torch_compile: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        construction = runners.construction_of(type(self), torch_compile)
        if construction is settings.current_construction():
            self._compile(construction.name)
        else:
            construction.run(lambda: self._compile(construction.name))
        self._is_made = True

    def load_model(self) -> torch.nn.Module:
        """The model as it will serve, in eval mode; on any device."""
        raise NotImplementedError(f"{type(self).__name__} must define load_model()")

    def example_inputs(self) -> Examples:
        """One entry for each prepared shape, as for `compile_model`; on any device. `load_model` was called before."""
        raise NotImplementedError(f"{type(self).__name__} must define example_inputs()")

    def _compile(self, name: str) -> CompiledRunnable:
        self.device = assigned_device()
        model = self.load_model().to(self.device)
        self.model = compile_model(model, example_inputs=moved(self.example_inputs(), self.device), name=name)
        return self


def _made_whole(cls: type[CompiledRunnable], initialize: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(initialize)
    def checked(self: CompiledRunnable, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        if type(self) is cls and not self._is_made:  # else a subclass's `__init__` is not over
            raise ConfigError(
                f"{cls.__name__}.__init__ has compiled nothing; call super().__init__(torch_compile) in it, "
                "with its own parameter torch_compile=None"
            )

    return checked


def assigned_device() -> torch.device:
    """The GPU of this process, else the CPU.

    BentoML shows a legacy runner's process its own GPU by CUDA_VISIBLE_DEVICES, and none if it has none.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())  # with an index: each thread has a current one of its own


def moved(examples: Examples, device: torch.device) -> Examples:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), examples)  # type: ignore[no-any-return]
