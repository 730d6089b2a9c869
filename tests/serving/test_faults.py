"""What goes wrong around a server: clients that leave, nonsense, too much of everything, and being told to stop."""

import contextlib
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import openai
import pytest
import torch

from spechead.cli.serve import LOOPBACK
from spechead.serving import gate
from spechead.serving.limits import Limits
from spechead.target import Target
from tests.serving.loopback import (
    LIMITS,
    NAME,
    at_once,
    byte_model,
    byte_tokenizer,
    plain_text,
    serving,
    slowed,
    speculating,
    wait_for,
)

PROMPT = "a prompt of the tests"
LONG = {"model": NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": 450, "stream": True}


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model():
    return speculating(byte_model(ends=False))


@pytest.fixture(scope="module")
def server(model, tokenizer):
    with serving(model, tokenizer, limits=LIMITS) as started:
        yield started


@pytest.fixture(scope="module")
def guarded(model, tokenizer):
    """A server with a key and tight limits."""
    limits = Limits(max_rows=1, max_length=480, max_tokens=470, max_queue=1, max_body=4096)
    with serving(model, tokenizer, limits=limits, speculative="off", api_key="correct horse") as started:
        yield started


def shape(response):
    """An error's body, which must have OpenAI's shape."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "/work" not in error["message"]
    assert "Traceback" not in error["message"]
    return error


def test_a_client_that_leaves_mid_stream_frees_its_row_and_disturbs_nobody(server, model, tokenizer):
    stays = server.complete("another", max_tokens=200, stream=True)
    with server.http.stream("POST", "/v1/completions", json=LONG) as response:
        lines = response.iter_lines()
        next(lines)
        wait_for(lambda: server.engine.running == 2)
    wait_for(lambda: server.engine.running < 2)
    assert "".join(chunk.choices[0].text for chunk in stays) == plain_text(model, tokenizer, "another", 200)
    server.idle()
    assert 'finished_reason="abort"' in server.http.get("/metrics").text


def test_a_client_that_leaves_before_a_whole_answer_frees_its_row(server):
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/completions", json=LONG | {"stream": False, "n": 2}, timeout=0.15)
    start = time.monotonic()
    server.idle()
    assert time.monotonic() - start < 5
    assert server.complete(PROMPT, max_tokens=3).usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "not valid JSON"),
        (b"", "missing"),
        (b"[1]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"model": "tiny", "prompt": ' + b"[" * 3000 + b"]" * 3000 + b"}", "could not be read|prompt must be"),
        (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', "temperature"),
        (b'{"model": "tiny", "prompt": "x", "max_tokens": 1e400}', "max_tokens"),
        (b'{"model": "tiny", "prompt": []}', "prompt must be"),
        (b'{"model": "tiny", "prompt": [[]]}', "prompt must be"),
        (b'{"model": "tiny", "prompt": [1, true]}', "prompt must be"),
        (b'{"model": "tiny", "prompt": ""}', "has no tokens"),
        (b'{"model": "tiny", "prompt": [1, 260]}', "token id 260"),
        (b'{"model": "tiny", "prompt": [-1]}', "token id -1"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "no text"),
        (b'{"model": "tiny", "prompt": "x", "\\ud800": 1}', "must be a JSON object"),
    ],
)
def test_malformed_bodies_are_refused(server, body, said):
    response = server.post(body)
    assert response.status_code == 400
    assert any(part in shape(response)["message"] for part in said.split("|"))


def test_a_body_that_does_not_say_that_it_is_json_is_refused(server):
    """A web page can post text to loopback without asking; JSON it cannot."""
    body = json.dumps({"model": NAME, "prompt": "x"})
    response = server.http.post("/v1/completions", content=body, headers={"Content-Type": "text/plain"})
    assert response.status_code == 400
    assert "application/json" in shape(response)["message"]


def test_a_body_that_names_no_kind_is_refused_whatever_the_framework_would_do(server):
    """A page's Blob has no type, and some versions of the framework would read it as JSON."""
    body = json.dumps({"model": NAME, "prompt": "x"}).encode()
    request = server.http.build_request("POST", "/v1/completions", content=body)
    assert "content-type" not in request.headers
    response = server.http.send(request)
    assert response.status_code == 400
    assert "application/json" in shape(response)["message"]
    kind = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert server.http.post("/v1/completions", content=body, headers=kind).status_code == 200


def test_without_a_key_only_loopbacks_own_names_are_answered(model, tokenizer):
    with serving(model, tokenizer, hosts=LOOPBACK) as guarded:
        for host, status in (
            ("localhost:80", 200),
            ("LOCALHOST", 200),
            ("127.0.0.1:1234", 200),
            ("[::1]:8000", 200),
            ("[::1]", 200),
            ("evil.example", 400),
            ("localhost.evil.example:80", 400),
            ("", 400),
        ):
            response = guarded.http.get("/v1/models", headers={"Host": host})
            assert response.status_code == status, host
        assert shape(response)["code"] == "unknown_host"


def test_a_body_that_drips_in_is_given_up_as_a_whole(server, monkeypatch):
    monkeypatch.setattr(gate, "BODY_SECONDS", 0.5)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as slow:
        slow.sendall(head.encode())
        slow.settimeout(0.1)
        answer = b""
        for _ in range(100):  # a byte long before each chunk would be late
            slow.sendall(b" ")
            with contextlib.suppress(TimeoutError):
                answer = slow.recv(4096)
                break
    assert answer.startswith(b"HTTP/1.1 408")


def test_other_paths_and_methods_have_the_same_shape(server):
    assert shape(server.http.get("/v1/nothing"))["code"] == "unknown_url"
    assert server.http.get("/v1/completions").status_code == 405
    assert shape(server.http.get("/v1/completions"))["code"] == "unknown_url"


def test_a_prompt_beyond_the_context_is_refused_before_it_is_queued(server):
    refused = server.post({"model": NAME, "prompt": "x" * 3000})
    assert refused.status_code == 400
    assert shape(refused)["code"] == "context_length_exceeded"
    assert "3000 tokens" in refused.json()["error"]["message"]
    both = server.post({"model": NAME, "prompt": "x" * 500, "max_tokens": 100})
    assert shape(both)["code"] == "context_length_exceeded"
    assert "at most 12 new tokens" in both.json()["error"]["message"]


def test_a_chat_without_a_template_and_one_that_the_template_refuses(model):
    strict = "{{ raise_exception('roles must alternate') }}"
    for template, said in ((None, "no chat template"), (strict, "roles must alternate")):
        with (
            serving(model, byte_tokenizer(template), limits=LIMITS) as server,
            pytest.raises(openai.APIError) as refused,
        ):
            server.chat("x")
        assert refused.value.status_code == 400
        assert said in refused.value.message


def test_the_key_is_asked_for(guarded):
    body = {"model": NAME, "prompt": "x", "max_tokens": 1}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "correct horse"}):
        response = guarded.post(body, **headers)
        assert response.status_code == 401
        assert shape(response)["code"] == "invalid_api_key"
        assert "horse" not in response.text
    assert guarded.http.get("/v1/models").status_code == 401
    assert guarded.post(body, Authorization="Bearer correct horse").status_code == 200
    assert guarded.http.get("/health").status_code == 200


