"""Fresh features: hidden states of positions newly cached, gathered until a trained proposer takes them.

One store a consumer; the context appends what each step kept, the consumer takes all of it when it next drafts, be
that the next step or many steps later.
"""

from __future__ import annotations

import torch
from torch import Tensor

Part = tuple[dict[int, Tensor], Tensor]  # {tap: [B, A, H]}, and how many of the A count in each row [B]


class Fresh:
    """Ragged features per tap.

    Args:
        taps: which hidden states of the target.

    Attributes:
        waiting: positions of all rows that came since the last take.
    """

    def __init__(self, taps: tuple[int, ...]) -> None:
        self.taps, self.waiting = taps, 0
        self._parts: list[Part] = []
        self._taken: Part | None = None  # what a take left: the rows, without positions

    @property
    def empty(self) -> bool:
        """True when nothing came since the last take."""
        return not self._parts

    def append(self, states: dict[int, Tensor], length: Tensor) -> None:
        """Add `{tap: [B, A, H]}`, of which row b's first `length[b]` positions count."""
        self._parts.append(({tap: states[tap] for tap in self.taps}, length))
        self.waiting += int(length.sum())

    def take(self) -> tuple[dict[int, Tensor], Tensor]:
        """Return all features since the last take, `{tap: [B, A, H]}`, and how many count in each row `[B]`."""
        self._merge()
        if not self._parts:
            raise ValueError("no features have been gathered since the last take; take once a step.")
        states, length = self._parts.pop()
        self.waiting = 0
        nothing = {tap: state.new_zeros(len(state), 0, state.shape[-1]) for tap, state in states.items()}
        self._taken = (nothing, torch.zeros_like(length))
        return states, length

    def select_rows(self, index: Tensor) -> None:
        """Keep rows `index [B']`."""
        self._parts = [_select(part, index) for part in self._parts]
        self._taken = None if self._taken is None else _select(self._taken, index)
        self.waiting = sum(int(length.sum()) for _, length in self._parts)

    def add_rows(self, other: Fresh) -> None:
        """Append the rows of another store of the same taps."""
        nothing_new = self.empty and other.empty
        mine, theirs = self._whole(), other._whole()
        width = max(next(iter(part[0].values())).shape[1] for part in (mine, theirs))

        def padded(state: Tensor) -> Tensor:
            return torch.nn.functional.pad(state, (0, 0, 0, width - state.shape[1]))

        joined = {tap: torch.cat([padded(mine[0][tap]), padded(theirs[0][tap])]) for tap in self.taps}
        part = (joined, torch.cat([mine[1], theirs[1]]))
        self._parts, self._taken = ([], part) if nothing_new else ([part], None)
        self.waiting = 0 if nothing_new else int(part[1].sum())

    def _whole(self) -> Part:
        """Return all that is gathered as one part; of a store that was taken from, its rows without positions."""
        self._merge()
        whole = self._parts[0] if self._parts else self._taken
        if whole is None:
            raise ValueError("rows can join after their prompts have been fed; this store has never held features.")
        return whole

    def _merge(self) -> None:
        """Turn the parts into one, each row's counted positions moved together."""
        if len(self._parts) < 2:
            return
        length = torch.stack([part[1] for part in self._parts]).sum(0)  # [B]
        merged = {}
        for tap in self.taps:
            states = torch.cat([part[0][tap] for part in self._parts], dim=1)  # [B, A, H]
            counted = [
                torch.arange(part[0][tap].shape[1], device=length.device)[None] < part[1][:, None]
                for part in self._parts
            ]
            order = torch.argsort(~torch.cat(counted, dim=1), dim=1, stable=True)[:, : int(length.max())]
            rows = torch.arange(len(states), device=states.device)[:, None]
            merged[tap] = states[rows, order.to(states.device)]  # whole vectors at a time, unlike gather
        self._parts = [(merged, length)]


def _select(part: Part, index: Tensor) -> Part:
    states, length = part
    return {tap: state[index.to(state.device)] for tap, state in states.items()}, length[index]
