"""How a head starts: from another one (`init_head`), or fresh from its target: an EAGLE head from the target's last
layer, with a fusing projection that passes the last tap on; Medusa heads of their own LM heads from the target's.

The taps are states of the target's residual stream, and so is what its LM head reads after the final norm. A head
whose projection passes the highest tap through, whose layer is the target's last one and whose LM head rows are the
target's, therefore already speaks the right language at its first step; a random projection has to learn it.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..heads.base import Head, check_pair
from ..heads.layer import DraftLayerHead
from ..heads.load import load_head
from ..heads.medusa import MedusaHeads
from ..heads.sizes import text_config


def loaded_head(path: str, cls: type[Head], target: PreTrainedConfig) -> Head:
    """Load the head of `init_head` in float32; taps that a published one leaves open follow from the target's layers.

    Args:
        path: a directory or a Hub repo id, in any layout that `load_head` reads.
        cls: the kind of head that is trained.
        target: the target's config.

    Raises:
        ValueError: if it is of another kind, or does not fit the target.
    """
    head = load_head(path)
    if not isinstance(head, cls):
        raise ValueError(f"init_head={path} is a {type(head).__name__}; this recipe trains a {cls.__name__}.")
    check_pair(head.config, target)
    if head.config.taps is None:
        head.config.taps = head.config.taps_for(text_config(target).num_hidden_layers)
    return head.float()


@torch.no_grad()
def start_lm_heads(heads: MedusaHeads, lm_head: nn.Linear) -> None:
    """Copy the target's LM head `[V, H]` into Medusa heads that have their own; others stay as they are."""
    if not heads.config.share_lm_head:
        for own in heads.lm_heads.children():
            own.get_parameter("weight").copy_(lm_head.weight)


@torch.no_grad()
def start_from_target(head: DraftLayerHead, target: PreTrainedModel) -> None:
    """Copy what fits from the target, and make the fusing projection the identity on its last H inputs.

    The other inputs (lower taps, or EAGLE-1's embedding) start at zero and are learned. A head of another width than
    its taps keeps its random projection.

    Args:
        head: a fresh EAGLE head.
        target: its target.
    """
    copied = head.init_from_target(target)
    weight = head.fc.weight  # [H, inputs]
    # Attention that is the target's was trained as far as that: distances are what it has to tell apart.
    if {f"layers.0.self_attn.{name}_proj.weight" for name in "qk"} <= set(copied):
        head.config.trained_positions = getattr(text_config(target.config), "max_position_embeddings", None)
    width = head.config.target_hidden_size
    if weight.shape[0] == width:
        weight.zero_()
        weight[:, -width:].copy_(torch.eye(width))
        if head.fc.bias is not None:
            head.fc.bias.zero_()
