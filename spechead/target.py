"""Target: a causal LM as the decode loop sees it: prefill, tree forward, taps, and what its attention can do.

The draft model of draft_model.py is one too. A probe runs once at `enable_speculation` and again only after its key
(attention implementation, dtype, config) changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from . import attention, hf
from .cache import RaggedCache
from .proposal import Proposal
from .tree import chain_parents

NO_SPECULATION = "use it without speculative=..."


@dataclass(frozen=True)
class Verdict:
    """What the probe found: "tree" (any tree, ragged batches) or "chain" (one row), the mask form, and why."""

    tier: str
    mask_form: str | None
    reason: str


def learned_positions(config: PreTrainedConfig) -> int | None:
    """Return how many positions a text config's learned table has; None for rotary and other computed positions."""
    if getattr(config, "rope_parameters", None) is not None or hasattr(config, "rotary_dim"):
        return None
    return getattr(config, "max_position_embeddings", None)


class Target:
    """A causal LM wrapped for ragged tree forwards.

    Args:
        model: the model; nothing is hung on it.

    Raises:
        ValueError: if its layers keep a state that cannot be rolled back, or it is an encoder-decoder.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        if model.config.is_encoder_decoder:
            raise ValueError(f"{type(model).__name__} is an encoder-decoder; speculation needs a decoder-only LM.")
        self.config = model.config.get_text_config(decoder=True)
        unsupported = hf.unsupported_layers(model.config)
        if unsupported or getattr(model, "_is_stateful", False):
            raise ValueError(
                f"{type(model).__name__} keeps recurrent or hybrid state ({', '.join(unsupported) or 'stateful'}), "
                "which rejected drafts cannot be rolled back from; use it without speculative=..."
            )
        self.num_layers: int = self.config.num_hidden_layers
        self._verdict: tuple[Any, Verdict] | None = None

    @property
    def vocab_size(self) -> int:
        """Rows of the vocabulary, which a user may resize at any time."""
        size: int = self.config.vocab_size
        return size

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype, which masks take."""
        return self.model.dtype

    @property
    def max_positions(self) -> int | None:
        """Positions of a learned table, which cannot be exceeded; None for rotary and other computed positions."""
        return learned_positions(self.config)

    @property
    def verdict(self) -> Verdict:
        """The probe's finding for the model as it is now; every decoding call asks for it before its first step.

        Raises:
            ValueError: if not even a chain can be verified.
        """
        model = self.model
        modes = (model.training, getattr(model, "is_activation_checkpointing", False))  # dropout; layers without cache
        fields = {name: value for name, value in vars(self.config).items() if name != "_attn_implementation_internal"}
        key = (attention.implementation(self.config), self.dtype, self.device, *modes, str(fields))
        if self._verdict is None or self._verdict[0] != key:
            self._verdict = (key, probe(self))
        return self._verdict[1]

    @property
    def settled(self) -> Verdict:
        """The verdict found last: whether the model changed is asked once a call, not once a forward."""
        return self._verdict[1] if self._verdict is not None else self.verdict

    def new_cache(self, batch: int, capacity: int) -> RaggedCache:
        """Allocate an empty ragged cache."""
        return RaggedCache(batch, capacity, self.device)

    def prefill(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        cache: RaggedCache,
        taps: Iterable[int] = (),
        chunk: int | None = None,
        **extra: Any,
    ) -> hf.Forward:
        """Feed the part of a left-padded prompt that is not cached yet, as plain decoding does.

        Args:
            input_ids: the whole prompt `[B, P]`.
            attention_mask: `[B, P]` of 0 and 1, or None where nothing is padded.
            cache: holds a common number of tokens of every row; holds P, pads included, afterwards.
            taps: hidden states to capture.
            chunk: tokens a forward (`prefill_chunk_size`); None feeds all at once.
            extra: further `[B, P]` tensors for the forward, such as token type ids.

        Returns:
            Logits of the last position `[B, 1, V]`, taps of all newly fed positions.
        """
        start, width = int(cache.lengths[0]), input_ids.shape[1]
        if attention_mask is None:
            positions = torch.arange(width, device=input_ids.device).expand_as(input_ids)
        else:
            positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        lent = hf.lend(cache, self.num_layers)
        parts: list[hf.Forward] = []
        for first in range(start, width, chunk or width):
            span = slice(first, min(first + (chunk or width), width))
            cache.open(span.stop - span.start)
            parts.append(
                hf.call(
                    self.model,
                    input_ids[:, span],
                    positions[:, span],
                    None if attention_mask is None else attention_mask[:, : span.stop],
                    lent,
                    taps,
                    last_only=True,
                    **{name: value[:, span] for name, value in extra.items()},
                )
            )
            cache.advance(span.stop - span.start)
        taken = {tap: torch.cat([part.taps[tap] for part in parts], dim=1) for tap in parts[0].taps}
        return hf.Forward(parts[-1].logits, taken)

    def forward(self, proposal: Proposal, cache: RaggedCache, taps: Iterable[int] = ()) -> hf.Forward:
        """Feed every row's nodes behind its own prefix; nothing is counted as cached until `cache.keep`.

        It runs in inference mode, which spares a small target some 4 % of a one-token forward.

        Returns:
            Logits `[B, N, V]` and taps `{tap: [B, N, H]}`, not to be written to: copy them for that.

        Raises:
            ValueError: if it takes no tree masks, and gets a tree or several rows.
        """
        # Padding may lie beyond a learned position table, so it takes position 0; nothing attends to it.
        positions = (cache.lengths[:, None] + proposal.depths) * proposal.real  # [B, N]
        width = cache.open(proposal.tokens.shape[1])
        alone = proposal.tokens.shape == (1, 1)
        mask, pays = None, attention.pays(self.config, self.device)
        if self.settled.tier == "tree" and (pays or not alone):
            mask = self._masks(proposal, cache, positions, width)
        elif not alone and not (len(proposal.tokens) == 1 and proposal.is_chain):
            raise ValueError(
                f"{type(self.model).__name__} takes no tree mask ({self.settled.reason}), so it runs one row's chain "
                f"at a time; got {len(proposal.tokens)} rows with parents {proposal.parents.tolist()}. Draft a chain "
                "for one row, or load the model with attn_implementation='sdpa'."
            )
        lent = hf.lend(cache, self.num_layers)
        grouped = attention.grouped(self.config) if pays and mask is not None else nullcontext()
        with torch.inference_mode(not torch.is_grad_enabled()), grouped:
            return hf.call(self.model, proposal.tokens, positions, mask, lent, taps)

    def _masks(self, proposal: Proposal, cache: RaggedCache, positions: Tensor, width: int) -> Any:
        batch, nodes = proposal.tokens.shape
        slots = torch.arange(width, device=positions.device)[None, :]
        node = slots - cache.lengths[:, None]  # [B, W]: which node sits in a slot
        inside = (node >= 0) & (node < nodes)
        index = node.clamp(0, nodes - 1)
        by_tree = proposal.tree_mask.gather(2, index[:, None, :].expand(batch, nodes, width)) & inside[:, None, :]
        allowed = by_tree | (node < 0)[:, None, :]
        keys = torch.where(inside, positions.gather(1, index), slots)
        form = self.settled.mask_form
        if form is None:
            raise ValueError("this target has no working tree mask; a chain must be fed without one.")
        return hf.model_masks(self.config, form, allowed, positions, keys, self.dtype)


