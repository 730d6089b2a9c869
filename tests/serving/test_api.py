"""The server as the real `openai` client sees it."""

import json

import openai
import pytest
import torch

from spechead.serving.limits import Limits
from tests.running import ForwardCount
from tests.serving.loopback import (
    LIMITS,
    NAME,
    at_once,
    byte_model,
    byte_tokenizer,
    cycle_model,
    plain_text,
    serving,
    slowed,
    speculating,
    wait_for,
)

PROMPTS = [f"question {i}: " + "ab cd " * i for i in range(6)]
UNICODE = "né你🙂ok"  # no byte twice


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model():
    return speculating(byte_model())


@pytest.fixture(scope="module")
def server(model, tokenizer):
    with serving(model, tokenizer, limits=LIMITS) as started:
        yield started


@pytest.fixture(scope="module")
def cycling(tokenizer):
    """A server whose target writes UNICODE again and again."""
    with serving(cycle_model(UNICODE), tokenizer, limits=Limits(max_rows=4, max_length=256)) as started:
        yield started


def joined(stream):
    """The text of each choice of a stream, and its finish reasons."""
    texts, reasons = {}, {}
    for chunk in stream:
        for choice in chunk.choices:
            text = choice.delta.content if hasattr(choice, "delta") else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
            if choice.finish_reason is not None:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    return texts, reasons


def test_a_completion_is_what_plain_generation_writes(server, model, tokenizer):
    answer = server.complete(PROMPTS[1], max_tokens=30)
    assert answer.choices[0].text == plain_text(model, tokenizer, PROMPTS[1], 30)
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion"
    assert answer.model == NAME
    assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": len(PROMPTS[1]),
        "completion_tokens": 30,
        "total_tokens": len(PROMPTS[1]) + 30,
    }


def test_a_chat_goes_through_the_targets_template(server, model, tokenizer):
    answer = server.chat("hello", max_tokens=20)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == plain_text(model, tokenizer, "<user>hello<answer>", 20)
    assert answer.usage.prompt_tokens == len("hello") + 2
    cited = server.chat("hello", max_tokens=20, extra_body={"chat_template_kwargs": {"cited": "Q"}})
    assert cited.choices[0].message.content == plain_text(model, tokenizer, "<user>helloQ<answer>", 20)


def test_parts_of_a_message_are_one_text_and_max_completion_tokens_is_max_tokens(server, model, tokenizer):
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    answer = server.client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": parts}], temperature=0, max_completion_tokens=7
    )
    assert answer.choices[0].message.content == plain_text(model, tokenizer, "<user>hello<answer>", 7)


def test_a_prompt_may_be_token_ids_or_several_prompts(server, model, tokenizer):
    ids = tokenizer(PROMPTS[2])["input_ids"]
    assert server.complete(ids).choices[0].text == plain_text(model, tokenizer, PROMPTS[2])
    answers = server.complete(PROMPTS[:3], n=2).choices
    assert [answer.index for answer in answers] == list(range(6))
    assert [answer.text for answer in answers] == [
        plain_text(model, tokenizer, prompt) for prompt in PROMPTS[:3] for _ in range(2)
    ]


def test_a_chat_without_max_tokens_goes_on_to_the_end_or_the_limit(cycling):
    answer = cycling.client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "x"}], temperature=0
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 256


def test_an_end_token_ends_the_answer_and_shows_nowhere(server, model, tokenizer):
    for number in range(40):
        answer = server.complete(f"{number}", temperature=1.5, seed=number, max_tokens=60, logprobs=1)
        if answer.choices[0].finish_reason == "stop":
            assert "<end>" not in answer.choices[0].text
            assert len(answer.choices[0].logprobs.tokens) == answer.usage.completion_tokens - 1
            return
    pytest.fail("no answer ended by itself")


