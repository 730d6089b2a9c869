"""What the server's tests share: a byte-level tokenizer, tiny targets, and a server on a free port of 127.0.0.1."""

import copy
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import torch
import uvicorn
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from spechead import enable_speculation
from spechead.serving.app import create_app
from spechead.serving.limits import Limits
from tests.tiny import build, table_model, tiny_config

NAME = "tiny"
END, USER, ANSWER, PAD = 256, 257, 258, 259
VOCAB = 260
TEMPLATE = (
    "{% for message in messages %}{{ '<answer>' if message.role == 'assistant' else '<user>' }}{{ message.content }}"
    "{% endfor %}{% if cited %}{{ cited }}{% endif %}<answer>"
)


def byte_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose first 256 ids are the bytes, so that most characters beyond ASCII are split."""
    backend = Tokenizer(models.BPE({letter: byte for byte, letter in bytes_to_unicode().items()}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    names = ["<end>", "<user>", "<answer>", "<pad>"]
    backend.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")
    tokenizer.chat_template = template
    return tokenizer


def byte_model(seed: int = 0, ends: bool = True, positions: int = 1024) -> PreTrainedModel:
    """Return a tiny target over bytes that mostly writes ASCII, and ends now and then."""
    model = build(
        tiny_config("llama", vocab_size=VOCAB, max_position_embeddings=positions, pad_token_id=PAD), seed=seed
    )
    with torch.no_grad():
        rare = torch.ones(VOCAB)
        rare[:32] = rare[127:] = 0.3
        rare[END] = 0.6 if ends else 0.0
        model.lm_head.weight.mul_(rare[:, None])
    model.generation_config.eos_token_id = END
    return model


def near(model: PreTrainedModel, noise: float = 0.05) -> PreTrainedModel:
    """Return a draft that mostly agrees with a target."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * noise * parameter.std())
    return draft


def cycle_model(text: str) -> PreTrainedModel:
    """Return a target that repeats a text for ever, byte by byte; no byte may occur twice in it."""
    loop = list(text.encode())
    successors = list(range(VOCAB))
    for index, byte in enumerate(loop):
        successors[byte] = loop[(index + 1) % len(loop)]
    successors[ANSWER] = loop[0]
    return table_model(successors)


def speculating(model: PreTrainedModel, draft: PreTrainedModel | None = None) -> Any:
    """Enable speculation, by default with a draft that mostly agrees."""
    return enable_speculation(model, draft_model=near(model) if draft is None else draft)


class Serving:
    """A running server.

    Args:
        app: what it serves.
        port: where.
    """

    def __init__(self, app: Any, port: int) -> None:
        self.app, self.port, self.engine = app, port, app.state.engine
        self.url = f"http://127.0.0.1:{port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def complete(self, prompt: str, **settings: Any) -> Any:
        """Ask for a greedy completion by default."""
        arguments = {"temperature": 0, "max_tokens": 24} | settings
        extra = {name: arguments.pop(name) for name in ("top_k", "repetition_penalty") if name in arguments}
        extra |= arguments.pop("extra_body", {})
        return self.client.completions.create(model=NAME, prompt=prompt, extra_body=extra, **arguments)

    def chat(self, content: str, **settings: Any) -> Any:
        """Ask for a greedy answer by default."""
        arguments = {"temperature": 0, "max_tokens": 24} | settings
        messages: Any = [{"role": "user", "content": content}]
        return self.client.chat.completions.create(model=NAME, messages=messages, **arguments)

    def post(self, body: Any, path: str = "/v1/completions", **headers: str) -> httpx.Response:
        """Post JSON, or raw bytes as JSON."""
        kind = {"content": body} if isinstance(body, bytes) else {"json": body}
        return self.http.post(path, **kind, headers={"Content-Type": "application/json", **headers})

    def idle(self, seconds: float = 20.0) -> None:
        """Wait until no row runs or waits."""
        wait_for(lambda: self.engine.context is None and not self.engine.waiting, seconds)


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    """Wait until a condition holds.

    Raises:
        TimeoutError: if it does not.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"the condition did not hold within {seconds} seconds")
        time.sleep(0.005)


@contextmanager
def serving(model: Any, tokenizer: Any = None, **settings: Any) -> Iterator[Serving]:
    """Serve a model on a free port of the loopback interface until the block ends."""
    app = create_app(model, tokenizer or byte_tokenizer(), name=NAME, **settings)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=10)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            wait_for(lambda: server.started or not thread.is_alive())
            started = Serving(app, listener.getsockname()[1])
            yield started
            started.client.close()
            started.http.close()
        finally:
            server.should_exit = True
            thread.join(30)
            if thread.is_alive():
                raise TimeoutError("the server did not stop")


@contextmanager
def slowed(model: PreTrainedModel, seconds: float = 0.02) -> Iterator[None]:
    """Make every forward of a model take longer."""
    handle = model.register_forward_hook(lambda *_: time.sleep(seconds))
    try:
        yield
    finally:
        handle.remove()


def plain_text(model: Any, tokenizer: Any, prompt: str, max_tokens: int = 24) -> str:
    """Return what the library's own greedy search writes after a prompt."""
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=PAD,
    )
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def at_once(calls: Sequence[Any]) -> list[Any]:
    """Run calls in threads of their own at the same time; returns what they returned, or raised."""
    results: list[Any] = [None] * len(calls)

    def run(place: int) -> None:
        try:
            results[place] = calls[place]()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


LIMITS = Limits(max_rows=4, max_length=512, max_queue=256, timeout=60, prefill_tokens=64)
