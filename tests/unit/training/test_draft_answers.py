"""The first step of a draft: answers that are not of its tokenizer are refused before anything is trained."""

from __future__ import annotations

import json

import pytest

from spechead.training.draft import DraftArguments, DraftTrainingArguments
from spechead.training.draft_answers import learn_answers


def test_answers_with_ids_that_the_draft_lacks_are_refused(target, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECHEAD_CACHE", str(tmp_path / "cache"))
    answers = tmp_path / "answers.jsonl"
    answers.write_text(json.dumps({"prompt_ids": [1], "response_ids": [2, target.config.vocab_size]}) + "\n")
    asked = DraftArguments(target=str(tmp_path), data=["unused"], keep_every=2, answers=[str(answers)])
    training = DraftTrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match=r"token id 64, .* has 64 ids, 0 to 63: .*another tokenizer"):
        learn_answers(target, asked, training, tokenizer, [])
    assert not (tmp_path / "out").exists()