@pytest.mark.parametrize("settings", [{"temperature": 1.2, "seed": 4}, {"stop": ["e"], "max_tokens": 40}])
def test_streamed_text_equals_text_that_is_not_streamed(server, cycling, settings):
    for where in (server, cycling):
        whole = where.complete("question", n=2, **settings)
        texts, reasons = joined(where.complete("question", n=2, stream=True, **settings))
        assert texts == {choice.index: choice.text for choice in whole.choices}
        assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
        whole = where.chat("question", n=2, **settings)
        texts, reasons = joined(where.chat("question", n=2, stream=True, **settings))
        assert texts == {choice.index: choice.message.content for choice in whole.choices}
        assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}


def test_a_stream_names_the_role_first_and_comes_token_by_token(server):
    chunks = list(server.chat("hello", stream=True, max_tokens=12, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    assert sum(bool(chunk.choices[0].delta.content) for chunk in chunks[:-1]) > 6


def test_characters_are_never_split(cycling):
    pieces = [chunk.choices[0].text for chunk in cycling.complete("n", stream=True, max_tokens=47)]
    assert "".join(pieces).startswith("é你🙂okné你🙂ok")
    assert not any("\ufffd" in piece for piece in pieces)
    cut = cycling.complete("n", max_tokens=4)  # é and two bytes of three
    assert cut.choices[0].text == "é\ufffd"


@pytest.mark.parametrize(
    ("stop", "text"), [("你", "é"), (["k", "🙂o"], "é你"), ("né你🙂okné", "é你🙂ok"), ("zz", "é你🙂okné你🙂okné你")]
)
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_never_leak(cycling, stop, text, stream):
    answer = cycling.complete("n", stop=stop, stream=stream, max_tokens=29)
    reason = "length" if stop == "zz" else "stop"
    if stream:
        assert joined(answer) == ({0: text}, {0: reason})
    else:
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, reason)


def test_logprobs_of_a_chat_hold_every_token_of_the_text_and_its_bytes(cycling, server):
    answer = cycling.chat("x", logprobs=True, top_logprobs=2, stop="ok", max_tokens=40).choices[0]
    tokens = answer.logprobs.content
    assert answer.message.content == UNICODE[:-2]
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == answer.message.content
    assert all(token.logprob == token.top_logprobs[0].logprob for token in tokens)
    assert tokens[0].token == "n"
    streamed = []
    for chunk in cycling.chat("x", logprobs=True, top_logprobs=2, stop="ok", max_tokens=40, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content
    assert [token.model_dump() for token in streamed] == [token.model_dump() for token in tokens]
    plain = server.chat("x").choices[0]
    assert plain.logprobs is None


def test_logprobs_of_a_completion(server):
    answer = server.complete(PROMPTS[0], logprobs=3, max_tokens=10).choices[0].logprobs
    assert len(answer.tokens) == len(answer.token_logprobs) == len(answer.top_logprobs) == 10
    assert answer.text_offset[0] == 0
    assert answer.text_offset == sorted(answer.text_offset)
    for token, logprob, top in zip(answer.tokens, answer.token_logprobs, answer.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values())
    none = server.complete(PROMPTS[0], logprobs=0, max_tokens=3).choices[0].logprobs
    assert none.top_logprobs == [{}] * 3
    assert json.dumps(none.token_logprobs)  # no infinity among them


def test_a_seed_repeats_a_sample_alone_and_under_load(server):
    settings = {"temperature": 1.1, "top_p": 0.95, "max_tokens": 30, "n": 3}
    alone = [choice.text for choice in server.complete(PROMPTS[3], seed=11, **settings).choices]
    assert len(set(alone)) == 3

    def noise(number):
        return lambda: server.complete(PROMPTS[number % 6], temperature=1.3, max_tokens=20 + number, n=1 + number % 2)

    def again():
        return [choice.text for choice in server.complete(PROMPTS[3], seed=11, **settings).choices]

    results = at_once([noise(0), again, noise(1), noise(2), again, noise(3), noise(4), again])
    assert [result for result in results if isinstance(result, list)] == [alone] * 3
    assert server.complete(PROMPTS[3], seed=11, **{**settings, "n": 1}).choices[0].text == alone[0]
    assert [choice.text for choice in server.complete(PROMPTS[3], seed=12, **settings).choices] != alone
    unseeded = [server.complete(PROMPTS[3], **{**settings, "n": 1}).choices[0].text for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_greedy_answers_of_a_mixed_load_are_plain_generations(server, model, tokenizer):
    lengths = (50, 3, 31, 12, 44, 20)
    expected = [plain_text(model, tokenizer, prompt, n) for prompt, n in zip(PROMPTS, lengths, strict=True)]

    def greedy(place):
        return lambda: server.complete(PROMPTS[place], max_tokens=lengths[place]).choices[0].text

    def streamed(place):
        return lambda: joined(server.complete(PROMPTS[place], max_tokens=lengths[place], stream=True))[0][0]

    def sampled(place):
        settings = [{"temperature": 1.0}, {"temperature": 0.8, "seed": 1}, {"stop": ["e"], "repetition_penalty": 1.3}]
        return lambda: server.complete(PROMPTS[place], max_tokens=25, **settings[place % 3])

    calls = [make(place) for place in range(6) for make in (greedy, sampled, streamed)]
    results = at_once(calls)
    assert results[0::3] == expected
    assert results[2::3] == expected
    assert not [result for result in results if isinstance(result, Exception)]


def test_a_request_that_arrives_during_a_long_one_gets_its_first_token_before_that_ends(server, model):
    with slowed(model, 0.005):
        long = server.complete(PROMPTS[0], max_tokens=256, temperature=0, stream=True)
        next(iter(long))
        short = next(iter(server.complete(PROMPTS[1], max_tokens=5, stream=True)))
        assert server.engine.running >= 1
    assert short.choices[0].finish_reason is None
    rest = list(long)
    assert rest[-1].choices[0].finish_reason is not None
    server.idle()


def test_one_target_forward_a_step_serves_all_rows(server, model):
    server.idle()
    before = server.engine.stats.steps + server.engine.stats.prefill_forwards
    with ForwardCount(model) as count:
        results = at_once([lambda i=i: server.complete(PROMPTS[i], max_tokens=60) for i in range(4)])
        server.idle()
    assert not [result for result in results if isinstance(result, Exception)]
    assert count.forwards == server.engine.stats.steps + server.engine.stats.prefill_forwards - before
    assert max(rows for rows, _ in count.shapes) > 1


def test_models_health_and_metrics(server):
    (card,) = server.client.models.list().data
    assert (card.id, card.owned_by) == (NAME, "spechead")
    assert server.client.models.retrieve(NAME) == card
    with pytest.raises(openai.NotFoundError, match="the model is 'tiny'"):
        server.client.models.retrieve("org/other")
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.head("/health").status_code == 200
    server.complete(PROMPTS[0])
    server.idle()
    page = server.http.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    for line in (
        f'vllm:spec_decode_num_drafts_total{{model_name="{NAME}"}}',
        f'vllm:spec_decode_num_draft_tokens_total{{model_name="{NAME}"}}',
        f'vllm:spec_decode_num_accepted_tokens_total{{model_name="{NAME}"}}',
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="{NAME}",position="0"}}',
        f'vllm:num_requests_running{{model_name="{NAME}"}} 0.0',
        f'vllm:num_requests_waiting{{model_name="{NAME}"}} 0.0',
        f'vllm:time_to_first_token_seconds_count{{model_name="{NAME}"}}',
        f'vllm:request_success_total{{finished_reason="length",model_name="{NAME}"}}',
        f'spechead:steps_total{{model_name="{NAME}"}} {float(server.engine.stats.steps)}',
    ):
        assert line in page.text


def test_the_counters_are_the_engines(server):
    text = server.http.get("/metrics").text
    stats = server.engine.stats
    for name, value in (("drafts", stats.tried_by_depth[0]), ("draft_tokens", stats.drafted_tokens)):
        assert f'vllm:spec_decode_num_{name}_total{{model_name="{NAME}"}} {float(value)}' in text


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"extra_body": {"echo": True}}, "echo"),
        ({"extra_body": {"best_of": 4}}, "best_of"),
        ({"extra_body": {"frequency_penalty": 0.5}}, "frequency_penalty"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": 0.001}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 100_000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"max_tokens": 505}, "max_tokens"),
        ({"logprobs": 50}, "logprobs"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"seed": 2**70}, "seed"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"extra_body": {"temperature": "hot"}}, "temperature"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(server, settings, named):
    with pytest.raises(openai.BadRequestError) as refused:
        server.complete(PROMPTS[1], **settings)
    assert refused.value.param == named
    assert refused.value.type == "invalid_request_error"
    assert named in refused.value.message or named == "n"


