"""Tiny seeded targets, heads and rows for the training tests."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from spechead.heads.config import Eagle3Config, EagleConfig
from spechead.heads.eagle import EagleHead
from spechead.heads.eagle3 import Eagle3Head
from spechead.training.ends import TargetEnds
from tests.byte_tokenizer import byte_tokenizer

VOCAB, HIDDEN, DRAFT = 64, 32, 24


@pytest.fixture
def target() -> LlamaForCausalLM:
    """A seeded 4-layer Llama of hidden 32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def ends(target) -> TargetEnds:
    """The target's ends."""
    return TargetEnds.of(target)


@pytest.fixture
def eagle3(target) -> Eagle3Head:
    """An EAGLE-3 head over a pruned vocabulary, started from the target."""
    torch.manual_seed(1)
    head = Eagle3Head(Eagle3Config.for_target(target.config, draft_vocab_size=DRAFT, initializer_range=0.2))
    head.bind(target, match_dtype=False)
    head.set_draft_vocab(torch.arange(0, 2 * DRAFT, 2))
    head.init_from_target(target)
    return head


@pytest.fixture
def eagle(target) -> EagleHead:
    """An EAGLE-1 head."""
    torch.manual_seed(2)
    return EagleHead(EagleConfig.for_target(target.config, initializer_range=0.2)).bind(target, match_dtype=False)


@pytest.fixture
def rows() -> list[dict[str, object]]:
    """Six rows of different lengths; the last has two turns."""
    draw = torch.Generator().manual_seed(3)
    made = []
    for number, (prompt, answer) in enumerate([(3, 9), (5, 6), (2, 12), (4, 4), (6, 2)]):
        ids = torch.randint(0, VOCAB, (prompt + answer,), generator=draw).tolist()
        made.append({"number": number, "input_ids": ids, "spans": [[prompt, prompt + answer]]})
    ids = torch.randint(0, VOCAB, (20,), generator=draw).tolist()
    return [*made, {"number": 5, "input_ids": ids, "spans": [[4, 9], [12, 19]]}]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with ChatML's template."""
    return byte_tokenizer()
