"""What EAGLE drafts, written down slowly and once more: no cache, no tree mask, one path at a time.

`Text` is a row's tokens so far, the root last, with the features of all tokens before it. Every quantity of the
proposer is recomputed from it by whole forwards of the head over true entries followed by one drafted path.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from spechead.context import Context
from spechead.proposal import Proposal
from tests.tiny_heads import features

Path = tuple[int, ...]


class Text:
    """A row as the head should see it.

    Args:
        head: the head.
        model: the target.
        ids: the row's tokens without pads, the root last.
    """

    def __init__(self, head: Any, model: PreTrainedModel, ids: list[int]) -> None:
        self.head, self.ids = head, torch.tensor([ids])
        with torch.no_grad():
            self.states = head.fuse(features(head, model, self.ids)[:, :-1])  # [1, c, H]
        self.known: dict[Path, Tensor] = {}

    def output(self, path: Path) -> Tensor:
        """The head's output `[H]` at the end of a drafted path; the empty path ends at the last true entry."""
        if path not in self.known:
            own = [self.output(path[:depth]) for depth in range(len(path))]
            states = torch.cat([self.states, *(state[None, None] for state in own)], dim=1)
            tokens = torch.cat([self.ids[:, 1:], torch.tensor([path], dtype=torch.long)], dim=1)
            positions = torch.arange(states.shape[1])[None]
            with torch.no_grad():
                self.known[path] = self.head(tokens, states, positions)[0, -1]
        return self.known[path]

    def log_probs(self, path: Path) -> dict[int, float]:
        """Target id -> log-probability of being drafted after a path."""
        law = torch.log_softmax(self.head.logits(self.output(path)[None, None])[0, 0], -1).tolist()
        ids = self.head.draft_to_target.tolist() if hasattr(self.head, "draft_to_target") else range(len(law))
        return dict(zip(ids, law, strict=True))

    def best(self, path: Path, count: int) -> list[int]:
        """The likeliest target ids after a path, best first."""
        law = self.log_probs(path)
        return sorted(law, key=lambda token: -law[token])[:count]

    def dynamic_tree(self, depth: int, branching: int, size: int, threshold: float = 0.0) -> set[Path]:
        """EAGLE-2's tree: expand the `branching` likeliest nodes of each level, keep the `size` likeliest of all; no
        level more below one whose likeliest path is less likely than `threshold`; but for the likeliest, no node that
        is less likely than a `branching`th of it."""
        scores: dict[Path, float] = {(): 0.0}
        level = [()]
        for _ in range(depth):
            found = {}
            for path in sorted(level, key=lambda path: -scores[path])[:branching]:
                law = self.log_probs(path)
                found |= {(*path, token): scores[path] + law[token] for token in self.best(path, branching)}
            scores |= found
            level = list(found)
            if math.exp(max(found.values())) < threshold:
                break
        del scores[()]
        first, *others = sorted(scores, key=lambda path: -scores[path])[:size]
        return {first} | {path for path in others if math.exp(scores[path]) >= threshold / branching}

    def static_tree(self, choices: list[Path]) -> set[Path]:
        """The tree of paths of ranks."""
        return {self.by_rank(choice) for choice in choices}

    def sure_depth(self, depth: int, threshold: float) -> int:
        """How deep the chain of best tokens goes: one token beyond the last whose path is at least so likely."""
        path: Path = ()
        chance = 0.0
        for _ in range(depth):
            token = self.best(path, 1)[0]
            chance += self.log_probs(path)[token]
            path = (*path, token)
            if math.exp(chance) < threshold:
                break
        return len(path)

    def by_rank(self, choice: Path) -> Path:
        """The tokens of one path of ranks."""
        path: Path = ()
        for rank in choice:
            path = (*path, self.best(path, rank + 1)[rank])
        return path

    def entries(self) -> DynamicCache:
        """Keys and values of all true entries, from one forward."""
        cache = DynamicCache()
        positions = torch.arange(self.states.shape[1])[None]
        with torch.no_grad():
            self.head(self.ids[:, 1:], self.states, positions, cache=cache)
        return cache


def row_text(context: Context, row: int) -> list[int]:
    """A row's ids so far, pads taken off."""
    return context.row_ids(row)[0, int(context.pads[row]) :].tolist()


def drafted_paths(proposal: Proposal, row: int) -> list[Path]:
    """The token paths of a row's real nodes, the root's left out, in node order."""
    paths: list[Path] = []
    for node, (token, parent) in enumerate(
        zip(proposal.tokens[row].tolist(), proposal.parents[row].tolist(), strict=True)
    ):
        paths.append((*paths[parent], token) if node else ())
    real = proposal.real[row].tolist()
    return [path for path, counts in zip(paths[1:], real[1:], strict=True) if counts]