def test_neutral_values_of_what_is_not_supported_pass(server, model, tokenizer):
    neutral = {"echo": False, "best_of": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}}
    answer = server.complete(PROMPTS[1], extra_body=neutral, user="me", stop=None)
    assert answer.choices[0].text == plain_text(model, tokenizer, PROMPTS[1])


@pytest.mark.parametrize("form", ["object", "dump", "lists"])
def test_an_answer_can_be_sent_back_as_the_client_made_it(server, form):
    def ask(messages):
        settings = {"temperature": 0, "max_tokens": 4}
        return server.client.chat.completions.create(model=NAME, messages=messages, **settings).choices[0].message

    first = [{"role": "user", "content": "sun"}]
    said = ask(first)
    turn = said if form == "object" else said.model_dump()
    if form == "lists":
        turn |= {"tool_calls": [], "annotations": []}
    follow = {"role": "user", "content": "moon"}
    bare = ask([*first, {"role": "assistant", "content": said.content}, follow])
    assert ask([*first, turn, follow]).content == bare.content
    with pytest.raises(openai.BadRequestError, match="tool_calls"):
        ask([*first, {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}, follow])


def test_what_a_chat_refuses(server):
    def refusal(**settings):
        arguments = {"model": NAME, "messages": [{"role": "user", "content": "x"}]} | settings
        with pytest.raises(openai.BadRequestError) as refused:
            server.client.chat.completions.create(**arguments)
        return refused.value

    assert refusal(messages=[]).param == "messages"
    assert refusal(messages=[{"role": "tool", "content": "x"}]).param == "messages[0].role"
    image = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    assert "is not text" in refusal(messages=[{"role": "user", "content": image}]).message
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert refusal(tools=tools).param == "tools"
    assert refusal(top_logprobs=3).param == "top_logprobs"
    assert refusal(max_tokens=3, max_completion_tokens=4).param == "max_tokens"
    assert refusal(extra_body={"chat_template_kwargs": {"tokenize": False}}).param == "chat_template_kwargs"
    assert refusal(extra_body={"chat_template_kwargs": {"chat_template": "x"}}).param == "chat_template_kwargs"


def test_another_models_name_is_not_found(server):
    with pytest.raises(openai.NotFoundError, match="the model is 'tiny'"):
        server.client.completions.create(model="gpt", prompt="x")


def test_sampled_answers_follow_top_k(server, model, tokenizer):
    """With top_k=1 sampling is greedy, whatever the seed."""
    answer = server.complete(PROMPTS[2], temperature=1.0, top_k=1, seed=1)
    assert answer.choices[0].text == plain_text(model, tokenizer, PROMPTS[2])
    assert torch.is_grad_enabled()  # the server's own thread decodes without gradients, nobody else's


def test_the_schema_is_published(server):
    schema = server.http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"} <= set(schema["paths"])
    wait_for(lambda: server.engine.context is None)
