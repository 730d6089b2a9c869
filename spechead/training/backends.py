"""Who answers prompts: the target in this process, or an OpenAI-compatible server that runs it (vLLM, SGLang).

The server is asked on `/v1/completions` with the prompt's token ids, so the chat template stays ours, and for the
answer's token ids. Where it sends text alone, the text is tokenised, the answer marked, and dropped if the ids do not
give the text back or are not as many as the server says it generated.

The law of the answers is the target's own at a temperature: both name every setting that a target's generation config
could set otherwise.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..attach import Speculation
from ..mixin import enable_speculation
from .answer_log import Answer, Question
from .chat import ChatEncoder
from .generations import batch_seed

logger = logging.get_logger(__name__)

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
LONGEST_WAIT = 60.0
NOT_UNDERSTOOD = (400, 422)
FULL_LAW = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}  # as transformers and provenance say it
# Not OpenAI's own. Every version of vLLM and SGLang takes -1 as all tokens, not all of them 0.
BEYOND_OPENAI = {
    "top_k": -1,
    "min_p": FULL_LAW["min_p"],
    "repetition_penalty": FULL_LAW["repetition_penalty"],
    "return_token_ids": True,
    "skip_special_tokens": False,
}
STRICT = (
    f". If it does not know {', '.join(BEYOND_OPENAI)}: they are sent so that the model's generation config cannot "
    "change the law of the answers unseen, so ask a server that takes them, such as vLLM or SGLang."
)


class LocalBackend:
    """The target itself, through `generate`, left-padded.

    Args:
        target: the loaded target; its generation config is put aside.
        tokenizer: its tokenizer.
        end_ids: token ids that end an answer.
        new_tokens: at most so many.
        seed: the run's seed.
        speculative: a way of drafting that needs no head, or None; the answers' law is the same.

    Raises:
        ValueError: if that way needs a head or a draft.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Sequence[int],
        new_tokens: int,
        seed: int,
        speculative: str | None = None,
    ):
        if speculative is not None:
            Speculation.of(enable_speculation(target)).proposer(speculative)
        # Where generate is told nothing it takes the target's own config: penalties, suppressed tokens, least lengths.
        target.generation_config = GenerationConfig()
        self.counts: Counter[str] = Counter()
        self.arguments = {} if speculative is None else {"speculative": speculative}
        self.target, self.end_ids, self.new_tokens, self.seed = target, list(end_ids), new_tokens, seed
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.end_ids[0]

    @torch.inference_mode()
    def answer(self, questions: Sequence[Question]) -> list[Answer | None]:
        """Answer a batch of one temperature; the seed is a function of the run's and the batch."""
        width = max(len(question.prompt_ids) for question in questions)
        ids = torch.full((len(questions), width), self.pad_id, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, question in enumerate(questions):
            start = width - len(question.prompt_ids)
            ids[row, start:], mask[row, start:] = torch.tensor(question.prompt_ids), 1
        heat = questions[0].temperature
        sampling = {"do_sample": True, "temperature": heat, **FULL_LAW} if heat > 0 else {"do_sample": False}
        seed = batch_seed(self.seed, questions)
        torch.manual_seed(seed)
        device = self.target.get_input_embeddings().weight.device
        output = self.target.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=self.new_tokens,
            eos_token_id=self.end_ids,
            pad_token_id=self.pad_id,
            **sampling,
            **self.arguments,
        )
        return [self._cut(row, seed) for row in output[:, width:].tolist()]

    def _cut(self, row: list[int], seed: int) -> Answer:
        ends = [place for place, token in enumerate(row) if token in self.end_ids]
        if ends:
            return Answer(row[: ends[0] + 1], "stop", seed)
        return Answer(row[: self.new_tokens], "length", seed)


class EndpointBackend:
    """An OpenAI-compatible server.

    Args:
        url: base url, such as `http://localhost:8000/v1`.
        model: the model's name there.
        encoder: the target's tokenizer and template, and the token ids that end an answer.
        new_tokens: at most so many.
        seed: the run's seed.
        concurrency: requests under way at once.
        retries: further attempts after a failed one.
        api_key: sent as a bearer token if given.
        timeout: seconds a request may take.

    Raises:
        ValueError: if nothing tells which of several end ids closes an answer.
    """

    def __init__(
        self,
        url: str,
        model: str,
        encoder: ChatEncoder,
        new_tokens: int,
        seed: int,
        concurrency: int = 32,
        retries: int = 5,
        api_key: str | None = None,
        timeout: float = 600.0,
    ):
        self.url, self.model, self.tokenizer = url.rstrip("/"), model, encoder.tokenizer
        self.end_ids, self.closing_id = encoder.end_ids, encoder.closing_id()
        self.new_tokens, self.seed, self.retries, self.timeout = new_tokens, seed, retries, timeout
        self.headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self.pool = ThreadPoolExecutor(concurrency)
        self.counts: Counter[str] = Counter()

    def answer(self, questions: Sequence[Question]) -> list[Answer | None]:
        """Answer a batch, at most `concurrency` requests at a time.

        Raises:
            RuntimeError: if the server refuses a request or keeps failing.
        """
        return list(self.pool.map(self._ask, questions))

    def _ask(self, question: Question) -> Answer | None:
        seed = batch_seed(self.seed, [question])
        body = {
            "model": self.model,
            "prompt": question.prompt_ids,
            "max_tokens": self.new_tokens,
            "seed": seed,
            "temperature": question.temperature,
            "top_p": FULL_LAW["top_p"],
            "n": 1,
            **BEYOND_OPENAI,
        }
        reply = self._post(body)
        choice = reply["choices"][0]
        finish = "stop" if choice.get("finish_reason") == "stop" else "length"
        ids = choice.get("token_ids")
        if ids is None:
            return self._from_text(choice.get("text", ""), finish, reply.get("usage") or {}, seed)
        self.counts["token ids"] += 1
        return Answer(self._ended(list(ids), finish), finish, seed)

    def _from_text(self, text: str, finish: str, usage: Mapping[str, Any], seed: int) -> Answer | None:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        back = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        ended = self._ended(ids, finish)
        said = usage.get("completion_tokens")
        # Servers differ in whether the end token counts.
        if back != text or not ids or (said is not None and said not in (len(ids), len(ended))):
            self.counts["dropped: the text does not give its tokens back"] += 1
            return None
        self.counts["retokenised"] += 1
        return Answer(ended, finish, seed, retokenized=True)

    def _ended(self, ids: list[int], finish: str) -> list[int]:
        return ids if finish != "stop" or (ids and ids[-1] in self.end_ids) else [*ids, self.closing_id]

    def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.url}/completions", json.dumps(body).encode(), self.headers)
        for attempt in range(self.retries + 1):
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                    return json.load(reply)
            except urllib.error.HTTPError as error:
                if error.code not in RETRIED:
                    said = error.read().decode(errors="replace")[:500]
                    why = f"{self.url} refused a request with status {error.code}: {said}"
                    raise RuntimeError(why + (STRICT if error.code in NOT_UNDERSTOOD else "")) from error
                reason: Exception = error
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:  # also a reply cut short
                reason = error
            self.counts["failed requests"] += 1
            if attempt < self.retries:
                time.sleep(min(LONGEST_WAIT, 0.5 * 2**attempt))
        raise RuntimeError(
            f"{self.url} failed {self.retries + 1} times, last with {reason}. The answers so far are kept: start the "
            "same command again when the server is well."
        ) from reason
