"""A tiny target on disk with a tokenizer, prompts and answers of its own: what the recipes run on in tests."""

from __future__ import annotations

import json
import random

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.byte_tokenizer import byte_tokenizer

VOCAB = 288


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Directory of a seeded 4-layer Llama of hidden 32 with a byte-level tokenizer."""
    where = tmp_path_factory.mktemp("tiny-target")
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(where)
    tokenizer.save_pretrained(where)
    return where


@pytest.fixture(scope="session")
def learned(tmp_path_factory):
    """Directory of a seeded GPT-2 with a table of 96 positions."""
    where = tmp_path_factory.mktemp("learned-positions")
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 96}
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    GPT2LMHeadModel(GPT2Config(**sizes, **ends)).save_pretrained(where)
    tokenizer.save_pretrained(where)
    return where


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    """Thirty chats of one or two turns, as JSONL."""
    draw = random.Random(0)
    words = ["red", "blue", "sun", "moon", "tree", "bird", "old", "new"]

    def say(least, most):
        return " ".join(draw.choice(words) for _ in range(draw.randint(least, most)))

    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    with path.open("w") as file:
        for number in range(30):
            messages = []
            for _ in range(1 + number % 2):
                messages += [{"role": "user", "content": say(1, 4)}, {"role": "assistant", "content": say(2, 6)}]
            file.write(json.dumps({"id": number, "messages": messages}) + "\n")
    return path


@pytest.fixture
def common(tiny, chats, tmp_path):
    """Arguments that make any training recipe a CPU run of seconds on the tiny target."""
    return {
        "target": str(tiny),
        "data": [str(chats)],
        "dtype": "float32",
        "cache": str(tmp_path / "cache"),
        "output_dir": str(tmp_path / "out"),
        "use_cpu": "true",
        "bf16": "false",
        "tokens_per_batch": "512",
        "held_out": "0.2",
        "max_length": "256",
        "acceptance_prompts": "0",
        "logging_steps": "1",
        "eval_steps": "2",
        "save_steps": "2",
        "max_steps": "4",
        "report_to": "none",
        "disable_tqdm": "true",
    }


def flags(settings):
    """Turn settings into command-line arguments."""
    made = []
    for name, value in settings.items():
        made += [f"--{name}", *(value if isinstance(value, list) else [str(value)])]
    return made


@pytest.fixture(name="flags")
def flags_fixture():
    """The function that turns settings into arguments."""
    return flags


def pytest_addoption(parser):
    """`--update-curves` rewrites the pinned losses of test_configs.py."""
    parser.addoption("--update-curves", action="store_true", help="rewrite tests/recipes/curves.json")
