"""Requests as they are read: the law they ask for, and what the command line says about its limits."""

import pytest
import torch
from pydantic import ValidationError
from transformers import GenerationConfig

from spechead.cli.main import main
from spechead.cli.serve import describe, served_name
from spechead.serving.engine import Engine
from spechead.serving.errors import ApiError, FieldError, from_validation
from spechead.serving.limits import Limits
from spechead.serving.protocol import UNSUPPORTED, ChatRequest, CompletionRequest
from spechead.serving.ticket import Sampling, choice_seed, processors_of
from tests.serving.loopback import byte_model, byte_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
        {"top_p": 0.5, "repetition_penalty": 0.9},
    ],
)
def test_a_requests_law_is_the_one_that_generate_builds(settings):
    """The same processors in the same order, shown by their scores."""
    request = CompletionRequest.model_validate({"model": "m", "prompt": "x"} | settings)
    config = GenerationConfig(do_sample=True, **{"top_k": 0, "temperature": 1.0} | settings)
    library = byte_model()._get_logits_processor(config, input_ids_seq_length=4)
    ids, scores = torch.tensor([[1, 2, 3, 4]]), torch.randn(1, 260)
    ours = processors_of(request.sampling)
    assert [type(one) for one in ours] == [type(one) for one in library]
    assert torch.equal(ours(ids, scores.clone()), library(ids, scores.clone()))


def test_temperature_0_is_greedy_with_the_penalty_alone():
    settings = {"temperature": 0, "top_k": 5, "top_p": 0.5, "repetition_penalty": 1.3}
    request = CompletionRequest.model_validate({"model": "m", "prompt": "x"} | settings)
    assert request.sampling == Sampling(temperature=0.0, repetition_penalty=1.3)
    assert [type(one).__name__ for one in processors_of(request.sampling)] == ["RepetitionPenaltyLogitsProcessor"]


def test_rows_of_one_law_share_their_processors():
    assert processors_of(Sampling(0.5)) is processors_of(Sampling(0.5))
    assert processors_of(Sampling(0.5)) is not processors_of(Sampling(0.6))


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_every_unsupported_field_passes_with_its_neutral_values_only(name):
    neutral, remedy = UNSUPPORTED[name]
    for value in (None, *neutral):
        ChatRequest.model_validate({"model": "m", "messages": MESSAGES, name: value})
    with pytest.raises(ValidationError) as refused:
        ChatRequest.model_validate({"model": "m", "messages": MESSAGES, name: "something"})
    error = refused.value.errors()[0]["ctx"]["error"]
    assert isinstance(error, FieldError)
    assert error.param == name
    assert remedy in str(error)


def test_null_is_as_if_it_were_not_there():
    request = CompletionRequest.model_validate(
        {"model": "m", "prompt": "x", "temperature": None, "max_tokens": None, "stop": None, "n": None}
    )
    assert (request.temperature, request.new_tokens, request.stop, request.n) == (1.0, 16, [], 1)


def test_seeds_of_choices_differ_and_the_first_is_the_requests():
    assert choice_seed(5, 0) == 5
    seeds = {choice_seed(seed, index) for seed in range(20) for index in range(20)}
    assert len(seeds) == 400
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


def test_messages_of_a_list_of_errors_are_about_the_first():
    with pytest.raises(ValidationError) as refused:
        CompletionRequest.model_validate({"prompt": "x", "top_p": 7})
    errors = [error | {"loc": ("body", *error["loc"])} for error in refused.value.errors()]
    error = from_validation(errors, ["prompt"])
    assert (error.status, error.param, error.code) == (400, "model", "missing_field")
    assert error.headers == {}
    assert ApiError(429, "x", retry_after=3).headers == {"Retry-After": "3"}


def test_the_start_says_what_the_limits_cost():
    engine = Engine(byte_model(), byte_tokenizer(), "off", Limits(max_rows=2, max_length=100))
    text = describe(engine, "tiny")
    assert "tiny: speculative=off; 2 rows of 100 tokens at most" in text
    assert "0.2 MiB for keys and values; 64 more wait" in text  # 2 rows, 2 blocks of 256 slots, 256 bytes a slot
    assert engine.kv_bytes == 2 * 512 * 256


def test_the_default_name_of_a_directory_holds_no_path(tmp_path):
    (tmp_path / "my-model").mkdir()
    assert served_name(str(tmp_path / "my-model")) == "my-model"
    assert served_name("org/model") == "org/model"


def test_other_machines_are_let_in_with_a_key_only(monkeypatch, capsys):
    monkeypatch.delenv("SPECHEAD_API_KEY", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--target", "nowhere", "--host", "0.0.0.0"])
    assert ended.value.code == 2
    assert "set SPECHEAD_API_KEY" in capsys.readouterr().err


def test_a_draft_length_without_drafts_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--target", "nowhere", "--speculative", "off", "--num-draft-tokens", "3"])
    assert "means nothing to --speculative off" in capsys.readouterr().err
