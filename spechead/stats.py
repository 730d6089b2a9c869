"""DecodeStats: the one definition of every figure of a decoding call.

Filled by decoding.step, returned as `output.stats`, read by the bench, the cards and the server. All counts are of
tokens and rows, never of text; the prompt's forward and the token it yields are counted apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .proposal import Acceptance, Proposal

POSITION_BUCKET = 32  # new tokens that share a figure of acceptance by position


@dataclass
class DecodeStats:
    """Figures of one call (or, in a server, of one engine).

    Attributes:
        method: name of the way of drafting.
        lossy: True when the output need not follow the target's law (typical acceptance).
        steps: propose-verify steps = target forwards after the prompt's.
        row_steps: steps summed over the rows that were live in them.
        prefill_forwards: target forwards over the prompt.
        nodes_fed: nodes fed to the target in steps, padding included.
        prompt_fed: prompt tokens fed to the target, padding included.
        drafted_tokens, kept_tokens: drafted nodes, and emitted tokens that had been drafted.
        emitted_tokens: tokens emitted by steps, cut at the stop, the prompt's own next token left out.
        tried_by_depth, kept_by_depth: row-steps that drafted to depth d+1, and that kept depth d+1.
        near_ties: greedy decisions whose two best logits lay within 1e-4, where rounding may decide.
        seconds_drafting, seconds_verifying, seconds_other: wall-clock split of the steps.
        first_tokens: tokens that a row had emitted before its first step (transformers' own speculation drafts for the
            prompt's forward too, which then emits several).
        emitted_per_step: for each row, its emitted tokens and kept drafted tokens in each of its steps.
        speculating_steps: steps in which any row drafted.
        plans: for "auto", how many steps each plan was chosen.
        notes: what a user should know, such as a tree that became a chain.
    """

    method: str = ""
    lossy: bool = False
    steps: int = 0
    row_steps: int = 0
    prefill_forwards: int = 0
    nodes_fed: int = 0
    prompt_fed: int = 0
    drafted_tokens: int = 0
    kept_tokens: int = 0
    emitted_tokens: int = 0
    tried_by_depth: list[int] = field(default_factory=list)
    kept_by_depth: list[int] = field(default_factory=list)
    near_ties: int = 0
    seconds_drafting: float = 0.0
    seconds_verifying: float = 0.0
    seconds_other: float = 0.0
    first_tokens: int = 1
    emitted_per_step: list[list[tuple[int, int]]] = field(default_factory=list)
    speculating_steps: int = 0
    plans: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def target_forwards(self) -> int:
        """Target forwards after the prompt's."""
        return self.steps

    @property
    def acceptance_length(self) -> float:
        """Emitted tokens per row and step, bonus token counted: EAGLE's tau; 1.0 is no gain, 0.0 is no step."""
        return self.emitted_tokens / self.row_steps if self.row_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Kept over tried depth; for chains kept over drafted tokens. 0.0 when nothing was drafted."""
        tried = sum(self.tried_by_depth)
        return sum(self.kept_by_depth) / tried if tried else 0.0

    @property
    def acceptance_rate_by_depth(self) -> list[float]:
        """Kept over tried at each depth, from 1; a deeper depth counts as tried even when a shallower one failed."""
        return [kept / tried for kept, tried in zip(self.kept_by_depth, self.tried_by_depth, strict=True)]

    @property
    def by_position(self) -> list[tuple[int, int]]:
        """Row-steps and the tokens they emitted, by where in the answer a step began: its first `POSITION_BUCKET` new
        tokens, the next, and so on. The prompt's own next token has place 0."""
        buckets: list[tuple[int, int]] = []
        for row in self.emitted_per_step:
            place = self.first_tokens
            for emitted, _ in row:
                while place // POSITION_BUCKET >= len(buckets):
                    buckets.append((0, 0))
                steps, tokens = buckets[place // POSITION_BUCKET]
                buckets[place // POSITION_BUCKET] = steps + 1, tokens + emitted
                place += emitted
        return buckets

    def add(self, proposal: Proposal, acceptance: Acceptance) -> None:
        """Count one step of the batch."""
        emitted, kept = acceptance.length.tolist(), acceptance.kept.tolist()
        self.steps += 1
        self.row_steps += sum(count > 0 for count in emitted)  # a live row always emits
        self.nodes_fed += proposal.tokens.numel()
        self.emitted_tokens += sum(emitted)
        self.kept_tokens += sum(kept)
        for row, pair in enumerate(zip(emitted, kept, strict=True)):
            if pair[0]:
                self.emitted_per_step[row].append(pair)
        if proposal.max_depth == 0:
            return
        drafted = int(proposal.real[:, 1:].sum())
        self.drafted_tokens += drafted
        self.speculating_steps += drafted > 0
        tried = (proposal.depths * proposal.real).max(1).values
        for depth in range(1, int(tried.max()) + 1):
            if depth > len(self.tried_by_depth):
                self.tried_by_depth.append(0)
                self.kept_by_depth.append(0)
            self.tried_by_depth[depth - 1] += int((tried >= depth).sum())
            self.kept_by_depth[depth - 1] += int((acceptance.kept >= depth).sum())

    def to_dict(self) -> dict[str, Any]:
        """Return the figures that reports keep, derived ones included, per-step lists left out."""
        figures = {name: value for name, value in vars(self).items() if name != "emitted_per_step"}
        derived = (
            "target_forwards",
            "acceptance_length",
            "acceptance_rate",
            "acceptance_rate_by_depth",
            "by_position",
        )
        return figures | {name: getattr(self, name) for name in derived}
