"""The decode loop: `step` is the unit, `speculative_decode` repeats it. `generate` and the server call the same step.

One step = propose, one target forward over all rows' nodes, verify (which emits token by token), keep.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from . import hf
from .context import Context
from .fresh import Fresh
from .proposal import Proposal
from .stats import DecodeStats
from .verify import verify

logger = logging.get_logger(__name__)

TRAINED = ("draft_model", "eagle", "medusa")
HOPELESS, TRIED = 0.3, 64  # kept share of first drafted tokens below which a call warns, and the fewest that say so
LIKELY_CAUSES = (
    "the draft has another tokenizer (`spechead plan --draft-model` compares them)",
    "it was trained for another family or revision of the target (`spechead inspect --target` compares them)",
    "the head reads other taps than it was trained on (`spechead inspect` names them)",
    "it was trained with other chat template arguments (--chat-template-kwargs)",
    "it was trained on another domain than is asked here (`spechead bench` shows each group)",
)


def step(context: Context) -> None:
    """Advance every live row by one propose-verify step: one target forward for the whole batch."""
    began = perf_counter()
    proposal = context.clip(context.proposer.propose(context))
    drafted = perf_counter()
    forward = context.target.forward(proposal, context.cache, context_taps(context))
    acceptance = verify(
        proposal, context.probs_at(proposal, forward.logits), context.draws, context.on_token, context.typical
    )
    verified = perf_counter()
    context.cache.keep(acceptance)
    context.stats.add(proposal, acceptance)
    context.commit(proposal, acceptance, forward)
    context.stats.seconds_drafting += drafted - began
    context.stats.seconds_verifying += verified - drafted
    context.stats.seconds_other += perf_counter() - verified


def prefill(
    context: Context,
    attention_mask: Tensor | None,
    chunk: int | None = None,
    carried: Any = None,
    copies: int = 1,
    **extra: Any,
) -> None:
    """Feed the prompts and emit each row's first token; the proposer starts on what this leaves.

    The last logits enter `verify` as a root-only proposal whose root, the prompt's last token, is cached already, so
    that nothing is ever sampled elsewhere.

    Args:
        context: fresh; its cache may hold a common number of leading tokens of every row.
        attention_mask: `[B, P]`, or None.
        chunk: prompt tokens a forward.
        carried: what the proposer's `carry` returned for the tokens that the cache holds, or None.
        copies: neighbouring rows that hold the same prompt (`num_return_sequences`); it is fed once.
        extra: further `[B, P]` tensors for the forward.
    """
    proposer, cache = context.proposer, context.cache
    cached, width = int(cache.lengths[0]), context.rows[0].prompt_width
    context.fresh = {id(part): Fresh(part.taps) for part in consumers(proposer) if part.taps}
    if carried is not None:
        proposer.resume(context, carried)
    ids = context.ids[:, :width]
    copies = 1 if cached else copies
    if copies > 1:
        cache.select_rows(torch.arange(0, context.batch, copies, device=ids.device))
        ids, extra = ids[::copies], {name: value[::copies] for name, value in extra.items()}
        attention_mask = None if attention_mask is None else attention_mask[::copies]
    forward = context.target.prefill(ids, attention_mask, cache, context_taps(context), chunk, **extra)
    context.stats.prefill_forwards += -(-(width - cached) // (chunk or width))
    context.stats.prompt_fed += len(ids) * (width - cached)
    if copies > 1:
        cache.select_rows(torch.arange(len(ids), device=ids.device).repeat_interleave(copies))
        taps = {tap: state.repeat_interleave(copies, dim=0) for tap, state in forward.taps.items()}
        forward = hf.Forward(forward.logits.repeat_interleave(copies, dim=0), taps)
    cache.strip(context.pads)
    root = Proposal.root_only(context.root)
    acceptance = verify(root, context.probs_at(root, forward.logits), context.draws, context.on_token)
    counted = width - cached - context.pads  # [B]
    order = torch.arange(width - cached, device=counted.device)[None, :] + context.pads[:, None]
    for fresh in context.fresh.values():
        states = {}
        for tap in fresh.taps:
            state = forward.taps[tap]
            rows = torch.arange(context.batch, device=state.device)[:, None]
            states[tap] = state[rows, order.clamp(max=width - cached - 1).to(state.device)]
        fresh.append(states, counted)
    context.advance(acceptance)
    proposer.start(context)


def consumers(proposer: Any) -> list[Any]:
    """List the proposers that take features: the proposer itself, or the parts of a composite one."""
    return [part for whole in getattr(proposer, "parts", ()) for part in consumers(whole)] or [proposer]


def context_taps(context: Context) -> tuple[int, ...]:
    """Return the hidden states that any consumer needs."""
    return tuple(sorted({tap for fresh in context.fresh.values() for tap in fresh.taps}))


def speculative_decode(context: Context) -> None:
    """Step until every row has stopped."""
    with hf.decode_mode(context.target.model):
        while not context.all_done:
            step(context)
    context.flush()
    warn_if_hopeless(context.stats)


def warn_if_hopeless(stats: DecodeStats) -> None:
    """Say once when something trained drafts little that is kept: it costs time, and often hides a mistake."""
    if stats.method not in TRAINED or not stats.tried_by_depth or stats.tried_by_depth[0] < TRIED:
        return
    rate = stats.kept_by_depth[0] / stats.tried_by_depth[0]
    if rate < HOPELESS:
        causes = "; ".join(f"{number}. {cause}" for number, cause in enumerate(LIKELY_CAUSES, 1))
        logger.warning_once(  # the same text every time, or it would be said again
            f"{stats.method}: fewer than {HOPELESS:.0%} of the first drafted tokens were kept. Likely causes: "
            f"{causes}. "
            'Measure it with `spechead bench`, or let speculative="auto" step back.'
        )
