"""What torch keeps for each thread, for a call that runs on another thread than its caller's.

Seen with torch 2.13.0, and by tests/engines/test_own_thread.py again:

- each thread has its own: grad and inference mode, autocast (on, dtype, cache), torch function modes (and so the
  default device) and dispatch modes, functorch's transforms, the current CUDA device and each device's current stream;
  and, from its first operator on, its own number of threads, a later `torch.set_num_threads` elsewhere or not;
- each context (contextvars) has its own: the settings of torch._dynamo.config, torch._inductor.config and the like,
  those that are assigned as well as those that are patched;
- the process has one: default dtype, deterministic algorithms, matmul precision, attention backends.

The number of threads is not carried over: setting it changes it for every thread that is yet to start, and it is a
guard of Dynamo's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from bentoml_compile.engines.dynamo import GuardMiss

_AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class ThreadState:
    """Taken in the caller's thread, entered in the other. CUDA's part has not run on a GPU yet.

    Attributes:
        autocast: (device type, on, dtype) of each.
        streams: current streams of the caller. The other thread queues its work there, so that it comes after what the
            caller queued, and what it allocates is the caller's to use and free.
    """

    inference: bool
    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    streams: tuple[torch.cuda.Stream, ...]
    cuda_device: int | None

    @classmethod
    def of_this_thread(cls, cuda_devices: Collection[int] = ()) -> ThreadState:
        """`cuda_devices`: indices of those that the call works on."""
        streams: tuple[torch.cuda.Stream, ...] = ()
        current: int | None = None
        if cuda_devices and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            current = torch.cuda.current_device()
            streams = tuple(torch.cuda.current_stream(device) for device in {*cuda_devices, current})
        return cls(
            torch.is_inference_mode_enabled(),
            torch.is_grad_enabled(),
            tuple(
                (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
                for device in _AUTOCAST_DEVICES
            ),
            torch.is_autocast_cache_enabled(),
            streams,
            current,
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Autocast and streams stay afterwards, until the next state is entered."""
        self._take_streams()
        torch.set_autocast_cache_enabled(self.autocast_cache)
        for device, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad):
            yield

    def _take_streams(self) -> None:
        for stream in self.streams:
            earlier = torch.cuda.current_stream(stream.device)
            if earlier != stream:
                stream.wait_stream(earlier)  # calls of one program share memory: one after the other on the device too
                torch.cuda.set_stream(stream)
        if self.cuda_device is not None:
            torch.cuda.set_device(self.cuda_device)


def modes() -> int:
    """How many torch modes this thread is in. Private, checked with torch 2.13.0; none is seen where it is missing."""
    try:
        return torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    except AttributeError:
        return 0


def check_it_can_be_left(known_modes: int) -> None:
    """Refuses what cannot be carried over to another thread; as many modes as `known_modes` are that thread's own.

    Raises:
        GuardMiss: a torch mode (FakeTensorMode, `with torch.device(...)`) or a transform (vmap, grad) is active.
    """
    if modes() > known_modes:
        raise GuardMiss("a TorchFunctionMode or TorchDispatchMode is active")
    if _is_transformed():
        raise GuardMiss("a functorch transform is active")


def _is_transformed() -> bool:
    """Private, checked with torch 2.13.0; no transform is seen where it is missing."""
    try:
        return torch._C._functorch.peek_interpreter_stack() is not None
    except AttributeError:
        return False


def default_device() -> torch.device | None:
    """The one that this thread was given by `torch.set_default_device` or `with torch.device(...)`."""
    device = torch.get_default_device()
    return device if device.type != "cpu" else None
