"""Prompts: chats and texts to token ids, in a thread of their own so that a long one holds nobody's stream up."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..training.chat import TEMPLATE_ERRORS
from .errors import ApiError


class Prompts:
    """Encode requests for one target.

    Args:
        tokenizer: the target's.
        vocab_size: ids from here on have no embedding.
        longest: tokens that a prompt may have.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, longest: int) -> None:
        self.tokenizer, self.vocab_size, self.longest = tokenizer, vocab_size, longest
        self._thread = ThreadPoolExecutor(1, "spechead-encode")  # one: tokenizers are not safe to share

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    async def of_chat(self, messages: Sequence[dict[str, str]], template: dict[str, Any]) -> list[int]:
        """Encode a chat with the target's own template.

        Raises:
            ApiError: 400 where the target has no template, or the template or its arguments cannot be used.
        """
        if not self.tokenizer.chat_template:
            message = "this target's tokenizer has no chat template; use /v1/completions."
            raise ApiError(400, message, "messages", "no_chat_template")
        own = inspect.signature(self.tokenizer.apply_chat_template).parameters
        if taken := sorted(set(template) & set(own)):
            message = (
                f"chat_template_kwargs sets {', '.join(taken)}, which is the server's; give the template's own names."
            )
            raise ApiError(400, message, "chat_template_kwargs", "invalid_value")

        def encode() -> list[int]:
            try:
                encoded = self.tokenizer.apply_chat_template(
                    list(messages), add_generation_prompt=True, tokenize=True, return_dict=True, **template
                )
            except TEMPLATE_ERRORS as error:
                message = f"the target's chat template refuses this chat: {error}"
                raise ApiError(400, message, "messages", "chat_template") from error
            return list(encoded["input_ids"])

        return self._checked(await self._run(encode), "messages")

    async def of_prompt(self, prompt: str | list[int]) -> list[int]:
        """Encode a text, or take ids as they are.

        Raises:
            ApiError: 400 for an empty or too long prompt, or ids outside the vocabulary.
        """
        if isinstance(prompt, list):
            return self._checked(prompt, "prompt")
        text: str = prompt

        def encode() -> list[int]:
            try:
                return list(self.tokenizer(text)["input_ids"])
            except (TypeError, ValueError) as error:  # half a surrogate pair
                raise ApiError(400, "prompt holds what is no text.", "prompt", "invalid_value") from error

        return self._checked(await self._run(encode), "prompt")

    async def _run(self, encode: Callable[[], list[int]]) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, encode)

    def _checked(self, ids: list[int], param: str) -> list[int]:
        if not ids:
            raise ApiError(400, f"{param} has no tokens; give at least one.", param, "empty_prompt")
        if len(ids) > self.longest:
            message = (
                f"{param} has {len(ids)} tokens; this server takes {self.longest}, and at least one for the answer."
            )
            raise ApiError(400, message, param, "context_length_exceeded")
        outside = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if outside is not None:
            message = f"{param} holds token id {outside}; ids of this target are 0 to {self.vocab_size - 1}."
            raise ApiError(400, message, param, "invalid_token")
        return ids
