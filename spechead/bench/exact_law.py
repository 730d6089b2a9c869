"""The target's exact law after a text: plain forwards over the whole text, and the call's own processors.

Used by lossless.py. Processors are those that transformers builds for the same arguments: a `custom_generate` hook of
the untouched target hands them over. Nothing of spechead's loop, cache or sampling takes part.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel

from .. import hf
from .measure import end_ids

ROWS = 16  # texts a forward

Law = dict[tuple[int, ...], float]


def plain_logits(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], last: int, positions: Tensor | None = None
) -> Tensor:
    """Return float32 logits of the last columns of texts padded on the right to one width, `[R, last, V]`.

    Args:
        model: the untouched target.
        texts: ids; what follows a text's end is padding, which no earlier token attends to.
        last: columns.
        positions: position ids `[1, L]` other than 0, 1, 2, ...
    """
    width = max(len(text) for text in texts)
    parts = []
    for start in range(0, len(texts), ROWS):
        rows = [[*text, *[0] * (width - len(text))] for text in texts[start : start + ROWS]]
        mask = [[1] * len(text) + [0] * (width - len(text)) for text in texts[start : start + ROWS]]
        arguments: dict[str, Any] = {"logits_to_keep": last} if hf.takes(model, "logits_to_keep") else {}
        if positions is not None:
            arguments["position_ids"] = positions.expand(len(rows), -1).to(model.device)
        output = model(
            input_ids=torch.tensor(rows, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            use_cache=False,
            **arguments,
        )
        parts.append(output.logits[:, -last:].float().cpu())
    return torch.cat(parts)


def cached_logits(model: PreTrainedModel, prefix: Sequence[int], endings: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return float32 logits `[V]` after `prefix` and each ending, its tokens fed one by one as plain decoding does.

    Args:
        model: the untouched target.
        prefix: fed at once.
        endings: at least one token each.
    """
    shared = DynamicCache(config=model.config)
    _feed(model, prefix, 0, shared)
    found = []
    for ending in endings:
        cache = copy.deepcopy(shared)
        for place, token in enumerate(ending):
            logits = _feed(model, [token], len(prefix) + place, cache)
        found.append(logits)
    return found


def _feed(model: PreTrainedModel, tokens: Sequence[int], start: int, cache: DynamicCache) -> Tensor:
    ids = torch.tensor([list(tokens)], device=model.device)
    positions = torch.arange(start, start + len(tokens), device=model.device)[None]
    return hf.call(model, ids, positions, None, cache, last_only=True).logits[0, -1].float().cpu()


class ExactLaw:
    """What the target may say next, under the arguments of one call.

    Args:
        model: the untouched target.
        arguments: `generate`'s sampling arguments.
    """

    def __init__(self, model: PreTrainedModel, arguments: Mapping[str, Any]) -> None:
        self.model, self.arguments, self.ends = model, dict(arguments), end_ids(model)

    def processors(self, prompt: Sequence[int]) -> LogitsProcessorList:
        """Return the processors that transformers makes for a prompt."""
        taken: list[LogitsProcessorList] = []

        def hook(model: Any, input_ids: Tensor, logits_processor: LogitsProcessorList, **prepared: Any) -> Tensor:
            taken.append(logits_processor)
            return input_ids

        ids = torch.tensor([list(prompt)], device=self.model.device)
        self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=8,
            custom_generate=hook,
            **self.arguments,
        )
        return taken[0]

    def of(self, processors: LogitsProcessorList, text: Sequence[int], logits: Tensor) -> Tensor:
        """Return the law `[V]` after a text, given the target's float32 logits there."""
        ids = torch.tensor([list(text)], device=self.model.device)
        scores = processors(ids, logits[None].to(ids.device, copy=True))
        return torch.softmax(scores.double(), dim=-1)[0].cpu()

    @torch.no_grad()
    def joint(self, prompt: Sequence[int], tokens: int, cached: bool = False) -> Law:
        """Return the law of the first `tokens` tokens after a prompt; outcomes that end earlier are shorter.

        Args:
            prompt: ids.
            tokens: how many.
            cached: feed the tokens one by one behind a cached prompt: the same law by plain's other way.
        """
        processors = self.processors(prompt)
        done: Law = {}
        growing: Law = {(): 1.0}
        for _ in range(tokens):
            prefixes = list(growing)
            grown: Law = {}
            for prefix, logits in zip(prefixes, self._logits(prompt, prefixes, cached), strict=True):
                law = self.of(processors, [*prompt, *prefix], logits)
                for token in law.nonzero().flatten().tolist():
                    longer = (*prefix, token)
                    into = done if token in self.ends or len(longer) == tokens else grown
                    into[longer] = growing[prefix] * float(law[token])
            growing = grown
        return done

    def _logits(self, prompt: Sequence[int], prefixes: Sequence[tuple[int, ...]], cached: bool) -> Sequence[Tensor]:
        if not prefixes:
            return []
        if cached and len(prompt) > 1:
            return cached_logits(self.model, prompt[:-1], [[prompt[-1], *prefix] for prefix in prefixes])
        return list(plain_logits(self.model, [[*prompt, *prefix] for prefix in prefixes], 1)[:, 0])

    @torch.no_grad()
    def excluded_by_a_tie(self, prompt: Sequence[int], outcome: Sequence[int], bound: float) -> bool:
        """Whether the first impossible token of an outcome is excluded by less than `bound` in logits.

        At the edge of top-k, rounding decides which of two near-equal tokens may be said.
        """
        processors = self.processors(prompt)
        for place, token in enumerate(outcome):
            text = [*prompt, *outcome[:place]]
            logits = plain_logits(self.model, [text], 1)[0, 0]
            law = self.of(processors, text, logits)
            if law[token] == 0:
                return float(logits[law > 0].min() - logits[token]) <= bound
        return True
