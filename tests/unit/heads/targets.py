"""Tiny seeded targets of five families, random heads for them, and published-layout checkpoints on disk."""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from spechead.heads import Eagle3Config, Eagle3Head, EagleConfig, EagleHead, MedusaConfig, MedusaHeads
from spechead.heads.base import Head

VOCAB, HIDDEN, DRAFT = 48, 32, 16
FAMILIES = ("llama", "qwen3", "gemma3", "gpt2", "gpt_neox")
CLASSES = {
    "medusa": (MedusaConfig, MedusaHeads),
    "eagle": (EagleConfig, EagleHead),
    "eagle3": (Eagle3Config, Eagle3Head),
}


def target_config(family: str, layers: int = 3, vocab_size: int = VOCAB) -> PreTrainedConfig:
    """Return a tiny config of a family."""
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    if family == "llama":
        return LlamaConfig(**sizes, num_key_value_heads=2)
    if family == "qwen3":
        return Qwen3Config(**sizes, num_key_value_heads=2, head_dim=10)
    if family == "gemma3":
        return Gemma3TextConfig(**sizes, num_key_value_heads=2, head_dim=8, sliding_window=16, pad_token_id=0)
    if family == "gpt2":
        ids = {"eos_token_id": 1, "bos_token_id": 1}
        return GPT2Config(vocab_size=vocab_size, n_embd=HIDDEN, n_layer=layers, n_head=4, n_positions=64, **ids)
    return GPTNeoXConfig(**sizes)


def make_target(family: str = "llama", layers: int = 3, seed: int = 0, vocab_size: int = VOCAB) -> PreTrainedModel:
    """Return a tiny random target in float32."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(target_config(family, layers, vocab_size))
    with torch.no_grad():
        for parameter in model.parameters():  # so that logits and norms are far from their uniform start
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def make_head(kind: str, target: PreTrainedModel, seed: int = 1, **overrides: Any) -> Head:
    """Return a random bound head: "medusa", "eagle" or "eagle3"; every parameter is noise, norms and biases too."""
    config_class, head_class = CLASSES[kind]
    head = head_class(config_class.for_target(target.config, **overrides))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.dim() == 1))
    if isinstance(head, Eagle3Head) and head.pruned:
        head.set_draft_vocab(kept_ids(head.config.vocab_size, head.config.draft_vocab_size))
    return head.eval().bind(target)


def kept_ids(vocab_size: int, size: int) -> Tensor:
    """Return D spread, strictly ascending target ids that begin neither at 0 nor densely."""
    return torch.randperm(vocab_size - 1, generator=torch.Generator().manual_seed(9))[:size].sort().values + 1


def taps_of(target: PreTrainedModel, ids: Tensor, taps: tuple[int, ...]) -> Tensor:
    """Return the concatenated taps [B, L, len(taps) * H] of the target's own forward."""
    with torch.no_grad():
        states = target(input_ids=ids, output_hidden_states=True).hidden_states
    return torch.cat([states[tap] for tap in taps], dim=-1)


def some_ids(rows: int = 2, length: int = 9, vocab_size: int = VOCAB) -> Tensor:
    """Return seeded token ids [B, L]."""
    return torch.randint(0, vocab_size, (rows, length), generator=torch.Generator().manual_seed(3))


def logits_of(head: Head, target: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the head's logits over a sequence, by the pairing of decoding: token i+1 beside the feature of i."""
    with torch.no_grad():
        features = taps_of(target, ids, head.taps)
        if isinstance(head, MedusaHeads):
            return head(features)
        positions = torch.arange(ids.shape[1] - 1).expand(ids.shape[0], -1)
        return head.logits(head(ids[:, 1:], head.fuse(features[:, :-1]), positions))


def write(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str = "model") -> Path:
    """Write a checkpoint: config.json and one safetensors file."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    save_file({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, directory / f"{name}.safetensors")
    return directory


@contextmanager
def loud(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Let caplog see spechead's warnings, whatever other tests did to the loggers."""
    logger = logging.getLogger("spechead")
    before = logger.propagate
    logger.propagate = True
    try:
        with caplog.at_level(logging.WARNING, logger="spechead"):
            yield
    finally:
        logger.propagate = before