class _Fixed(Target):
    """A target whose verdict is being tried out by the probe."""

    def __init__(self, target: Target, verdict: Verdict) -> None:
        super().__init__(target.model)
        self.trial = verdict

    @property
    def verdict(self) -> Verdict:
        """The verdict on trial."""
        return self.trial


@torch.no_grad()
def probe(target: Target) -> Verdict:
    """Find out whether trees, or at least chains, can be verified on this model.

    A tree of two branches is run at once and node by node; a sibling is changed and non-descendants are looked at.
    Both differences must stay within three times the noise of a plain multi-token chain, or 1e-5 of the largest logit
    in float32 (four units of rounding in lower precision).

    Raises:
        ValueError: if a chain's logits differ from one-by-one decoding too.
    """
    if target.device.type == "meta":
        raise ValueError(
            f"{type(target.model).__name__} is on the meta device and holds no weights, so it cannot be probed; load "
            "its weights first."
        )
    chain = Verdict("chain", None, "")
    prompt = _tokens(target, 4, 1)
    nodes = _tokens(target, 5, 11)[0]
    parents = torch.tensor([[-1, 0, 0, 1, 2]], device=target.device)
    left = _one_by_one(_Fixed(target, chain), prompt, nodes[[0, 1, 3]])  # without masks, as the library itself decodes
    right = _one_by_one(_Fixed(target, chain), prompt, nodes[[0, 2, 4]])
    real = torch.ones(1, 5, dtype=torch.bool, device=target.device)
    three = Proposal(nodes[None, [0, 1, 3]], chain_parents(1, 3, target.device), real[:, :3])
    at_once = _logits(_Fixed(target, chain), prompt, three)
    scale = float(left.abs().max())
    low = target.dtype not in (torch.float32, torch.float64)
    floor = 4 * torch.finfo(target.dtype).eps if low else 1e-5
    noise = float((at_once - left).abs().max())
    if not noise <= max(1.0, scale) * (0.25 if low else 1e-3):
        raise ValueError(
            f"{type(target.model).__name__} gives other logits for several tokens at once than one by one "
            f"(difference {noise:.3g}), so drafts cannot be verified on it; "
            + ("call model.eval(): training turns dropout on." if target.model.training else NO_SPECULATION)
        )
    bound = max(3 * noise, floor * scale)
    reason = f"attn_implementation={attention.implementation(target.config)!r} takes no tree mask"
    if attention.implementation(target.config) not in ("sdpa", "eager"):
        return Verdict("chain", None, reason)
    tree = Proposal(nodes[None], parents, real)
    other = nodes.clone()
    other[2] = (nodes[2] + 1) % target.vocab_size
    changed = replace(tree, tokens=other[None])
    for form in hf.mask_forms(target.config):
        trial = _Fixed(target, Verdict("tree", form, ""))
        try:
            got, moved = _logits(trial, prompt, tree), _logits(trial, prompt, changed)
            alone = _one_by_one(trial, prompt, nodes[:1])
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
            reason = f"a tree mask raises {type(error).__name__}: {error}"
            continue
        worst = max(
            float((got[[0, 1, 3]] - left).abs().max()),
            float((got[[0, 2, 4]] - right).abs().max()),
            float((got[[0, 1, 3]] - moved[[0, 1, 3]]).abs().max()),
            float((alone - left[:1]).abs().max()),
        )
        if worst <= bound:
            return Verdict("tree", form, f"tree logits within {worst:.2g} of one-by-one decoding (bound {bound:.2g})")
        reason = f"a tree mask moves logits by {worst:.3g} (bound {bound:.3g})"
    return Verdict("chain", None, reason)


def _tokens(target: Target, count: int, seed: int) -> Tensor:
    ids = [(seed + 7 * i * i + 3 * i) % target.vocab_size for i in range(count)]
    return torch.tensor([ids], device=target.device)


def _logits(target: Target, prompt: Tensor, proposal: Proposal) -> Tensor:
    cache = target.new_cache(1, prompt.shape[1] + proposal.tokens.shape[1])
    target.prefill(prompt, None, cache)
    return target.forward(proposal, cache).logits[0].float()


def _one_by_one(target: Target, prompt: Tensor, nodes: Tensor) -> Tensor:
    cache = target.new_cache(1, prompt.shape[1] + len(nodes))
    target.prefill(prompt, None, cache)
    rows = []
    for token in nodes:
        rows.append(target.forward(Proposal.root_only(token[None]), cache).logits[0].float())
        cache.advance(1)
    return torch.cat(rows)
