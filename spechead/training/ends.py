"""The two ends of a frozen target that head training needs: its embedding, its LM head, and what follows the LM head.

The store keeps them beside the features, so ranks that train from a store never load the target itself. Some families
scale or soft-cap the product of the LM head inside their own forward; `LogitRule` names that step and is checked
against the target's real logits before anything is trained on it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ..heads.sizes import logit_scale

ENDS_FILE = "target_ends.safetensors"
RULE_FILE = "target_logits.json"


@dataclass(frozen=True)
class LogitRule:
    """What the target does to the LM head's product: `softcap * tanh(scale * x / softcap)`, or `scale * x` without a
    cap."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> LogitRule:
        """Read the rule from a target's config (Gemma's cap, Cohere's and Falcon-H1's multiplier, Granite's
        divisor)."""
        text = config.get_text_config()
        return cls(scale=logit_scale(text), softcap=getattr(text, "final_logit_softcapping", None))

    def __call__(self, product: Tensor) -> Tensor:
        """Apply the rule to float32 products of the LM head, any shape."""
        if self.scale != 1.0:
            product = product * self.scale
        if self.softcap is not None:
            product = torch.tanh(product / self.softcap) * self.softcap
        return product


class TargetEnds(nn.Module):
    """Embedding, LM head and config of a target: what a head binds to and what turns stored states into target
    laws."""

    def __init__(self, config: PreTrainedConfig, embedding: nn.Embedding, lm_head: nn.Linear, rule: LogitRule):
        super().__init__()
        self.config, self.rule = config, rule
        self.embedding, self.lm_head = embedding, lm_head
        self.requires_grad_(False)

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the target's embedding [V, H]."""
        return self.embedding

    def get_output_embeddings(self) -> nn.Linear:
        """Return the target's LM head [V, H]."""
        return self.lm_head

    @classmethod
    def of(cls, target: PreTrainedModel) -> TargetEnds:
        """Share the ends of a loaded target and check the logit rule against its own forward.

        Args:
            target: a causal LM.

        Raises:
            ValueError: if the target's logits are not its LM head on its last hidden state under a known rule.
        """
        ends = cls(
            target.config,
            target.get_input_embeddings(),
            target.get_output_embeddings(),
            LogitRule.from_config(target.config),
        )
        ends.check(target)
        return ends

    @torch.inference_mode()
    def check(self, target: PreTrainedModel) -> None:
        """Compare the rule with the target's forward on a few tokens.

        Raises:
            ValueError: if they differ by more than the rounding of the target's dtype.
        """
        device = self.embedding.weight.device
        ids = torch.arange(8, device=device)[None] % self.config.get_text_config().vocab_size
        layers = self.config.get_text_config().num_hidden_layers
        output = target(input_ids=ids, output_hidden_states=[layers], use_cache=False)
        own = self.rule(self.lm_head(output.hidden_states[layers].to(self.lm_head.weight.device)).float())
        real = output.logits.float().to(own.device)
        error, size = (own - real).abs().max().item(), real.abs().max().item()
        if not error <= 0.02 * max(size, 1e-3):
            raise ValueError(
                f"The logits of {type(target).__name__} are not its LM head on the last hidden state under "
                f"{self.rule} (largest difference {error:.3g}, largest logit {size:.3g}). Heads can be trained for "
                "targets that end in LM head, optional scale and optional soft cap; this one needs its own rule in "
                "training/ends.py."
            )

    def save(self, directory: Path) -> None:
        """Write both ends, the rule and the target's config into a store's directory."""
        tensors = {"embedding": self.embedding.weight.detach().cpu().contiguous()}
        if self.lm_head.weight.data_ptr() != self.embedding.weight.data_ptr():
            tensors["lm_head"] = self.lm_head.weight.detach().cpu().contiguous()
        if self.lm_head.bias is not None:
            tensors["lm_head_bias"] = self.lm_head.bias.detach().cpu().contiguous()
        save_file(tensors, directory / ENDS_FILE)
        (directory / RULE_FILE).write_text(json.dumps(asdict(self.rule)))
        self.config.save_pretrained(directory)

    @classmethod
    def load(cls, directory: Path) -> TargetEnds:
        """Read the ends from a store's directory; nothing else of the target is loaded."""
        tensors = load_file(directory / ENDS_FILE)
        weight = tensors["embedding"]
        with torch.device("meta"):
            embedding = nn.Embedding(*weight.shape)
            lm_head = nn.Linear(weight.shape[1], weight.shape[0], bias="lm_head_bias" in tensors)
        embedding.weight = nn.Parameter(weight, requires_grad=False)
        lm_head.weight = nn.Parameter(tensors.get("lm_head", weight), requires_grad=False)
        if "lm_head_bias" in tensors:
            lm_head.bias = nn.Parameter(tensors["lm_head_bias"], requires_grad=False)
        rule = LogitRule(**json.loads((directory / RULE_FILE).read_text()))
        return cls(AutoConfig.from_pretrained(directory), embedding, lm_head, rule)
