"""Requests as OpenAI writes them, checked: every field is honoured, has its neutral value, or is refused by name.

`ChatRequest` and `CompletionRequest` are the bodies of the two endpoints; vLLM's names are taken for what OpenAI lacks
(`top_k`, `min_p`, `repetition_penalty`, `chat_template_kwargs`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from .errors import FieldError
from .ticket import Sampling

MAX_STOPS, MAX_STOP_LENGTH = 4, 256
LOWEST_TEMPERATURE = 0.01  # scores divided by less overflow
SEEDS = 2**63

# Fields of OpenAI's that are not supported: values that change nothing, which are let pass, and what to do instead.
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "only text is answered"),
    "best_of": ((1,), "use n, and choose yourself"),
    "echo": ((False,), "put the prompt before the answer yourself"),
    "frequency_penalty": ((0,), "use repetition_penalty"),
    "function_call": (("none",), "describe the functions in the messages"),
    "functions": (([],), "describe the functions in the messages"),
    "logit_bias": (({},), "no token can be favoured or banned"),
    "metadata": (({},), "nothing is stored"),
    "modalities": ((["text"],), "only text is answered"),
    "parallel_tool_calls": ((True, False), "describe the tools in the messages"),
    "prediction": ((), "the server drafts by itself"),
    "presence_penalty": ((0,), "use repetition_penalty"),
    "reasoning_effort": ((), "use chat_template_kwargs, where the target's template has a switch"),
    "response_format": (({"type": "text"},), "ask for the format in the messages"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "store": ((False,), "nothing is stored"),
    "suffix": (("",), "only continuations are generated"),
    "tool_choice": (("none", "auto"), "describe the tools in the messages"),
    "tools": (([],), "describe the tools in the messages"),
    "web_search_options": ((), "describe what you know in the messages"),
}


def _stops(value: Any) -> Any:
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not all(isinstance(stop, str) for stop in given):
        raise FieldError("stop", f"stop={value!r:.80} must be a string or a list of strings.")
    if len(given) > MAX_STOPS or not all(1 <= len(stop) <= MAX_STOP_LENGTH for stop in given):
        message = f"stop takes up to {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters; got {given!r:.80}."
        raise FieldError("stop", message)
    return given


def _content(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or set(part) != {"type", "text"} or part["type"] != "text":
            raise FieldError(
                "messages", f"a message's part {part!r:.80} is not text; parts are type 'text' with a text."
            )
        if not isinstance(part["text"], str):
            raise FieldError("messages", f"a message's part has text {part['text']!r:.80}, which is no string.")
    return "".join(part["text"] for part in value)


def _prompts(value: Any) -> Any:
    """Return a list of prompts, each a string or a list of ids."""

    def is_ids(one: Any) -> bool:
        return isinstance(one, list) and bool(one) and all(type(token) is int for token in one)

    if isinstance(value, str) or is_ids(value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(one, str) or is_ids(one) for one in value):
        return value
    raise FieldError("prompt", "prompt must be a string, a list of token ids, or a list of either, and not empty.")


Stops = Annotated[list[str], BeforeValidator(_stops)]
Content = Annotated[str, BeforeValidator(_content)]
Prompts = Annotated[list[Any], BeforeValidator(_prompts)]


class Body(BaseModel):
    """What every object of a body obeys: exact types, and no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False


class Message(Body):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: Content

    @model_validator(mode="before")
    @classmethod
    def _let_absent_fields_pass(cls, data: Any) -> Any:
        """Drop what says nothing: an answer of this server, sent back as the client made it, has nulls and empty lists
        for all that a text message lacks."""
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if name in cls.model_fields or value not in (None, [])}


class Request(Body):
    """What both endpoints take."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    seed: int | None = Field(None, ge=-SEEDS, lt=SEEDS)
    n: int = Field(1, ge=1)
    stop: Stops = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None  # names the caller; changes nothing

    @model_validator(mode="before")
    @classmethod
    def _let_neutral_values_pass(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if value is None and (name in cls.model_fields or name in UNSUPPORTED):
                continue  # as if it were not there
            neutral, remedy = UNSUPPORTED.get(name, ((), ""))
            if name not in cls.model_fields and value in neutral:
                continue
            if name not in cls.model_fields and remedy:
                raise FieldError(name, f"{name}={value!r:.80} is not supported: {remedy}.")
            kept[name] = value
        return kept

    @model_validator(mode="after")
    def _check_pairs(self) -> Request:
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            allowed = f"0 (greedy) or {LOWEST_TEMPERATURE} to 2"
            raise FieldError("temperature", f"temperature={self.temperature} must be {allowed}.")
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "stream_options is for stream=true; drop it, or stream.")
        return self

    @property
    def sampling(self) -> Sampling:
        """The law of the request's rows."""
        if self.temperature == 0:
            return Sampling(temperature=0.0, repetition_penalty=self.repetition_penalty)
        top_k = max(self.top_k, 0)
        return Sampling(self.temperature, self.top_p, top_k, self.min_p, self.repetition_penalty)


class ChatRequest(Request):
    """Body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs needs logprobs=true; set it, or drop top_logprobs.")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise FieldError("max_tokens", f"max_tokens and max_completion_tokens are one setting; got {both}.")
        return self

    @property
    def new_tokens(self) -> int | None:
        """New tokens asked for; None leaves it to the server."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Alternatives to report beside each token's log-probability; None reports none."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Request):
    """Body of `/v1/completions`."""

    prompt: Prompts
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=5)

    @property
    def new_tokens(self) -> int | None:
        """New tokens asked for."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Alternatives to report beside each token's log-probability; None reports none."""
        return self.logprobs
