"""What every head's config has: sizes, taps, vocabulary, what is shared, best settings, the target's provenance.

Strict: a value of the wrong type and a name that no head has are errors, never extra fields. `heads/config.py` has the
configs of the methods.
"""

import difflib
from dataclasses import fields
from typing import Any, ClassVar

from transformers import PreTrainedConfig
from typing_extensions import Self

from .sizes import logit_scale, text_config

COUNTS = (
    "hidden_size",
    "num_hidden_layers",
    "target_num_layers",
    "trained_positions",
    "num_draft_tokens",
    "tree_size",
    "branching",
)
# Best measured settings of drafting.
DRAFTING_FIELDS = ("tree", "num_draft_tokens", "tree_size", "branching", "confidence_threshold")
TREES = ("chain", "static", "dynamic")
# What transformers itself hands to a config's constructor or writes into config.json besides the declared fields.
LIBRARY_KEYS = {
    "model_type",
    "name_or_path",
    "_name_or_path",
    "_commit_hash",
    "torch_dtype",
    "attn_implementation",
    "experts_implementation",
    "output_attentions",
    "num_labels",
}


class HeadConfig(PreTrainedConfig):
    """Fields that every head has.

    Args:
        vocab_size: V, rows of the target's LM head.
        hidden_size: H, width of the head.
        num_hidden_layers: Layers of the head (residual blocks per head for Medusa).
        hidden_act: Activation of the head's MLPs.
        initializer_range: Standard deviation of fresh weights.
        logit_scale: Factor on the head's logits; the target's own where its LM head is shared.
        share_lm_head: Whether the target's LM head is used (by reference, never saved) instead of an own one.
        taps: Hidden states of the target that the head reads, low to high (k in 0..n-1 = entering layer k, n = after
            the final norm); None = the method's default, known once a target is bound.
        target_num_layers: n; None while no target is known.
        target_name, target_revision, target_fingerprint: Which target the head was trained for; `load_head` warns
            when another one is given.
        trained_positions: Positions that the head's attention was trained for, in its own training or as the target's
            layer that it started from; drafting stops there, decoding goes on. None = no limit (Medusa) or none known.
        num_draft_tokens, tree, tree_size, branching: Best measured settings, as in `SpeculativeConfig` (depth;
            "chain", "static", "dynamic" or paths of ranks; nodes kept; children per node); None = the proposer's own.
        confidence_threshold: Likewise, as in `DraftingConfig`: an EAGLE head stops drafting below it. None = never.
        tie_word_embeddings: Always False: tying would overwrite a pruned LM head with the full embedding.
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    num_hidden_layers: int = 1
    hidden_act: str = "silu"
    initializer_range: float = 0.02
    logit_scale: float = 1.0
    share_lm_head: bool = True
    taps: list[int] | tuple[int, ...] | None = None
    target_num_layers: int | None = None
    target_name: str | None = None
    target_revision: str | None = None
    target_fingerprint: dict[str, Any] | None = None
    trained_positions: int | None = None
    num_draft_tokens: int | None = None
    tree: str | list[list[int]] | None = None
    tree_size: int | None = None
    branching: int | None = None
    confidence_threshold: float | int | None = None
    tie_word_embeddings: bool = False

    taps_per_position: ClassVar[int] = 1  # how many taps the head fuses into one feature

    def __post_init__(self, **kwargs: Any) -> None:
        self.refuse_unknown(kwargs)
        super().__post_init__(**kwargs)
        if self.target_num_layers is not None and self.taps is None:
            self.taps = self.taps_for(self.target_num_layers)
        if self.taps is not None:
            self.taps = list(self.taps)
        self.check()

    def refuse_unknown(self, kwargs: dict[str, Any]) -> None:
        """Raise ValueError for names that this config does not have, with the nearest one that it has."""
        known = [field.name for field in fields(self)]
        for name in sorted(set(kwargs) - LIBRARY_KEYS):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" Its fields are: {', '.join(sorted(known))}."
            raise ValueError(f"{type(self).__name__} has no field {name!r}.{hint}")

    def check(self) -> None:
        """Raise ValueError for values that no head of this kind can have."""
        if self.tie_word_embeddings:
            raise ValueError(
                "tie_word_embeddings=True would replace the head's own LM head by the embedding when it is loaded; "
                "heads never tie. Set it to false (share_lm_head says whether the target's LM head is used)."
            )
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        if self.confidence_threshold is not None and not 0 <= self.confidence_threshold < 1:
            raise ValueError(f"confidence_threshold={self.confidence_threshold} must be at least 0 and below 1.")
        if isinstance(self.tree, str) and self.tree not in TREES:
            raise ValueError(f"tree={self.tree!r} must be one of {', '.join(TREES)}, or a list of paths of ranks.")
        if self.taps is not None:
            self.check_taps(list(self.taps))

    def check_taps(self, taps: list[int]) -> None:
        """Raise ValueError unless the taps are distinct, ascending, as many as the head fuses, and in range."""
        wrong = None
        if len(taps) != self.taps_per_position:
            wrong = f"has {len(taps)} id(s), this head fuses {self.taps_per_position}"
        elif sorted(set(taps)) != taps:
            wrong = "is not strictly ascending"
        elif taps[0] < 0 or (self.target_num_layers is not None and taps[-1] > self.target_num_layers):
            wrong = f"leaves the range 0..{self.target_num_layers or 'n'} (n = layers of the target)"
        if wrong:
            raise ValueError(
                f"taps={taps} {wrong}. A tap k in 0..n-1 is the state entering layer k, n the state after the "
                "final norm."
            )

    @classmethod
    def taps_for(cls, num_layers: int) -> list[int]:
        """Return this method's default taps for a target of n layers: the state after the final norm."""
        return [num_layers]

    @classmethod
    def for_target(cls, target_config: PreTrainedConfig, **overrides: Any) -> Self:
        """Build a config for a target, sized from its text config.

        Args:
            target_config: The config of the target model (composite configs are unwrapped).
            **overrides: Fields to set instead of the target's values.

        Returns:
            The config.

        Raises:
            ValueError: If the target's config does not say a size and no override gives it, or if a field is unknown.
        """
        text = text_config(target_config)
        shares = overrides.get("share_lm_head", cls.share_lm_head)
        values = {
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "target_num_layers": text.num_hidden_layers,
            "target_name": getattr(target_config, "name_or_path", None) or None,
            "logit_scale": logit_scale(text) if shares else 1.0,  # an own LM head learns its scale
        }
        values |= cls.sizes_from(text, overrides)
        return cls(**(values | overrides))

    @classmethod
    def sizes_from(cls, text: PreTrainedConfig, overrides: dict[str, Any]) -> dict[str, Any]:
        """Return the sizes that this kind of head takes from the target's text config besides V, H and n."""
        return {}
