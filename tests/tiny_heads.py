"""Heads for the tiny targets of tests/tiny.py: random ones, and ones overfitted to the target's own greedy text."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from spechead import Eagle3Config, Eagle3Head, EagleConfig, EagleHead, MedusaConfig, MedusaHeads, hf
from spechead.training.batch import chains
from spechead.training.eagle import gather_entries, unroll
from tests.tiny import left_padded, tiny_model

KINDS = ("medusa", "eagle", "eagle3")
DRAFT_VOCAB = 40
DEPTHS = 4  # depths that overfitted heads have learnt
CLASSES: dict[str, tuple[type, type]] = {
    "medusa": (MedusaConfig, MedusaHeads),
    "eagle": (EagleConfig, EagleHead),
    "eagle3": (Eagle3Config, Eagle3Head),
}


def method_of(kind: str) -> str:
    """The name by which `generate` knows this kind of head."""
    return "medusa" if kind == "medusa" else "eagle"


def make_head(kind: str, target: PreTrainedModel, seed: int = 1, std: float = 0.3, **overrides: Any) -> Any:
    """Return a bound head of seeded random weights; `draft_vocab_size=D` keeps D scattered ids."""
    config_class, head_class = CLASSES[kind]
    head = head_class(config_class.for_target(target.config, **overrides)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, std, generator=generator)
    if kind == "eagle3" and head.pruned:
        kept = torch.randperm(head.config.vocab_size, generator=generator)[: head.config.draft_vocab_size]
        head.set_draft_vocab(kept.sort().values)
    return head.bind(target)


def draft_vocab(ids: Tensor, size: int, vocab: int) -> Tensor:
    """Return the `size` ids that occur most often in `ids`, sorted: the draft vocabulary of these texts."""
    counts = torch.bincount(ids.flatten(), minlength=vocab)
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def features(head: Any, target: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return what the head's `fuse` takes for whole texts `[B, L]`, from one forward of the target."""
    with torch.no_grad():
        states = hf.hidden_states(target, ids, None, head.taps)
    return torch.cat([states[tap] for tap in head.taps], dim=-1)


def overfit(head: Any, target: PreTrainedModel, ids: Tensor, steps: int = 400) -> Any:
    """Train a head on texts `[B, L]` until it predicts them all, or `steps` are over."""
    loss_of = medusa_loss if isinstance(head, MedusaHeads) else eagle_loss
    states = features(head, target, ids)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(steps):
        loss, right = loss_of(head, states, ids)
        if right:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.requires_grad_(False).eval()


def medusa_loss(heads: Any, states: Tensor, ids: Tensor) -> tuple[Tensor, bool]:
    """Head i at position p predicts token p + 2 + i."""
    logits = heads(states)  # [K, B, L, V]
    parts = [(logits[i, :, : -2 - i].flatten(0, 1), ids[:, 2 + i :].flatten()) for i in range(len(logits))]
    return _cross_entropy(parts)


def eagle_loss(head: Any, states: Tensor, ids: Tensor) -> tuple[Tensor, bool]:
    """Every depth at entry i predicts token i + 2, where the head's vocabulary has it."""
    gathered = gather_entries(chains(torch.ones_like(ids, dtype=torch.bool), DEPTHS))
    outputs = unroll(head, ids[:, 1:-1], states[:, :-2], gathered)  # [B, A, J, H]
    wanted = gathered.take(ids[:, 2:])[:, :, None].expand(-1, -1, DEPTHS)
    if hasattr(head, "target_to_draft"):
        wanted = head.target_to_draft[wanted]
    counts = gathered.depths & (wanted >= 0)
    return _cross_entropy([(head.logits(outputs)[counts], wanted[counts])])


def _cross_entropy(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, bool]:
    right = all(torch.equal(logits.argmax(-1), wanted) for logits, wanted in parts)
    return torch.stack([F.cross_entropy(logits, wanted) for logits, wanted in parts]).sum(), right


def own_texts(target: PreTrainedModel, batch: int = 4, new_tokens: int = 24) -> Tensor:
    """Return the target's greedy continuations of `left_padded` prompts, moved to the left, zeros behind, `[B, L]`."""
    ids, mask = left_padded(batch)
    texts = target.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
    pads = (mask == 0).sum(1, keepdim=True)
    place = torch.arange(texts.shape[1])[None, :] + pads
    return torch.where(place < texts.shape[1], texts.gather(1, place.clamp(max=texts.shape[1] - 1)), 0)


@lru_cache(maxsize=64)
def overfitted(family: str, kind: str) -> Any:
    """Return the shared head that has learnt its family's `own_texts`; take `head_for` to use it on a target."""
    target = tiny_model(family)
    texts = own_texts(target)
    overrides = {"draft_vocab_size": DRAFT_VOCAB} if kind == "eagle3" else {}
    torch.manual_seed(2)
    config_class, head_class = CLASSES[kind]
    head = head_class(config_class.for_target(target.config, **overrides)).bind(target)
    if kind == "eagle3":
        head.set_draft_vocab(draft_vocab(texts, DRAFT_VOCAB, target.config.vocab_size))
    return overfit(head, target, texts)


def head_for(target: PreTrainedModel, family: str, kind: str, trained: bool) -> Any:
    """Return a head of its own for a target of a family: overfitted to its greedy text, or random."""
    if trained:
        return copy.deepcopy(overfitted(family, kind)).bind(target)
    return make_head(kind, target, **({"draft_vocab_size": DRAFT_VOCAB} if kind == "eagle3" else {}))
