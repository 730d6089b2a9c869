"""Configs of the trained heads: strict, sized from a target's config, saved as config.json beside the weights.

`for_target(target.config)` builds one; the heads, the proposers and the loaders read it. Everything a decoder has to
know travels here: sizes, taps, vocabulary, which parts are shared with the target, the best measured tree, and which
target the head was trained for.
"""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .base_config import HeadConfig
from .sizes import default_taps, layer_sizes

LAYER_STYLES = ("llama", "qwen3")


@strict
class MedusaConfig(HeadConfig):
    """Config of `MedusaHeads`: K heads of `num_hidden_layers` residual blocks each.

    Args:
        num_heads: K; head i (from 0) read at position c-1 proposes the token at c+1+i.
        vocab_size: V; 0 = not known before a target is bound (Medusa files without LM heads do not say it).
        share_lm_head: True (the target's LM head serves all heads) or False (each head has its own, as in Medusa v1).
        bias: Whether the residual blocks have biases.
    """

    model_type = "spechead-medusa"
    num_heads: int = 4
    bias: bool = True

    def check(self) -> None:
        """Raise ValueError for values that no Medusa heads can have."""
        super().check()
        if self.num_heads < 1:
            raise ValueError(f"num_heads={self.num_heads} predicts nothing; give at least 1.")
        if self.vocab_size == 0 and not self.share_lm_head:
            raise ValueError("vocab_size=0 (not known) needs share_lm_head=True: own LM heads have that many rows.")


class DraftLayerConfig(HeadConfig):
    """Fields of the heads that run decoder layers (EAGLE-1/2/3): the names a Llama or Qwen3 layer reads.

    Args:
        intermediate_size, num_attention_heads, num_key_value_heads, head_dim, rope_parameters, rms_norm_eps,
            attention_bias, mlp_bias, max_position_embeddings: As in a Llama config, taken from the target
            (num_key_value_heads 0 = num_attention_heads, head_dim 0 = hidden_size / num_attention_heads).
        layer_style: "llama", or "qwen3" (RMS norms on queries and keys).
        target_hidden_size: Width of one tap; 0 = hidden_size.
        share_embeddings: Whether the target's input embeddings are used (by reference) instead of own ones.
        fc_bias: Whether the fusing projection has a bias.
    """

    intermediate_size: int = 11008
    num_attention_heads: int = 32
    num_key_value_heads: int = 0
    head_dim: int = 0
    rope_parameters: dict[str, Any] | None = None
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    max_position_embeddings: int = 2048
    layer_style: str = "llama"
    target_hidden_size: int = 0
    share_embeddings: bool = True
    fc_bias: bool = False

    attention_dropout: ClassVar[float] = 0.0  # read by the layers; heads train without it

    def __post_init__(self, **kwargs: Any) -> None:
        self.refuse_unknown(kwargs)
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        self.target_hidden_size = self.target_hidden_size or self.hidden_size
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        super().__post_init__(**kwargs)

    def check(self) -> None:
        """Raise ValueError for values that no draft layer can have."""
        super().check()
        if self.layer_style not in LAYER_STYLES:
            raise ValueError(f"layer_style={self.layer_style!r} is unknown; give one of {', '.join(LAYER_STYLES)}.")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even and at least 2: rotary positions turn pairs.")
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}."
            )
        for share in ("share_lm_head", "share_embeddings"):
            if getattr(self, share) and self.target_hidden_size != self.hidden_size:
                raise ValueError(
                    f"{share}=True needs hidden_size={self.hidden_size} equal to target_hidden_size="
                    f"{self.target_hidden_size}; set {share}=False or make the sizes equal."
                )

    @classmethod
    def sizes_from(cls, text: PreTrainedConfig, overrides: dict[str, Any]) -> dict[str, Any]:
        """Return the decoder layer's sizes."""
        return layer_sizes(text, overrides) | {"target_hidden_size": text.hidden_size}


@strict
class EagleConfig(DraftLayerConfig):
    """Config of `EagleHead` (EAGLE-1 and EAGLE-2: the same weights, another tree)."""

    model_type = "spechead-eagle"

    def check(self) -> None:
        """Raise ValueError for values that no EAGLE-1/2 head can have."""
        super().check()
        if self.target_hidden_size != self.hidden_size:
            raise ValueError(
                f"An EAGLE head works on the target's own feature: hidden_size={self.hidden_size} must equal "
                f"target_hidden_size={self.target_hidden_size}."
            )


@strict
class Eagle3Config(DraftLayerConfig):
    """Config of `Eagle3Head`.

    Args:
        draft_vocab_size: D, rows of the head's own LM head; 0 = V.
        share_lm_head: False by default: the head has its own LM head. True needs D == V.
        norm_before_residual: Residual of the first layer is the normed state instead of the state.
        norm_output: The state handed to the next depth is the normed one.
        norm_before_fc: One RMS norm over the concatenated taps.
        fc_norm: One RMS norm per tap. Excludes `norm_before_fc`.
    """

    model_type = "spechead-eagle3"
    draft_vocab_size: int = 0
    share_lm_head: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False

    taps_per_position: ClassVar[int] = 3

    def __post_init__(self, **kwargs: Any) -> None:
        self.draft_vocab_size = self.draft_vocab_size or self.vocab_size
        super().__post_init__(**kwargs)

    def check(self) -> None:
        """Raise ValueError for values that no EAGLE-3 head can have."""
        super().check()
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size={self.draft_vocab_size} must lie in 1..vocab_size={self.vocab_size}.")
        if self.share_lm_head and self.draft_vocab_size != self.vocab_size:
            raise ValueError(
                f"share_lm_head=True gives logits over all {self.vocab_size} target ids, but draft_vocab_size="
                f"{self.draft_vocab_size}; set share_lm_head=False or draft_vocab_size={self.vocab_size}."
            )
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other: one norm over all taps, or one per tap.")

    @classmethod
    def taps_for(cls, num_layers: int) -> list[int]:
        """Return the default taps for a target of n layers (see `default_taps`)."""
        return list(default_taps(num_layers))
