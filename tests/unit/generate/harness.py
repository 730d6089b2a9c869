"""What the parity tests share: a tiny target whose draft equals it, prompts, and the comparison with plain generate.

Every comparison asserts from `stats` that drafts were made and kept: a call that fell back to plain decoding fails.
"""

from __future__ import annotations

import copy
import string
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from spechead import enable_speculation
from tests.tiny import PAD, VOCAB, build, tiny_config

METHODS = ("draft_model", "prompt_lookup")


def llama(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Build a tiny Llama of weak attention: the last token decides much, so that its greedy text repeats n-grams."""
    model = build(tiny_config("llama", **({"bos_token_id": 1} | changes)), seed=seed)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= 0.15
    return model


def speculating(model: Any | None = None) -> Any:
    """Enable speculation on a tiny target, with a copy of it as the draft."""
    target = llama() if model is None else model
    return enable_speculation(target, draft_model=copy.deepcopy(target))


def single() -> dict[str, Tensor]:
    """Return one prompt in which an n-gram repeats."""
    ids = torch.tensor([[5, 9, 33, 12, 7, 13, 45, 20, 30, 9, 33]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def padded() -> dict[str, Tensor]:
    """Return three left-padded prompts; the pad id also stands inside a prompt as a real token."""
    rows = [[5, 9, 33, PAD, 7, 13, 45, 20, 30, 9, 33], [13, 30, 13, 30, 11, 13], [31, 20, 20]]
    width = max(len(row) for row in rows)
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer whose token i is a letter or two, so that strings end inside tokens and across them."""
    letters = string.ascii_lowercase
    words = [*letters, *(first + second for first, second in zip(letters, letters[3:], strict=False))][:VOCAB]
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<s>", *words][:VOCAB])}
    words_alone = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words_alone.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    words_alone.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words_alone, pad_token="<pad>", bos_token="<s>")


def rows_of(inputs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return each row of a left-padded batch as a batch of its own, pads taken off."""
    masks = inputs["attention_mask"].bool()
    rows = [ids[mask][None] for ids, mask in zip(inputs["input_ids"], masks, strict=True)]
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in rows]


PROMPTS = {"single": single, "padded": padded}


def speculate(model: Any, inputs: dict[str, Any], method: Any, **settings: Any) -> Any:
    """Run the speculative path and return its whole output."""
    return model.generate(**inputs, speculative=method, return_dict_in_generate=True, **settings)


def same_as_plain(model: Any, inputs: dict[str, Any], method: Any, keeps: bool = True, **settings: Any) -> Any:
    """Assert that speculation gives plain generate's ids, and that it speculated.

    Args:
        model: an enabled target.
        inputs: prompts.
        method: what `speculative=` gets.
        keeps: assert that drafted tokens were kept, too.
        **settings: of both calls.

    Returns:
        The speculative call's output.
    """
    plain = model.generate(**inputs, **settings)
    output = speculate(model, inputs, method, **settings)
    assert output.sequences.tolist() == plain.tolist()
    assert_speculated(output.stats, keeps)
    return output


def assert_speculated(stats: Any, keeps: bool = True) -> None:
    """Assert that drafts were fed to the target and, with `keeps`, that some were kept."""
    assert stats.drafted_tokens > 0
    assert stats.nodes_fed > stats.steps
    assert not stats.lossy
    if keeps:
        assert stats.kept_tokens > 0
        assert stats.acceptance_length > 1
