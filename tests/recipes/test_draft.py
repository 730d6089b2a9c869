"""A draft made out of its target's layers, aligned on its own samples, with and without LoRA."""

from __future__ import annotations

import json
import signal

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from spechead import enable_speculation
from spechead.training.callbacks import StopOnSignal
from spechead.training.draft import DraftArguments, distill_draft, prompts, shrink


@pytest.fixture
def settings(common):
    names = ("target", "data", "dtype", "output_dir", "use_cpu", "bf16", "logging_steps", "report_to", "disable_tqdm")
    return {name: common[name] for name in names} | {
        "max_steps": "2",
        "max_completion_length": "6",
        "per_device_train_batch_size": "2",
        "learning_rate": "1e-3",
    }


def test_every_second_layer_and_the_last_are_kept_as_they_are(tiny):
    target = AutoModelForCausalLM.from_pretrained(tiny)
    small = shrink(target, 2)
    assert small.config.num_hidden_layers == 3
    assert target.config.num_hidden_layers == 4
    for new, old in enumerate((0, 2, 3)):
        for name, weight in small.model.layers[new].named_parameters():
            assert torch.equal(weight, target.model.layers[old].get_parameter(name))
    assert torch.equal(small.lm_head.weight, target.lm_head.weight)
    assert small.lm_head.weight.data_ptr() != target.lm_head.weight.data_ptr()
    ids = torch.tensor([[3, 4, 5]])
    assert small(input_ids=ids).logits.shape == (1, 3, 288)


def test_kept_layers_keep_their_types():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        layer_types=["full_attention", "sliding_attention"] * 2,
        sliding_window=8,
        use_sliding_window=True,
    )
    small = shrink(Qwen3ForCausalLM(config), 3)
    assert small.config.layer_types == ["full_attention", "sliding_attention"]


@pytest.mark.parametrize("every", [1, 0, 9])
def test_dropping_no_layer_or_all_is_refused(tiny, every):
    target = AutoModelForCausalLM.from_pretrained(tiny)
    if every == 9:
        assert shrink(target, every).config.num_hidden_layers == 2  # the first and the last stay
        return
    with pytest.raises(ValueError, match="drops none"):
        shrink(target, every)


@pytest.mark.parametrize("rank", [0, 4])
def test_the_aligned_draft_is_a_plain_model_that_drafts(settings, flags, tiny, rank):
    outcome = distill_draft(flags(settings | {"keep_every": "3", "lora_rank": str(rank)}))
    draft = AutoModelForCausalLM.from_pretrained(outcome.head)
    start = shrink(AutoModelForCausalLM.from_pretrained(tiny), 3)
    assert draft.config.num_hidden_layers == 2
    assert {name for name, _ in draft.named_parameters()} == {name for name, _ in start.named_parameters()}  # merged
    moved = [name for name, weight in draft.named_parameters() if not torch.equal(weight, start.get_parameter(name))]
    assert any("q_proj" in name for name in moved)
    target = AutoModelForCausalLM.from_pretrained(tiny).eval()
    ids = torch.tensor([[5, 6, 7]])
    plain = target.generate(ids, max_new_tokens=10, do_sample=False)
    model = enable_speculation(target, draft_model=draft.eval())
    assert torch.equal(model.generate(ids, max_new_tokens=10, do_sample=False, speculative="draft_model"), plain)


@pytest.fixture
def answers(tiny, tmp_path):
    """Answers that follow one rule: each token is the one before it plus 1."""
    rows = [
        {
            "id": str(n),
            "prompt_ids": [n % 200 + 10, n % 200 + 11],
            "response_ids": [n % 200 + 12 + k for k in range(24)],
        }
        for n in range(64)
    ]
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def accuracy(draft: torch.nn.Module, answers) -> float:
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    ids = torch.tensor([row["prompt_ids"] + row["response_ids"] for row in rows])
    with torch.no_grad():
        return float((draft(input_ids=ids).logits[:, :-1].argmax(-1) == ids[:, 1:]).float().mean())


def test_a_draft_learns_the_answers_before_its_own_samples(settings, flags, answers, monkeypatch):
    flagged = flags(
        settings
        | {"keep_every": "3", "answers": str(answers), "answers_epochs": "6", "answers_learning_rate": "1e-2"}
        | {"learning_rate": "1e-9"}
    )
    outcome = distill_draft(flagged)
    learnt = AutoModelForCausalLM.from_pretrained(outcome.head / "answers")
    assert accuracy(learnt, answers) > 0.5
    last = AutoModelForCausalLM.from_pretrained(outcome.head)
    assert accuracy(last, answers) > 0.5  # the second step went on from it
    assert (outcome.head / "answers" / "loss_curve.png").exists()

    monkeypatch.setattr("trl.SFTTrainer.train", lambda *given, **named: pytest.fail("learnt twice"))
    distill_draft(flagged)  # nothing is left to do


def test_a_signal_while_learning_answers_stops_there_and_the_same_command_goes_on(
    settings, flags, answers, monkeypatch
):
    before = signal.getsignal(signal.SIGTERM)
    flagged = flags(settings | {"keep_every": "3", "answers": str(answers), "answers_epochs": "1"})
    stopping = StopOnSignal.on_step_end

    def signalled(self, args, state, control, **given):
        if state.global_step == 2 and state.max_steps > 2:
            signal.raise_signal(signal.SIGTERM)
        return stopping(self, args, state, control, **given)

    monkeypatch.setattr(StopOnSignal, "on_step_end", signalled)
    outcome = distill_draft(flagged)
    assert outcome.head is None
    assert "Stopped" in outcome.lines[0]
    assert signal.getsignal(signal.SIGTERM) == before
    monkeypatch.undo()
    outcome = distill_draft(flagged)
    steps = [json.loads(line)["step"] for line in (outcome.head / "answers" / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)  # none again
    assert set(steps) == set(range(1, 33))
    assert signal.getsignal(signal.SIGTERM) == before


def test_answers_need_a_rate_and_a_length(settings, flags):
    with pytest.raises(ValueError, match="answers_epochs=0"):
        distill_draft(flags(settings | {"keep_every": "2", "answers_epochs": "0"}))


def test_prompts_without_text_are_skipped_and_counted(settings, tiny, tmp_path, caplog):
    rows = [{"messages": [{"role": "user", "content": text}]} for text in ("red sun", "", None)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = DraftArguments(target=str(tiny), data=[str(path)], keep_every=2)
    assert prompts(asked)["prompt"] == [[{"role": "user", "content": "red sun"}]]


def test_either_a_draft_or_layers_of_the_target_are_asked_for(settings, flags):
    with pytest.raises(ValueError, match="either draft"):
        distill_draft(flags(settings))
    with pytest.raises(ValueError, match="either draft"):
        distill_draft(flags(settings | {"keep_every": "2", "draft": "x"}))
