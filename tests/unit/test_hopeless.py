"""The one warning about drafts that are hardly ever kept."""

import logging

import pytest
from transformers.utils import logging as library_logging

from spechead import decoding
from spechead.decoding import LIKELY_CAUSES, warn_if_hopeless
from spechead.stats import DecodeStats
from tests.unit.heads.targets import loud


@pytest.fixture(autouse=True)
def _said_nothing_yet() -> None:
    library_logging.get_logger("spechead").warning_once.cache_clear()  # type: ignore[attr-defined]


def warned(caplog: pytest.LogCaptureFixture, method: str, tried: int, kept: int, times: int = 1) -> list[str]:
    with loud(caplog):
        for _ in range(times):
            warn_if_hopeless(DecodeStats(method=method, tried_by_depth=[tried, tried], kept_by_depth=[kept, 0]))
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_it_is_said_once_with_the_causes_in_order(caplog: pytest.LogCaptureFixture) -> None:
    (message,) = warned(caplog, "eagle", 64, 19, times=3)
    places = [message.index(cause) for cause in LIKELY_CAUSES]
    assert places == sorted(places)
    assert 'speculative="auto"' in message


@pytest.mark.parametrize(
    ("method", "tried", "kept"),
    [("eagle", 63, 0), ("eagle", 64, 20), ("prompt_lookup", 100, 0), ("auto", 100, 0), ("custom", 100, 0)],
)
def test_too_few_tries_good_drafts_and_untrained_methods_are_left_alone(
    caplog: pytest.LogCaptureFixture, method: str, tried: int, kept: int
) -> None:
    assert warned(caplog, method, tried, kept) == []


def test_nothing_drafted_is_nothing_to_warn_about(caplog: pytest.LogCaptureFixture) -> None:
    with loud(caplog):
        warn_if_hopeless(DecodeStats(method="eagle"))
    assert not caplog.records


def test_a_call_with_a_random_draft_warns(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from spechead import enable_speculation
    from tests.tiny import fresh_model, prompt_ids, tiny_model

    model = enable_speculation(fresh_model("llama"), draft_model=tiny_model("llama", seed=5))
    ids = prompt_ids(1, 8)
    with loud(caplog):
        model.generate(ids, attention_mask=ids > 0, speculative="draft_model", max_new_tokens=100, do_sample=False)
    assert sum("Likely causes" in record.getMessage() for record in caplog.records) == 1
    assert decoding.TRIED <= 100
