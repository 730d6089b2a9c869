"""How a fresh EAGLE head starts: from the target's own last layer, with a fusing projection that passes the last tap
on.

The taps are states of the target's residual stream, and so is what its LM head reads after the final norm. A head
whose projection passes the highest tap through, whose layer is the target's last one and whose LM head rows are the
target's, therefore already speaks the right language at its first step; a random projection has to learn it.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ..heads.layer import DraftLayerHead
from ..heads.sizes import text_config


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
