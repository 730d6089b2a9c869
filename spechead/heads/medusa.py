"""Medusa: K small heads that each guess one further token from the target's last state (Cai et al. 2024).

    x_i = residual blocks of head i (hidden);   block(x) = x + SiLU(W x + b), W starts at zero
    logits_i = LM head (x_i)

Head i, from 0, read at position c-1, proposes the token at c+1+i. Called by proposers/medusa.py and training.
"""

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN

from .base import Head
from .config import MedusaConfig


class ZeroLinear(nn.Linear):
    """A linear layer that starts at zero; the type tells `_init_weights`."""


class ResidualBlock(nn.Module):
    """x + act(W x + b)."""

    def __init__(self, config: MedusaConfig):
        super().__init__()
        self.linear = ZeroLinear(config.hidden_size, config.hidden_size, bias=config.bias)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]."""
        return hidden + self.act(self.linear(hidden))


class MedusaHeads(Head):
    """K Medusa heads.

    Args:
        config: Sizes and flags; `MedusaConfig.for_target(target.config)` makes one.
    """

    config: MedusaConfig
    config_class = MedusaConfig
    main_input_name = "hidden"

    def __init__(self, config: MedusaConfig):
        super().__init__(config)
        self.blocks = nn.ModuleList(
            nn.ModuleList(ResidualBlock(config) for _ in range(config.num_hidden_layers))
            for _ in range(config.num_heads)
        )
        if not config.share_lm_head:
            self.lm_heads = nn.ModuleList(
                nn.Linear(config.hidden_size, config.vocab_size, bias=False) for _ in range(config.num_heads)
            )
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, ZeroLinear):
            return super()._init_weights(module)
        init.zeros_(module.weight)  # SiLU(0) = 0: an untrained head is the LM head
        if module.bias is not None:
            init.zeros_(module.bias)

    def hidden_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what each head gives to its LM head. [..., H] -> [K, ..., H]."""
        hidden = hidden.to(self.dtype)
        outputs = []
        for blocks in self.blocks:
            state = hidden
            for block in blocks.children():
                state = block(state)
            outputs.append(state)
        return torch.stack(outputs)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Apply each head's LM head. [K, ..., H] -> [K, ..., V]."""
        if self.config.share_lm_head:
            return self.apply_lm_head(states)
        logits = torch.stack([lm_head(state) for lm_head, state in zip(self.lm_heads, states, strict=True)])
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return every head's logits.

        Args:
            hidden: States of the target after its final norm, [..., H].

        Returns:
            [K, ..., V].

        Raises:
            ValueError: If the LM head is shared and no target is bound.
        """
        return self.logits(self.hidden_states(hidden))
