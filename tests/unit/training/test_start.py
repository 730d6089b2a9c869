"""How a fresh EAGLE head starts: how far it says that its attention was trained."""

import pytest

from spechead import Eagle3Config, Eagle3Head
from spechead.training.start import start_from_target
from tests.tiny import fresh_model


@pytest.mark.parametrize(("family", "reach"), [("llama", 256), ("qwen3", 256), ("gpt2", None), ("gpt_neox", None)])
def test_a_head_reaches_as_far_as_the_attention_that_it_took_over(family: str, reach: int | None) -> None:
    target = fresh_model(family)
    head = Eagle3Head(Eagle3Config.for_target(target.config)).bind(target)
    start_from_target(head, target)
    assert head.config.trained_positions == reach