def test_a_body_beyond_the_limit_is_refused_with_or_without_its_length(guarded):
    key = {"Authorization": "Bearer correct horse", "Content-Type": "application/json"}
    whole = guarded.http.post("/v1/completions", content=b" " * 5000, headers=key)
    assert whole.status_code == 413
    assert shape(whole)["code"] == "body_too_large"
    chunked = guarded.http.post("/v1/completions", content=iter([b" " * 1000] * 6), headers=key)
    assert chunked.status_code == 413


def test_a_full_queue_answers_429_and_says_when_to_come_back(guarded, model):
    key = {"Authorization": "Bearer correct horse"}
    ask = {"model": NAME, "prompt": "x", "temperature": 0, "max_tokens": 450}
    call = ("POST", "/v1/completions")
    with slowed(model), guarded.http.stream(*call, json=ask | {"stream": True}, headers=key) as first:
        lines = first.iter_lines()
        next(lines)
        with guarded.http.stream(*call, json=ask | {"stream": True}, headers=key):
            wait_for(lambda: guarded.engine.waiting == 1)
            third = guarded.post(ask, **key)
    assert third.status_code == 429
    assert int(third.headers["Retry-After"]) >= 1
    assert shape(third)["type"] == "rate_limit_error"
    guarded.idle()


