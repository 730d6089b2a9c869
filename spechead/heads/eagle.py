"""EAGLE-1 and EAGLE-2: one decoder layer that continues the target's features (Li et al. 2024).

    feature'_i = layer(fc(cat(embedding(token_{i+1}), feature_i)));   logits = LM head of the target (feature'_i)

The feature is the state after the target's final norm, which its LM head reads; so the head's own output goes to the
same LM head and to the next depth as it is. EAGLE-2 changes only the tree. Called by proposers/eagle.py and training.
"""

import torch
from torch import nn
from transformers.cache_utils import Cache

from .config import EagleConfig
from .layer import DraftLayerHead, DraftRotaryEmbedding, decoder_layer, first_eagle_layer


class EagleHead(DraftLayerHead):
    """An EAGLE-1/2 draft layer.

    Args:
        config: Sizes and flags; `EagleConfig.for_target(target.config)` makes one.
    """

    config: EagleConfig
    config_class = EagleConfig

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        hidden = config.hidden_size
        if not config.share_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.fc = nn.Linear(2 * hidden, hidden, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            decoder_layer(config, index) if index else first_eagle_layer(config)
            for index in range(config.num_hidden_layers)
        )
        if not config.share_lm_head:
            self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)
        self.rotary_emb = DraftRotaryEmbedding(config)
        self.post_init()

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Return the states that `forward` takes: the features themselves. [B, A, H] -> [B, A, H]."""
        return features.to(self.fc.weight.dtype)

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """Return the predicted features, which the next depth takes as `hidden`.

        Args:
            input_ids: Tokens one ahead of the states: token i+1 beside feature i, [B, N].
            hidden: Features of the target (through `fuse`), or this head's own output, [B, N, H].
            position_ids: RoPE positions, [B, N].
            attention_mask: Additive, [B, 1, N, W], or None = causal.
            cache: Any transformers cache; extended in place, with gradients.

        Returns:
            Predicted features, [B, N, H].

        Raises:
            ValueError: If the mask is not an additive float one, or embeddings are shared and no target is bound.
        """
        state = self.fc(torch.cat([self.embed(input_ids).to(hidden.dtype), hidden], dim=-1))
        attention = self.attention_inputs(state, position_ids, attention_mask, cache)
        for layer in self.layers:
            state = layer(state, **attention)
        return state

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits over the target's vocabulary, [B, N, V], from this head's output, [B, N, H]."""
        return self.apply_lm_head(hidden)
