"""What every head is: a PreTrainedModel that borrows the target's embeddings and LM head by reference.

`bind(target)` checks the pair, takes the shared modules and follows the target's device and dtype. The borrowed
modules stay outside the module tree, so they are never saved, never counted among the head's parameters and never
moved or trained with it. Loading is strict: a missing or an unexpected tensor is an error that names it.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from typing_extensions import Self

from .base_config import HeadConfig
from .sizes import text_config


class Borrowed:
    """The target's modules that a head uses; copies of the head borrow the same ones."""

    def __init__(self, embeddings: nn.Module, lm_head: nn.Module):
        self.embeddings, self.lm_head = embeddings, lm_head

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class Head(PreTrainedModel):
    """Base class of the heads."""

    config: HeadConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    _supports_sdpa = True
    lm_head: nn.Linear
    borrowed: Borrowed | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        """Hidden states of the target that this head reads, low to high (n = after the final norm).

        Raises:
            ValueError: If they depend on a target that is not bound yet.
        """
        if self.config.taps is None:
            raise ValueError(
                f"This {type(self).__name__} does not say which taps it reads; they follow from the number of the "
                "target's layers. Call head.bind(target) or load_head(path, target) first."
            )
        return tuple(self.config.taps)

    def bind(self, target: PreTrainedModel, *, match_dtype: bool = True) -> Self:
        """Check the pair, borrow the target's embeddings and LM head, follow its device and dtype.

        Args:
            target: The model whose output is kept.
            match_dtype: Whether the head is cast to the target's compute dtype (False for training in float32).

        Returns:
            This head.

        Raises:
            ValueError: If hidden size, vocabulary or taps do not fit the target.
        """
        check_pair(self.config, target.config)
        embeddings, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
        if lm_head is None:
            raise ValueError(f"{type(target).__name__} has no LM head; load the target with AutoModelForCausalLM.")
        text = text_config(target.config)
        num_layers = text.num_hidden_layers
        self.config.target_num_layers = num_layers
        self.config.vocab_size = text.vocab_size
        if self.config.taps is None:
            self.config.taps = self.config.taps_for(num_layers)
        # Past nn.Module.__setattr__, which would put them into the module tree.
        object.__setattr__(self, "borrowed", Borrowed(embeddings, lm_head))
        weight = lm_head.get_parameter("weight")
        if not weight.is_meta:  # offloaded: the target's own hooks place it
            self.to(weight.device)
        if match_dtype:
            self.to(weight.dtype if weight.is_floating_point() else target.dtype)
        return self

    def apply_lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the target's LM head, or the own one, and the logit scale. [..., H] -> [..., V or D]."""
        lm_head = self.shared("lm_head") if self.config.share_lm_head else self.lm_head
        logits = lm_head(to_weight(hidden, lm_head, cast=True)).to(hidden.device)
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale

    def shared(self, name: str) -> nn.Module:
        """Return one of the target's modules.

        Raises:
            ValueError: If no target is bound.
        """
        if self.borrowed is None:
            raise ValueError(
                f"{type(self).__name__} shares the target's {name} and has no target yet; call head.bind(target)."
            )
        return getattr(self.borrowed, name)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a head in spechead's own layout, strictly. Arguments as in transformers.

        Raises:
            ValueError: If a tensor is missing, unexpected or of another shape.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        loaded: Any = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        head, info = loaded
        refuse_key_errors(
            str(pretrained_model_name_or_path), info.get("missing_keys", ()), info.get("unexpected_keys", ())
        )
        return (head, info) if wants_info else head


def refuse_key_errors(source: str, missing: Any, unexpected: Any) -> None:
    """Raise ValueError naming the tensors that are missing from, or unexpected in, a checkpoint."""
    parts = [
        f"{label}: {', '.join(sorted(keys))}"
        for label, keys in (("missing", missing), ("unexpected", unexpected))
        if keys
    ]
    if parts:
        raise ValueError(
            f"{source} does not hold the tensors that its config describes ({'; '.join(parts)}). Nothing is left at "
            "random values or dropped: mend the checkpoint or its config."
        )


def to_weight(tensor: torch.Tensor, module: nn.Module, *, cast: bool = False) -> torch.Tensor:
    """Move a tensor to a module's weight, if asked also to its dtype; offloaded modules place their inputs themselves.

    Under autocast the dtype is left alone.
    """
    weight = module.get_parameter("weight")
    if not weight.is_meta:
        tensor = tensor.to(weight.device)
    if cast and weight.is_floating_point() and not torch.is_autocast_enabled(tensor.device.type):
        tensor = tensor.to(weight.dtype)
    return tensor


def check_pair(config: HeadConfig, target_config: PreTrainedConfig) -> None:
    """Raise ValueError unless hidden size, vocabulary, layers and taps of a head fit a target.

    Args:
        config: The head's config.
        target_config: The target's config; composite ones are unwrapped.
    """
    text = text_config(target_config)
    name = target_config.name_or_path or type(target_config).__name__
    hidden = getattr(config, "target_hidden_size", None) or config.hidden_size
    if hidden != text.hidden_size:
        raise ValueError(
            f"The head reads hidden states of size {hidden}, the target {name} has hidden size {text.hidden_size}; "
            "give the target that the head was trained for."
        )
    if config.vocab_size not in (0, text.vocab_size):
        raise ValueError(
            f"The head was built for a vocabulary of {config.vocab_size} ids, the target {name} has "
            f"{text.vocab_size}; give the target that the head was trained for (with its embeddings not resized)."
        )
    num_layers = text.num_hidden_layers
    if config.taps is not None and max(config.taps) > num_layers:
        raise ValueError(
            f"The head reads taps {list(config.taps)}, the target {name} has {num_layers} layers and so taps "
            f"0..{num_layers}; give the target that the head was trained for."
        )
    if config.target_num_layers is not None and config.target_num_layers != num_layers:
        raise ValueError(
            f"The head was trained for a target of {config.target_num_layers} layers, {name} has {num_layers}; its "
            f"taps {config.taps} would mean other states."
        )
