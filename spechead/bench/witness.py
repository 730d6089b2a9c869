"""Witness: a proposer that passes everything on to another and notes what each step did, for a certificate.

It changes nothing: the call runs through the shipped `generate`, step, forward and sampler. While a context lives, its
`probs_at` and `on_token` are replaced by versions that call the shipped ones and look at what went in and came out.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..context import Context
from ..proposal import Proposal
from ..proposers.base import BaseProposer


@dataclass
class SeenStep:
    """One row of one step.

    Attributes:
        prefix: the row's ids up to and with its root, pads left out.
        padded: whether the row has left pads, which processors see.
        tokens, parents: of the row's real nodes, renumbered; node 0 is the root.
        logits: the target's at these nodes, float32 `[n, V]`.
        laws: node -> the law `[V]` that verification was given there.
    """

    prefix: list[int]
    padded: bool
    tokens: list[int]
    parents: list[int]
    logits: Tensor
    laws: dict[int, Tensor] = field(default_factory=dict)

    def path(self, node: int) -> list[int]:
        """Return the nodes from below the root down to `node`."""
        nodes: list[int] = []
        while node > 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def text(self, node: int) -> list[int]:
        """Return all ids up to and with `node`."""
        return self.prefix + [self.tokens[n] for n in self.path(node)]


@dataclass
class Places:
    """Where tokens lie in the laws they should follow: uniform on [0, 1] if they do; `impossible` had no mass."""

    values: list[float] = field(default_factory=list)
    impossible: int = 0

    def add(self, law: Tensor, tokens: Tensor, generator: torch.Generator) -> None:
        """Note tokens `[R]` and the laws they should follow `[R, V]`."""
        own = law.gather(1, tokens[:, None])
        before = torch.arange(law.shape[1], device=law.device) < tokens[:, None]
        above = (law * ((law > own) | ((law == own) & before))).sum(1)
        place = above.cpu() + torch.rand(len(tokens), generator=generator) * own[:, 0].cpu()
        self.impossible += int((own <= 0).sum())
        self.values += place.tolist()


@dataclass
class Seen:
    """What calls did.

    Attributes:
        steps: the rows that were kept whole.
        drafted: drawn drafted tokens in the law that was reported for them.
        bonus: tokens that verification chose where nothing was drafted below.
        inside: tokens that it chose where something was.
        excess: largest distance from 1 of a reported law's sum.
    """

    steps: list[SeenStep] = field(default_factory=list)
    drafted: Places = field(default_factory=Places)
    bonus: Places = field(default_factory=Places)
    inside: Places = field(default_factory=Places)
    excess: float = 0.0

    def add(self, other: "Seen") -> None:
        """Add what other calls did."""
        for mine, theirs in ((self.drafted, other.drafted), (self.bonus, other.bonus), (self.inside, other.inside)):
            mine.values += theirs.values
            mine.impossible += theirs.impossible
        self.steps += other.steps
        self.excess = max(self.excess, other.excess)


class Witness(BaseProposer):
    """Note what the steps of one call do.

    Args:
        inner: the proposer that drafts.
        keep: given the number of a step, says whether its rows are kept whole; their logits are copied then.
        rows: how many of them.
        seed: of the numbers that spread a token over its share of [0, 1].
        seen: where to note it. It outlives the witness, which holds its proposer and so all that this remembers.
    """

    def __init__(
        self,
        inner: Any,
        keep: Callable[[int], bool] = lambda step: False,
        rows: int = 4,
        seed: int = 0,
        seen: Seen | None = None,
    ) -> None:
        self.inner, self.keep, self.rows = inner, keep, rows
        self.parts, self.taps, self.name, self.notes = [inner], inner.taps, inner.name, inner.notes
        self.generator = torch.Generator().manual_seed(seed)
        self.seen = Seen() if seen is None else seen
        self._count = 0
        self._asked: tuple[Proposal, Tensor, Tensor] | None = None

    def start(self, context: Context) -> None:
        """Start the proposer, and watch the context."""
        self.inner.start(context)
        # Were the context held by what it holds, its cache would stay until the next run of the cycle collector, which
        # counts objects and not their bytes.
        watched = weakref.proxy(context)
        probs_at, on_token = type(context).probs_at, type(context).on_token

        def watched_probs(proposal: Proposal, logits: Tensor) -> Callable[[Tensor], Tensor]:
            self._note_drafts(proposal)
            kept = self._keep(watched, proposal, logits) if self.keep(self._count) else {}
            self._count += 1
            law = probs_at(watched, proposal, logits)

            def asked(nodes: Tensor) -> Tensor:
                p = law(nodes)
                self._asked = (proposal, nodes, p)
                for row, (seen, place) in kept.items():
                    if int(nodes[row]) >= 0:
                        seen.laws[place[int(nodes[row])]] = p[row].clone()
                return p

            return asked

        def watched_token(tokens: Tensor, live: Tensor) -> Tensor:
            self._note_tokens(tokens, live)
            return on_token(watched, tokens, live)

        context.__dict__.update(probs_at=watched_probs, on_token=watched_token)

    def propose(self, context: Context) -> Proposal:
        """Pass on."""
        proposal: Proposal = self.inner.propose(context)
        return proposal

    def nodes(self, depth: int) -> int:
        """Pass on."""
        return int(self.inner.nodes(depth))

    def _note_drafts(self, proposal: Proposal) -> None:
        if proposal.draft_probs is None:
            return
        drawn = proposal.real & ~proposal.point_mass
        drawn[:, 0] = False
        if bool(drawn.any()):
            laws = proposal.draft_probs[drawn]
            self.seen.excess = max(self.seen.excess, float((laws.sum(1) - 1).abs().max()))
            self.seen.drafted.add(laws, proposal.tokens[drawn], self.generator)

    def _note_tokens(self, tokens: Tensor, live: Tensor) -> None:
        if self._asked is None or not bool(live.any()):
            return
        proposal, nodes, p = self._asked
        below = (proposal.real & (proposal.parents == nodes[:, None])).any(1)
        for places, rows in ((self.seen.bonus, live & ~below), (self.seen.inside, live & below)):
            if bool(rows.any()):
                places.add(p[rows], tokens[rows], self.generator)

    def _keep(
        self, context: Context, proposal: Proposal, logits: Tensor
    ) -> dict[int, tuple[SeenStep, dict[int, int]]]:
        kept = {}
        for row in range(min(context.batch, self.rows)):
            real = proposal.real[row].nonzero().flatten().tolist()
            if not real:
                continue
            place = {node: index for index, node in enumerate(real)}
            parents = [place.get(int(proposal.parents[row, node]), -1) for node in real]
            pads = int(context.pads[row])
            noted = SeenStep(
                prefix=context.row_ids(row)[0, pads:].tolist(),
                padded=pads > 0,
                tokens=proposal.tokens[row, real].tolist(),
                parents=parents,
                logits=logits[row, real].float().cpu(),
            )
            self.seen.steps.append(noted)
            kept[row] = (noted, place)
        return kept
