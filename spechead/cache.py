"""The ragged KV cache: one zero-filled buffer for keys and values a layer, a length per row.

Every row starts at slot 0 and slot = position, so masks and windows need no offsets. A step appends N nodes behind
each row's own length (`open` then one `write` a layer), and `keep` moves the accepted ones next to the prefix.
Torch only; hf.py lends it to a model's forward and converts from and to transformers' caches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .proposal import Acceptance

BLOCK = 256  # buffers grow by whole blocks, so that a long generation does not reallocate every step


class RaggedCache:
    """Keys and values `[B, H, T, D]` of every layer and the number of valid slots of every row.

    Attributes:
        keys, values: buffers by layer index; a layer that never wrote (shared or attention-free) is absent.
        lengths: `[B]` valid slots.
        capacity: T, slots allocated (or to be allocated) a row.
    """

    def __init__(self, batch: int, capacity: int, device: torch.device | str = "cpu") -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.capacity = max(capacity, 1)
        self.width = 0  # slots that the forward in progress may attend to
        self._fitting: set[int] = set()  # layers whose buffers are known to fit what the model writes
        self._slots: Tensor | None = None  # [B, N] where the nodes of the forward in progress go; None: a common start
        self.start = 0  # longest row before the forward in progress

    @property
    def batch(self) -> int:
        return len(self.lengths)

    def open(self, nodes: int) -> int:
        """Prepare to append `nodes` slots to every row; returns the width that queries attend to."""
        longest = int(self.lengths.max())
        self.width = longest + nodes
        self.reserve(self.width)
        self.start = longest
        uniform = self.batch == 1 or bool((self.lengths == longest).all())
        self._slots = None if uniform else self.lengths[:, None] + torch.arange(nodes, device=self.lengths.device)
        return self.width

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append `[B, H, N, D]` keys and values to a layer; returns that layer's `[B, H, width, D]` views."""
        if layer not in self._fitting:
            self._fit(layer, keys, values)
        buffers = self.keys[layer], self.values[layer]
        if self._slots is None:
            nodes = keys.shape[2]
            buffers[0].narrow(2, self.start, nodes).copy_(keys)
            buffers[1].narrow(2, self.start, nodes).copy_(values)
        else:
            rows = torch.arange(self.batch, device=keys.device)[:, None]
            slots = self._slots.to(keys.device)
            buffers[0][rows, :, slots] = keys.transpose(1, 2)
            buffers[1][rows, :, slots] = values.transpose(1, 2)
        return buffers[0].narrow(2, 0, self.width), buffers[1].narrow(2, 0, self.width)

    def _fit(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Allocate a layer's buffers, or check those that a caller's cache filled, before its first write."""
        if layer not in self.keys:
            self.keys[layer] = self._buffer(keys)
            self.values[layer] = self._buffer(values)
        elif keys.dtype != self.keys[layer].dtype or keys.shape[1::2] != self.keys[layer].shape[1::2]:
            mine = self.keys[layer]
            raise ValueError(
                f"layer {layer} has cached {mine.shape[1]} heads of size {mine.shape[3]} in {mine.dtype}, and the "
                f"model writes {keys.shape[1]} of size {keys.shape[3]} in {keys.dtype}; give a cache that "
                "this model filled in its present dtype, or none."
            )
        if keys.shape[2]:  # an import opens buffers with no tokens at all; what the model writes is still to be seen
            self._fitting.add(layer)

    def recheck(self) -> None:
        """Compare buffers with the model's states again at the next write: it may have been cast since the last."""
        self._fitting.clear()

    def advance(self, count: Tensor | int) -> None:
        """Count `count` (`[B]` or one for all) appended slots of every row as valid."""
        self.lengths = self.lengths + count

    def keep(self, acceptance: Acceptance) -> None:
        """Move the accepted nodes of the last forward next to each row's prefix and count them."""
        path = acceptance.path
        if path.shape[1] == 1:  # roots alone lie where they belong
            self.advance(acceptance.length)
            return
        order = torch.arange(path.shape[1], device=path.device)
        moved = torch.where(path >= 0, path, order)
        if not bool((moved == order).all()):
            self._gather(self.lengths[:, None] + moved, self.lengths[:, None] + order)
        self.advance(acceptance.length)

    def strip(self, pads: Tensor) -> None:
        """Move every row left by its `pads [B]` leading slots, and stop counting those."""
        if bool((pads == 0).all()):
            return
        slots = torch.arange(int(self.lengths.max()), device=pads.device)[None, :]
        self._gather((slots + pads[:, None]).clamp(max=self.capacity - 1), slots.expand(len(pads), -1))
        self.lengths = self.lengths - pads

    def select_rows(self, index: Tensor) -> None:
        """Keep the rows `index [B']`, in that order."""
        self.lengths = self.lengths[index]
        for buffers in (self.keys, self.values):
            for layer, buffer in buffers.items():
                buffers[layer] = buffer[index.to(buffer.device)]

    def add_rows(self, other: RaggedCache) -> None:
        """Append the rows of another cache of the same model."""
        capacity = max(self.capacity, other.capacity)
        self._grow(capacity)
        other._grow(capacity)
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for layer in sorted(mine.keys() | theirs.keys()):
                like = mine[layer] if layer in mine else theirs[layer]
                rows = [
                    buffers[layer] if layer in buffers else like.new_zeros(cache.batch, *like.shape[1:])
                    for cache, buffers in ((self, mine), (other, theirs))  # one not written to yet has no buffers
                ]
                mine[layer] = torch.cat(rows)
        self.lengths = torch.cat([self.lengths, other.lengths])

    def truncate(self, lengths: Tensor) -> None:
        """Forget every slot from `lengths [B]` on."""
        self.lengths = torch.minimum(self.lengths, lengths)

    def reserve(self, capacity: int) -> None:
        """Grow all buffers to hold at least `capacity` slots a row, zero-filled."""
        if capacity > self.capacity:
            self._grow(-(-capacity // BLOCK) * BLOCK)

    def nbytes(self) -> int:
        """Bytes held by all buffers."""
        tensors = [*self.keys.values(), *self.values.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _grow(self, capacity: int) -> None:
        if capacity == self.capacity:
            return
        self.capacity = capacity
        for buffers in (self.keys, self.values):
            for layer, buffer in buffers.items():
                grown = self._buffer(buffer)
                grown[:, :, : buffer.shape[2]] = buffer
                buffers[layer] = grown

    def _buffer(self, like: Tensor) -> Tensor:
        batch, heads, _, dim = like.shape
        with torch.inference_mode(False):  # a buffer made during a forward is written to outside it too
            return torch.zeros(batch, heads, self.capacity, dim, dtype=like.dtype, device=like.device)

    def _gather(self, source: Tensor, destination: Tensor) -> None:
        """Copy slots `source [B, M]` of every row to `destination [B, M]`, all read before any is written."""
        for buffers in (self.keys, self.values):
            for buffer in buffers.values():
                rows = torch.arange(len(source), device=buffer.device)[:, None]
                taken = buffer[rows, :, source.to(buffer.device)]
                buffer[rows, :, destination.to(buffer.device)] = taken
