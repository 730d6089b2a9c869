"""What a decoding step costs, part by part: drafting, the target's own forward, verification, keeping.

Real steps of `decoding.step` are timed by hooks on the model and by the clocks of its stats, so the parts add up to
the step. Called by scripts/gpu_check.py and scripts/measure_steps.py. These are costs of parts of one method; methods
are compared by bench/timing.py alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from ..context import Context
from ..decoding import prefill, step
from ..proposal import Proposal
from ..proposers.base import BaseProposer
from ..row import Row
from ..sampling import Sampler
from ..target import Target

WARM_UP = 3  # steps before the measured ones: the first feeds the head its whole prompt


@dataclass(frozen=True)
class StepParts:
    """Seconds of one step: drafting, inside the target's own forward, verification and masks, and all after it."""

    draft: float
    target: float
    verify: float
    keep: float

    @property
    def whole(self) -> float:
        """Seconds of the step."""
        return self.draft + self.target + self.verify + self.keep

    @property
    def overhead(self) -> float:
        """Share of the step that is not the target's forward."""
        return 1 - self.target / self.whole


def middle(parts: Sequence[StepParts]) -> StepParts:
    """Return the medians of every part."""
    columns = ([getattr(one, name) for one in parts] for name in ("draft", "target", "verify", "keep"))
    return StepParts(*map(median, columns))


def milliseconds(seconds: float) -> str:
    """Write seconds as milliseconds, to three digits."""
    return f"{1000 * seconds:.3g}"


class KeptProposer(BaseProposer):
    """Drafts as another proposer does, with the target's own next tokens on one path, so that they are kept.

    The cost of a step depends on what it keeps: weights that were never trained would keep nothing.

    Args:
        inner: the proposer whose cost is wanted.
        text: what the target will say after the prompt `[T]`, greedily.
        depth: drafted tokens to keep.
    """

    def __init__(self, inner: BaseProposer, text: Tensor, depth: int) -> None:
        self.inner, self.text, self.depth = inner, text.tolist(), depth
        self.parts = [inner]  # the features of its taps are the inner's
        self.taps, self.name = inner.taps, inner.name

    def start(self, context: Context) -> None:
        """Prepare the inner proposer."""
        self.inner.start(context)

    def propose(self, context: Context) -> Proposal:
        """Draft, then write the text over the path to the first node of the wanted depth (or the deepest there is)."""
        proposal = self.inner.propose(context)
        emitted = context.rows[0].emitted
        parents, real = proposal.parents[0].tolist(), proposal.real[0].tolist()
        depths = [depth if counts else 0 for depth, counts in zip(proposal.depths[0].tolist(), real, strict=True)]
        node = depths.index(min(self.depth, max(depths)))
        tokens = proposal.tokens.clone()
        while node > 0:
            tokens[0, node] = self.text[emitted + depths[node] - 1]
            node = parents[node]
        return Proposal(tokens, proposal.parents, proposal.real, None, proposal.max_depth)


def open_context(target: Target, proposer: BaseProposer, ids: Tensor, max_new_tokens: int) -> Context:
    """Feed a prompt `[1, P]` and return the greedy context that `step` advances."""
    width = ids.shape[1]
    sampler = Sampler(LogitsProcessorList(), 0, do_sample=False)
    row = Row(sampler, StoppingCriteriaList(), width, width, width + max_new_tokens)
    pads = torch.zeros(1, dtype=torch.long, device=ids.device)
    context = Context(target, proposer, ids, pads, [row], target.new_cache(1, width + max_new_tokens + 128))
    prefill(context, None)
    return context


@torch.no_grad()
def time_steps(context: Context, repeats: int) -> list[StepParts]:
    """Run steps and time their parts.

    Args:
        context: a running batch with enough tokens left.
        repeats: steps timed, after `WARM_UP` others.

    Raises:
        ValueError: if the batch ends before.
    """
    settle = synchroniser(context.root.device)
    inside: list[float] = []

    def before(*_: Any) -> None:
        settle()
        inside.append(-perf_counter())

    def after(*_: Any) -> None:
        settle()
        inside[-1] += perf_counter()

    model, stats = context.target.model, context.stats
    hooks = [model.register_forward_pre_hook(before), model.register_forward_hook(after)]
    parts = []
    try:
        for number in range(WARM_UP + repeats):
            if context.all_done:
                raise ValueError(f"the batch ended after {number} steps; leave it room for {WARM_UP + repeats}.")
            inside.clear()
            started = (stats.seconds_drafting, stats.seconds_verifying, stats.seconds_other)
            step(context)
            settle()
            ended = (stats.seconds_drafting, stats.seconds_verifying, stats.seconds_other)
            draft, verify, keep = (end - start for start, end in zip(started, ended, strict=True))
            if number >= WARM_UP:
                parts.append(StepParts(draft, sum(inside), verify - sum(inside), keep))
    finally:
        for hook in hooks:
            hook.remove()
    return parts


@torch.no_grad()
def time_calls(call: Callable[[], Any], repeats: int, device: torch.device) -> list[float]:
    """Return the seconds of each of `repeats` calls, after two that are left out."""
    settle = synchroniser(device)
    seconds = []
    for _ in range(repeats + 2):
        settle()
        start = perf_counter()
        call()
        settle()
        seconds.append(perf_counter() - start)
    return seconds[2:]


def synchroniser(device: torch.device) -> Callable[[], None]:
    """Return what waits until a device has done its work."""
    if device.type == "cpu":
        return lambda: None
    return torch.get_device_module(device).synchronize


def bushy_tree(nodes: int, root: Tensor, vocab_size: int) -> Proposal:
    """Return a tree of `nodes` nodes, the root included, each with up to two children: any tree costs the same."""
    parents = torch.tensor([[-1, *((node - 1) // 2 for node in range(1, nodes))]], device=root.device)
    tokens = (root[:, None] + torch.arange(nodes, device=root.device)) % vocab_size
    return Proposal(tokens, parents, torch.ones_like(parents, dtype=torch.bool))


def time_forward(context: Context, nodes: int, repeats: int) -> list[float]:
    """Time the target's forward over a tree of `nodes` nodes behind what the context has cached (nothing is kept)."""
    target, root = context.target, context.root
    tree = Proposal.root_only(root) if nodes == 1 else bushy_tree(nodes, root, target.vocab_size)
    return time_calls(lambda: target.forward(tree, context.cache), repeats, root.device)
