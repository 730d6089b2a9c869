"""Facts about transformers' logits processors and criteria that sampling.py, row.py and support.py build on."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    LogitsProcessor,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
)
from transformers.generation import logits_process, stopping_criteria

from spechead.sampling import PREFIX_FREE
from spechead.support import ROW_FUNCTIONS
from tests.tiny import left_padded, tiny_model

# Refused by support.check_processors: they keep state, look at several rows at once, or serve other kinds of models.
REFUSED = {
    "AlternatingCodebooksLogitsProcessor",
    "BarkEosPrioritizerLogitsProcessor",
    "ClassifierFreeGuidanceLogitsProcessor",
    "DiaClassifierFreeGuidanceLogitsProcessor",
    "DiaEOSChannelFilterLogitsProcessor",
    "DiaEOSDelayPatternLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "WatermarkLogitsProcessor",
    "WhisperNoSpeechDetection",
    "WhisperTimeStampLogitsProcessor",
}


def defined(module: Any, base: type) -> dict[str, type]:
    classes = inspect.getmembers(module, inspect.isclass)
    return {name: kind for name, kind in classes if issubclass(kind, base) and kind.__module__ == module.__name__}


def test_every_processor_of_the_library_is_row_wise_or_refused() -> None:
    known = {kind.__name__ for kind in ROW_FUNCTIONS} | REFUSED | {"LogitsProcessor"}
    assert set(defined(logits_process, LogitsProcessor)) - known == set(), "new processors: row-wise, or refused?"
    assert len(set(ROW_FUNCTIONS)) == len(ROW_FUNCTIONS)
    assert not {kind.__name__ for kind in ROW_FUNCTIONS} & REFUSED


ids = torch.tensor([[3, 5, 3, 7, 3, 5], [0, 0, 9, 2, 9, 2], [1, 4, 4, 4, 8, 8]])

BUILT: dict[str, LogitsProcessor] = {
    kind.__name__: kind(*arguments)
    for kind, arguments in (
        (logits_process.EpsilonLogitsWarper, (0.05,)),
        (logits_process.EtaLogitsWarper, (0.05,)),
        (logits_process.InfNanRemoveLogitsProcessor, ()),
        (logits_process.LogitNormalization, ()),
        (logits_process.MinPLogitsWarper, (0.1,)),
        (logits_process.SuppressTokensLogitsProcessor, ([3, 5],)),
        (logits_process.TemperatureLogitsWarper, (0.7,)),
        (logits_process.TopHLogitsWarper, (0.5,)),
        (logits_process.TopKLogitsWarper, (4,)),
        (logits_process.TopPLogitsWarper, (0.8,)),
        (logits_process.TypicalLogitsWarper, (0.8,)),
        (logits_process.ExponentialDecayLengthPenalty, ((2, 1.5), torch.tensor([5]), 3)),
        (logits_process.ForcedBOSTokenLogitsProcessor, (1,)),
        (logits_process.ForcedEOSTokenLogitsProcessor, (7, [4])),
        (logits_process.MinLengthLogitsProcessor, (9, [4])),
        (logits_process.MinNewTokensLengthLogitsProcessor, (3, 5, [4])),
        (logits_process.NoBadWordsLogitsProcessor, ([[3, 5, 6], [8]], [4])),
        (logits_process.NoRepeatNGramLogitsProcessor, (2,)),
        (logits_process.RepetitionPenaltyLogitsProcessor, (1.3,)),
        (logits_process.SequenceBiasLogitsProcessor, ([[[5, 3], 2.0]],)),
        (logits_process.SuppressTokensAtBeginLogitsProcessor, ([3], 6)),
    )
}


def test_all_row_wise_processors_are_built_here() -> None:
    assert set(BUILT) == {kind.__name__ for kind in ROW_FUNCTIONS} - {"PrefixConstrainedLogitsProcessor"}


@pytest.mark.parametrize("name", BUILT)
def test_row_wise_processor_gives_a_row_what_it_gives_it_in_a_batch(name: str) -> None:
    scores = torch.randn(3, 16)
    whole = BUILT[name](ids, scores.clone())
    rows = [BUILT[name](ids[row : row + 1], scores[row : row + 1].clone()) for row in range(3)]
    torch.testing.assert_close(torch.cat(rows), whole)


@pytest.mark.parametrize("kind", PREFIX_FREE, ids=lambda kind: kind.__name__)
def test_prefix_free_processor_ignores_the_ids(kind: type[LogitsProcessor]) -> None:
    scores = torch.randn(3, 16)
    processor = BUILT[kind.__name__]
    assert torch.equal(processor(None, scores.clone()), processor(ids, scores.clone()))


def test_penalty_carries_a_tensor_with_one_entry_a_row() -> None:
    prompts, mask = left_padded(3)
    got: dict[str, Any] = {}

    def loop(model: Any, input_ids: torch.Tensor, logits_processor: Any, **prepared: Any) -> torch.Tensor:
        got["processor"] = next(one for one in logits_processor if isinstance(one, RepetitionPenaltyLogitsProcessor))
        return input_ids

    settings = {"attention_mask": mask, "repetition_penalty": 1.2, "max_new_tokens": 2}
    tiny_model("llama").generate(prompts, custom_generate=loop, **settings)
    processor = got["processor"]
    assert processor.prompt_ignore_length.tolist() == [0, 3, 6]  # its pads are not penalised
    with pytest.raises((ValueError, RuntimeError, IndexError)):
        processor(prompts[:1], torch.randn(1, 48))  # why a row needs a slice of it


def test_prefix_constraint_is_told_its_row_by_place() -> None:
    seen: list[int] = []

    def allowed(batch_id: int, sent: torch.Tensor) -> list[int]:
        seen.append(batch_id)
        return [1]

    processor = PrefixConstrainedLogitsProcessor(allowed, num_beams=1)
    processor(ids, torch.randn(3, 16))
    assert seen == [0, 1, 2]
    processor(ids[2:], torch.randn(1, 16))
    assert seen[-1] == 0  # why a row needs its own
    assert processor._prefix_allowed_tokens_fn is allowed


def test_criteria_of_the_library() -> None:
    known = {"StoppingCriteria", "MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria", "EosTokenCriteria"}
    assert set(defined(stopping_criteria, StoppingCriteria)) == known | {"ConfidenceCriteria"}
    assert MaxLengthCriteria(7).max_length == 7
    end = EosTokenCriteria(eos_token_id=[3, 5])
    assert end.eos_token_id.tolist() == [3, 5]
    assert end(ids, None).tolist() == [True, False, False]  # the last token alone is looked at