def test_an_unexpected_error_says_nothing_of_its_inside(server, model, tokenizer, monkeypatch, caplog):
    def broken(self, *args, **kwargs):
        raise RuntimeError("/home/me/secret-token")

    logging.getLogger("transformers").propagate = True
    with monkeypatch.context() as patch:
        patch.setattr(Target, "prefill", broken)
        response = server.post({"model": NAME, "prompt": "x"})
        assert response.status_code == 500
        assert shape(response)["code"] == "engine_error"
        patch.setattr("spechead.serving.app.Answers", broken)
        response = server.post({"model": NAME, "prompt": "x"})
        assert response.status_code == 500
        assert shape(response)["code"] == "server_error"
        stream = server.post({"model": NAME, "prompt": "x", "stream": True})
        assert stream.status_code == 500
    logging.getLogger("transformers").propagate = False
    assert "RuntimeError in broken (test_faults.py:" in caplog.text
    for secret in ("secret-token", "/home", str(os.getcwd())):
        assert secret not in caplog.text + response.text
    assert server.complete(PROMPT).choices[0].text == plain_text(model, tokenizer, PROMPT)


def test_an_error_in_the_middle_of_a_stream_is_an_event(server, monkeypatch):
    stream = server.complete(PROMPT, max_tokens=450, stream=True)
    next(iter(stream))

    def broken(self, *args, **kwargs):
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(Target, "forward", broken)
        with pytest.raises(openai.APIError, match="the engine failed"):
            list(stream)
    server.idle()
    assert server.complete(PROMPT, max_tokens=2).usage.completion_tokens == 2


def test_a_late_request_is_answered_with_504(model, tokenizer):
    limits = Limits(max_rows=1, max_length=512, timeout=0.3)
    with serving(model, tokenizer, limits=limits, speculative="off") as hurried:
        with slowed(model):
            response = hurried.post(LONG | {"stream": False})
        assert response.status_code == 504
        assert shape(response)["code"] == "timeout"


def test_200_connections_lose_nothing(server, model, tokenizer):
    """Every one gets its own right answer, and nothing is left behind."""
    expected = {n: plain_text(model, tokenizer, f"{n}", 5) for n in range(10)}

    def ask(client, number):
        body = {"model": NAME, "prompt": f"{number % 10}", "temperature": 0, "max_tokens": 5}
        return lambda: client.post("/v1/completions", json=body).json()["choices"][0]["text"]

    limits = httpx.Limits(max_connections=200)
    with httpx.Client(base_url=server.url, timeout=60, limits=limits) as client:
        results = at_once([ask(client, number) for number in range(200)])
    assert results == [expected[number % 10] for number in range(200)]
    server.idle()
    assert server.engine.waiting == 0


def test_200_requests_leave_no_tensor_behind(server):
    def some(count):
        for number in range(count):
            body = LONG | {"max_tokens": 1 + number % 2, "stream": number % 2 == 0, "logprobs": 1, "temperature": 1}
            assert server.post(body).status_code == 200
        server.idle()
        gc.collect()
        return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())

    some(5)  # what earlier tests left is collected here
    before = some(5)
    assert some(200) <= before


def start_server(directory, *options):
    """Run `spechead serve` as a process of its own; returns it and its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "spechead", "serve", "--target", str(directory), "--port", str(port), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SPECHEAD_API_KEY": "hush"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answers():
        if process.poll() is not None:
            raise RuntimeError(process.stderr.read())
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health", timeout=1).status_code == 200
        except httpx.TransportError:
            return False

    wait_for(answers, 120)
    return process, port


def test_sigterm_under_load_finishes_what_runs(tmp_path):
    directory = tmp_path / "tiny-target"
    byte_model(ends=False).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    process, port = start_server(directory, "--max-rows", "4", "--max-length", "600")
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="hush", max_retries=0, timeout=60)
        ask = {"model": "tiny-target", "prompt": PROMPT, "temperature": 0, "max_tokens": 400, "stream": True}
        streams = [client.completions.create(**ask) for _ in range(4)]  # these run
        waiting = client.completions.create(**ask | {"max_tokens": 20})  # this one waits
        first = [next(iter(stream)).choices[0].text for stream in streams]
        process.send_signal(signal.SIGTERM)
        ends = [list(stream) for stream in [*streams, waiting]]
        texts = [one + "".join(chunk.choices[0].text for chunk in end) for one, end in zip(first, ends, strict=False)]
        assert len(set(texts)) == 1
        assert len(texts[0]) > 300
        assert [end[-1].choices[0].finish_reason for end in ends] == ["length"] * 5
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{port}/health", timeout=5)
        output, log = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode in (0, -signal.SIGTERM)
    assert "MiB for keys and values" in log
    assert "Traceback" not in log
    for secret in ("hush", str(tmp_path)):
        assert secret not in output + log
