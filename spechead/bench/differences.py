"""Where two greedy outputs part, and whether rounding explains it: tie or bug.

In float32 greedy speculation equals plain token for token up to ties. In bfloat16 the kernels that score several
tokens at once round otherwise than those that score one; two tokens whose float32 logits lie closer may swap.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from .results import Difference

FLOAT32_TOLERANCE = 1e-4  # as DecodeStats counts near-ties
ROUNDINGS = 4  # roundings of the largest logit that a chain of layers was seen to add up to in bfloat16


def first_difference(plain: Sequence[int], tokens: Sequence[int]) -> Difference | None:
    """Return the first place at which `tokens` differ from plain's, not yet judged; None where they are equal."""
    for position in range(max(len(plain), len(tokens))):
        ours = tokens[position] if position < len(tokens) else None
        theirs = plain[position] if position < len(plain) else None
        if ours != theirs:
            return Difference(position, theirs, ours)
    return None


class Judge:
    """Decides between tie and bug by the target's float32 logits, computed on a copy that is made when first needed.

    Args:
        target: the model that was measured.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        self._reference: Any = None

    @property
    def reference(self) -> Any:
        """The target in float32: itself, or a copy."""
        if self._reference is None:
            same = self.target.dtype == torch.float32
            self._reference = self.target if same else copy.deepcopy(self.target).float()
        return self._reference

    @torch.no_grad()
    def judge(self, difference: Difference, prompt: Sequence[int], plain: Sequence[int]) -> Difference:
        """Return the difference with its gap, tolerance and verdict.

        A row that ended while the other went on, without an end token on either side, has no two tokens to compare and
        is a bug.
        """
        if difference.plain_token is None or difference.token is None:
            return Difference(difference.position, difference.plain_token, difference.token, verdict="bug")
        prefix = torch.tensor([[*prompt, *plain[: difference.position]]], device=self.target.device)
        logits = self.reference(input_ids=prefix, logits_to_keep=1, use_cache=False).logits[0, -1].float()  # [V]
        lower = min(float(logits[difference.plain_token]), float(logits[difference.token]))
        gap = float(logits.max()) - lower
        rounding = ROUNDINGS * torch.finfo(self.target.dtype).eps * float(logits.abs().max())
        tolerance = max(FLOAT32_TOLERANCE, rounding)
        verdict = "tie" if gap <= tolerance else "bug"
        return Difference(difference.position, difference.plain_token, difference.token, gap, tolerance, verdict)
