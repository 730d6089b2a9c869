"""scripts/trim_vocabulary.py: the answers' tokens stay, their logits too, and so does where the head comes from."""

import json
from pathlib import Path

import pytest
import torch

from scripts import trim_vocabulary
from spechead import load_head
from tests.tiny import tiny_model
from tests.tiny_heads import make_head
from tests.tiny_tokenizer import tiny_tokenizer

ANSWERS = {5: 4, 9: 3, 12: 2, 30: 1}  # token -> how often the target says it; 12 is outside the draft vocabulary
KEPT = torch.tensor([1, 3, 5, 9, 20, 30, 31])


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    tiny_model("llama").save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    response = [token for token, times in ANSWERS.items() for _ in range(times)]
    record = {"id": "a", "prompt_ids": [6, 6, 6], "response_ids": response}
    (tmp_path / "answers.jsonl").write_text(json.dumps(record) + "\n")
    return ["--data", str(tmp_path / "answers.jsonl"), "--target", str(tmp_path / "target")]


def saved(directory: Path, kind: str = "eagle3", **overrides: object) -> Path:
    head = make_head(kind, tiny_model("llama"), **overrides)
    if kind == "eagle3" and head.pruned:
        head.set_draft_vocab(KEPT)
    head.save_pretrained(directory)
    (directory / "recipe.yaml").write_text("seed: 1\n")
    (directory / "training_prompts.txt").write_text("a" * 16 + "\n")
    return directory


def test_the_answers_tokens_stay_with_their_logits(given: list[str], tmp_path: Path) -> None:
    large = saved(tmp_path / "head", draft_vocab_size=len(KEPT))
    out = tmp_path / "out"
    assert trim_vocabulary.main([str(large), *given, "--size", "4", "--output", str(out)]) == 0
    before, after = load_head(large), load_head(out)
    assert after.config.draft_vocab_size == 4
    assert after.draft_to_target.tolist() == [1, 5, 9, 30]  # of the tokens that no answer holds, the lowest id
    hidden = torch.randn(1, 3, after.config.hidden_size, generator=torch.Generator().manual_seed(0))
    kept = before.target_to_draft[after.draft_to_target]
    torch.testing.assert_close(after.logits(hidden), before.logits(hidden)[..., kept])
    for name, tensor in after.state_dict().items():
        assert name in ("lm_head.weight", "d2t", "t2d") or torch.equal(tensor, before.state_dict()[name])
    note, said = (out / "recipe.yaml").read_text().splitlines()
    assert note == "# The draft vocabulary was trimmed from 7 to 4 tokens after this training."
    assert said == "seed: 1"
    assert (out / "training_prompts.txt").read_text() == "a" * 16 + "\n"


def test_a_head_of_the_whole_vocabulary_gets_its_maps(given: list[str], tmp_path: Path) -> None:
    whole = saved(tmp_path / "head", draft_vocab_size=tiny_model("llama").config.vocab_size)
    out = tmp_path / "out"
    assert trim_vocabulary.main([str(whole), *given, "--size", "5", "--output", str(out)]) == 0
    assert load_head(out).draft_to_target.tolist() == [0, 5, 9, 12, 30]


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [("eagle3", "7", "trims nothing of 7"), ("eagle3", "0", "trims nothing of 7"), ("medusa", "4", "MedusaHeads")],
)
def test_what_cannot_be_trimmed_is_refused(
    kind: str, size: str, message: str, given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = saved(tmp_path / "head", kind, **({"draft_vocab_size": len(KEPT)} if kind == "eagle3" else {}))
    with pytest.raises(SystemExit):
        trim_vocabulary.main([str(head), *given, "--size", size, "--output", str(tmp_path / "out")])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_head_without_an_lm_head_of_its_own_is_refused(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vocab_size = tiny_model("llama").config.vocab_size
    head = saved(tmp_path / "head", draft_vocab_size=vocab_size, share_lm_head=True)
    with pytest.raises(SystemExit):
        trim_vocabulary.main([str(head), *given, "--size", "4", "--output", str(tmp_path / "out")])
    assert "share_lm_head" in capsys.readouterr().err


def test_a_token_the_head_cannot_draft_is_refused() -> None:
    head = make_head("eagle3", tiny_model("llama"), draft_vocab_size=len(KEPT))
    head.set_draft_vocab(KEPT)
    with pytest.raises(ValueError, match="own draft vocabulary"):
        trim_vocabulary.trim(head, torch.tensor([2, 3]))
