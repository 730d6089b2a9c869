"""Peak tensor bytes of a piece of work: what the plan is checked against, and what the bench reports.

On an accelerator the allocator keeps the figure. On a CPU every operation's outputs are followed through a dispatch
mode, storage by storage, until they are freed; that slows the work down, so it is never measured while timing.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def parameter_bytes(modules: Iterable[nn.Module]) -> int:
    """Return the bytes of all parameters and buffers; what is shared counts once."""
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return sum({id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


class _Followed(TorchDispatchMode):
    """Follows the storages that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                self._follow(leaf, given)
        return out

    def _follow(self, tensor: Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in given:  # a view, or a tensor from before
            return
        size = storage.nbytes()
        self._known[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.live -= self._known.pop(key, 0)


class PeakMemory(AbstractContextManager["PeakMemory"]):
    """Measures the peak of live tensor bytes while it is entered, weights included.

    Args:
        device: where the work runs.
        modules: loaded modules, whose parameters and buffers are there before the work begins.

    Attributes:
        peak: bytes, once left.
    """

    def __init__(self, device: torch.device, modules: Iterable[nn.Module]) -> None:
        self.device, self.peak = device, 0
        self._weights = parameter_bytes(modules)
        self._mode: _Followed | None = None

    def __enter__(self) -> "PeakMemory":
        if self.device.type == "cpu":
            self._mode = _Followed()
            self._mode.__enter__()
        else:
            torch.accelerator.reset_peak_memory_stats(self.device)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(*error)
            self.peak = self._weights + self._mode.peak
        else:
            self.peak = torch.accelerator.max_memory_allocated(self.device)
