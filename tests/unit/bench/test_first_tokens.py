"""The sampled check of `spechead verify`: it takes uncertain prompts, of those the short ones, and holds no call's
memory."""

import gc
from types import SimpleNamespace

import pytest

from spechead import SpeculativeConfig, enable_speculation
from spechead.bench.certificate import CheckSettings
from spechead.bench.first_tokens import FirstTokens
from spechead.bench.measure import twin
from spechead.cache import RaggedCache
from spechead.proposers.base import BaseProposer
from tests import tiny

WIDE = {(token,): 0.25 for token in range(4)}  # 1.39 nats
HALF = {(0,): 0.7, (1,): 0.3}  # 0.61 nats: less than half of it
NARROW = {(0,): 0.6, (1,): 0.2, (2,): 0.2}  # 0.95 nats
CERTAIN = {(0,): 1.0}


def chosen(laws: dict[int, dict], wanted: int = 2) -> list[str]:
    """Choose among prompts whose first id names their law, and whose length is that id."""
    first = object.__new__(FirstTokens)
    first.exact = SimpleNamespace(joint=lambda row, tokens: laws[row[0]])
    first.settings = SimpleNamespace(law_prompts=wanted, temperature=1.0)
    first._lengths = lambda width: (width, width)
    return list(first.uncertain({f"p{length}": [length] * length for length in laws}))


def test_the_shortest_of_the_uncertain_prompts_are_taken() -> None:
    assert chosen({90: WIDE, 5: HALF, 40: WIDE, 20: NARROW, 3: CERTAIN}) == ["p20", "p40"]


def test_prompts_that_are_all_certain_are_refused() -> None:
    with pytest.raises(ValueError, match="certain of the first token of all prompts"):
        chosen({5: CERTAIN, 8: CERTAIN})


@pytest.mark.parametrize("method", ["draft_model", "prompt_lookup"])
def test_calls_that_were_watched_leave_neither_caches_nor_proposers(method: str) -> None:
    plain = tiny.fresh_model("llama")
    enabled = enable_speculation(twin(plain), draft_model=plain)
    first = FirstTokens(plain, enabled, SpeculativeConfig(method=method), CheckSettings(rows=8))

    def held() -> int:
        return sum(issubclass(type(thing), (RaggedCache, BaseProposer)) for thing in gc.get_objects())

    gc.collect()
    before = held()
    gc.disable()  # a cycle would be found at some time, after how many calls nobody knows
    try:
        counts, seen = first.sample(tiny.prompt_ids(1, 40)[0].tolist(), 48, 0)
        assert held() == before
    finally:
        gc.enable()
    assert counts.total() == 48
    assert seen.steps
    assert seen.inside.values
