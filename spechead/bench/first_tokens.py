"""Samples of the first tokens that a method emits after a prompt, many rows at a time.

Used by lossless.py. Half of the samples have room for drafts as deep as in use, half for one drafted token only, so
that the bonus token behind the last drafted one is among the first tokens too.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteriaList
from transformers.generation import StoppingCriteria

from ..attach import Speculation
from ..config import SpeculativeConfig
from ..proposers.auto import AutoProposer
from ..proposers.costs import Ledger
from .certificate import CheckSettings
from .chi_square import samples_needed
from .exact_law import ExactLaw, Law
from .measure import cut, end_ids
from .witness import Seen, Witness

CHOSEN_OF = 16  # prompts whose first law is looked at to choose among
LEAST_ENTROPY = 0.01  # nats; below, a first token is certain
DEPTH_ROOM = 8  # tokens to draft beyond the joint law's, so that trees are as deep as in use

Prompts = dict[str, list[int]]


class StopAfter(StoppingCriteria):
    """Stops a row once it is so long."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Return one flag a row."""
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length, device=input_ids.device)


class FirstTokens:
    """Draws the first tokens of one method.

    Args:
        plain: the untouched target.
        enabled: its twin, on which speculation is enabled.
        config: the method.
        settings: how much to draw, and by which law.
    """

    def __init__(
        self, plain: PreTrainedModel, enabled: Any, config: SpeculativeConfig, settings: CheckSettings
    ) -> None:
        self.plain, self.enabled, self.config, self.settings = plain, enabled, config, settings
        self.state = Speculation.of(enabled)
        self.sampling: dict[str, Any] = {
            "do_sample": True,
            "temperature": settings.temperature,
            "top_k": settings.top_k,
            "top_p": 1.0,
        }
        self.exact = ExactLaw(plain, self.sampling)
        self.drafted = 0

    def proposer(self) -> Any:
        """Return a fresh proposer of the method, as each call of `generate` gets one.

        For "auto" costs are given under which drafting pays, or it would spend these short calls measuring them.
        """
        proposer = self.state.proposer(self.config)[0]
        if isinstance(proposer, AutoProposer):
            proposer.ledger = Ledger(step_seconds=lambda nodes: 1.0, draft_seconds=lambda depth: 0.01)
        return proposer

    def uncertain(self, prompts: Prompts) -> Prompts:
        """Return the shortest of the prompts whose first token has at least half the entropy of the least certain one.

        Every call feeds its prompt and every sample keeps its keys and values, so a prompt's length is most of what
        the test costs.

        Raises:
            ValueError: if even theirs is certain, or the target has no positions for a prompt and its samples.
        """
        entropies = {}
        for name in list(prompts)[:CHOSEN_OF]:
            first = torch.tensor(list(self.exact.joint(prompts[name], 1).values()))
            entropies[name] = float(torch.special.entr(first).sum())
        half = max(entropies.values()) / 2
        uncertain = [name for name, found in entropies.items() if found > LEAST_ENTROPY and found >= half]
        kept = sorted(uncertain, key=lambda name: len(prompts[name]))[: self.settings.law_prompts]
        if not kept:
            raise ValueError(
                f"the target is certain of the first token of all prompts at temperature {self.settings.temperature}; "
                "give a higher --temperature or other --prompts."
            )
        for name in kept:
            self._lengths(len(prompts[name]))  # which may refuse it
        return {name: prompts[name] for name in kept}

    def samples(self, laws: dict[str, Law]) -> int:
        """Return how many samples the stated effect size and power ask for."""
        settings = self.settings
        degrees = max(sum(len(law) - 1 for law in laws.values()), 1)
        return samples_needed(degrees, settings.effect_size, settings.significance, settings.power)

    def sample(self, row: list[int], count: int, number: int) -> tuple[Counter[tuple[int, ...]], Seen]:
        """Sample a prompt's first tokens.

        Args:
            row: its ids.
            count: samples.
            number: of the prompt, added to the seed.

        Returns:
            The outcomes, and what the calls did; nothing watches a lossy method, whose rule is in its config.
        """
        counts: Counter[tuple[int, ...]] = Counter()
        seen, witnessed = Seen(), 0
        generator = torch.Generator(self.plain.device).manual_seed(self.settings.seed + number)
        at_once = self.settings.rows if self.state.target.verdict.tier == "tree" else 1
        for new_tokens in self._lengths(len(row)):
            left, calls = (count + 1) // 2, 0
            while left > 0:
                method: Any = self.config
                if self.config.acceptance == "exact":
                    keep = (lambda step: step < 2) if calls == 0 else (lambda step: False)
                    method = Witness(self.proposer(), keep, seed=self.settings.seed + witnessed, seen=seen)
                    witnessed += 1
                counts.update(self._call(row, min(at_once, left), new_tokens, method, generator))
                left -= at_once
                calls += 1
        return counts, seen

    def _lengths(self, width: int) -> tuple[int, int]:
        """Return the new tokens of deep and of shallow calls, as the target's positions allow."""
        limit = getattr(self.plain.config.get_text_config(decoder=True), "max_position_embeddings", None)
        shallow = max(self.settings.tokens, 2)
        if limit is not None and width + shallow > limit:
            raise ValueError(
                f"a prompt of {width} tokens and {shallow} new ones exceed the target's {limit} positions; "
                "give shorter prompts."
            )
        deep = self.settings.tokens + DEPTH_ROOM
        return (deep if limit is None else min(deep, limit - width)), shallow

    def _call(self, row: list[int], rows: int, new_tokens: int, method: Any, generator: torch.Generator) -> list[Any]:
        ids = torch.tensor([row], device=self.plain.device)
        own = self.plain.generation_config
        unfilled = own.pad_token_id is None and own.eos_token_id is None  # rows end apart: something must fill them
        output = self.enabled.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            num_return_sequences=rows,
            max_new_tokens=new_tokens,
            stopping_criteria=StoppingCriteriaList([StopAfter(len(row) + self.settings.tokens)]),
            generator=generator,
            speculative=method,
            return_dict_in_generate=True,
            **self.sampling,
            **({"pad_token_id": 0} if unfilled else {}),
        )
        self.drafted += output.stats.drafted_tokens
        ends = end_ids(self.plain)
        new = output.sequences[:, len(row) : len(row) + self.settings.tokens].tolist()
        return [tuple(cut(each, ends)) for each in new]
