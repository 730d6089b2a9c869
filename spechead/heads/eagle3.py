"""EAGLE-3: a draft layer on three fused taps, trained on its own outputs, over a reduced vocabulary (Li et al. 2025).

    state_i = fc(cat(three taps of position i));   out_i = layers(embedding(token_{i+1}), state_i)
    logits  = lm_head(norm(out_i)) over the D kept target ids;   the next depth takes out_i as its state

Called by proposers/eagle.py and training. Flags that published heads differ in are in `Eagle3Config`.
"""

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from . import vocab
from .config import Eagle3Config
from .layer import DraftLayerHead, DraftRotaryEmbedding, Eagle3Layer, decoder_layer


class Eagle3Head(DraftLayerHead):
    """An EAGLE-3 draft layer.

    Args:
        config: Sizes and flags; `Eagle3Config.for_target(target.config, draft_vocab_size=D)` makes one.
    """

    config: Eagle3Config
    config_class = Eagle3Config
    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        hidden, taps, width = config.hidden_size, config.taps_per_position, config.target_hidden_size
        if not config.share_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.layers = nn.ModuleList(
            decoder_layer(config, index) if index else Eagle3Layer(config) for index in range(config.num_hidden_layers)
        )
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(taps * width, eps=config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                LlamaRMSNorm(config.target_hidden_size, eps=config.rms_norm_eps)
                for _ in range(config.taps_per_position)
            )
        self.fc = nn.Linear(taps * width, hidden, bias=config.fc_bias)
        self.norm = LlamaRMSNorm(hidden, eps=config.rms_norm_eps)
        if not config.share_lm_head:
            self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        if config.draft_vocab_size < config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        self.rotary_emb = DraftRotaryEmbedding(config)
        self._maps: tuple[torch.Tensor | None, int, torch.Tensor, torch.Tensor] | None = None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and self.pruned:  # until set_draft_vocab: the first D ids
            init.zeros_(self.d2t)
            init.copy_(self.t2d, torch.arange(self.config.vocab_size) < self.config.draft_vocab_size)

    @property
    def pruned(self) -> bool:
        """Whether the head's vocabulary is smaller than the target's."""
        return self.config.draft_vocab_size < self.config.vocab_size

    @property
    def draft_to_target(self) -> torch.Tensor:
        """Target id of every draft id, int64 [D]."""
        return self._vocab_maps()[0]

    @property
    def target_to_draft(self) -> torch.Tensor:
        """Draft id of every target id, int64 [V]; -1 where it has none."""
        return self._vocab_maps()[1]

    def _vocab_maps(self) -> tuple[torch.Tensor, torch.Tensor]:
        # Read in every step, so kept until d2t is replaced, written to or moved.
        maps, device = self._maps, self.fc.weight.device
        if self.pruned:
            version = 0 if self.d2t.is_inference() else self.d2t._version
            known = maps is not None and maps[0] is self.d2t and maps[1] == version
        else:
            version, known = 0, maps is not None and maps[2].device == device
        if maps is None or not known:
            size = self.config.vocab_size
            target_ids = vocab.ids_from_offsets(self.d2t) if self.pruned else torch.arange(size, device=device)
            maps = (self.d2t if self.pruned else None, version, target_ids, vocab.draft_ids(target_ids, size))
            self._maps = maps
        return maps[2], maps[3]

    def set_draft_vocab(self, target_ids: torch.Tensor) -> None:
        """Set which target ids the head can draft.

        Args:
            target_ids: Kept ids, strictly ascending, [D].

        Raises:
            ValueError: If their number is not D, or they are not ascending ids of the target.
        """
        size = self.config.draft_vocab_size
        if len(target_ids) != size:
            raise ValueError(
                f"{len(target_ids)} ids were given for draft_vocab_size={size}; build the head with "
                f"draft_vocab_size={len(target_ids)} or give {size} ids."
            )
        d2t, t2d = vocab.offsets_from_ids(target_ids, self.config.vocab_size)
        if self.pruned:
            self.d2t.copy_(d2t)
            self.t2d.copy_(t2d)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Return the states that `forward` takes.

        Args:
            features: The three taps concatenated low to high, [B, A, 3 * H_target].

        Returns:
            States, [B, A, H].
        """
        features = features.to(self.fc.weight.dtype)
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """Return the states that the next depth takes as `hidden`.

        Args:
            input_ids: Tokens one ahead of the states: token i+1 beside state i, [B, N].
            hidden: Fused features of the target (through `fuse`), or this head's own output, [B, N, H].
            position_ids: RoPE positions, [B, N].
            attention_mask: Additive, [B, 1, N, W] with W = cached + N, or None = causal.
            cache: Any transformers cache; extended in place, with gradients: training keeps the keys and values of
                earlier unrolled steps in a DynamicCache and gives the mask over all of them.

        Returns:
            States before the final norm (after it with `norm_output`), [B, N, H].

        Raises:
            ValueError: If the mask is not an additive float one, or embeddings are shared and no target is bound.
        """
        attention = self.attention_inputs(hidden, position_ids, attention_mask, cache)
        state = self.layers[0](self.embed(input_ids).to(hidden.dtype), hidden, **attention)
        for layer in self.layers[1:]:
            state = layer(state, **attention)
        return self.norm(state) if self.config.norm_output else state

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits over the draft vocabulary, [B, N, D], from this head's output, [B, N, H]."""
        return self.apply_lm_head(hidden if self.config.norm_output else self.norm(hidden))
