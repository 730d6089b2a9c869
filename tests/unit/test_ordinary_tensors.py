"""Forwards run in inference mode, whose tensors cannot be written to or trained through: none of them may come out."""

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor

from spechead import Proposal, enable_speculation
from spechead.target import Target
from tests import tiny

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}


class WritesInPlace(LogitsProcessor):
    """Forbids a token by writing to the scores it is given."""

    def __call__(self, input_ids, scores):
        scores[:, 3] = -torch.inf
        scores.mul_(0.5)
        return scores


def tensors(value):
    """Yield every tensor in nested containers and caches."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, DynamicCache):
        yield from (tensor for layer in value.layers for tensor in (layer.keys, layer.values))
    elif isinstance(value, dict | list | tuple):
        yield from (
            tensor for part in (value.values() if isinstance(value, dict) else value) for tensor in tensors(part)
        )


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("draft", ["prompt_lookup", "draft_model"])
def test_all_that_a_call_returns_can_be_written_to(family, draft):
    model = tiny.fresh_model(family)
    model = enable_speculation(model, draft_model=tiny.fresh_model(family) if draft == "draft_model" else None)
    ids = tiny.prompt_ids(2, 10)
    cache = DynamicCache(config=model.config)
    wanted = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    out = model.generate(
        ids, speculative=draft, cache=cache, max_new_tokens=8, logits_processor=[WritesInPlace()], **wanted
    )
    assert out.stats.row_steps > 0
    found = [*tensors([out.sequences, out.scores, out.logits]), *tensors(cache)]
    assert len(found) > 16
    for tensor in found:
        assert not tensor.is_inference()
        tensor.zero_()


def test_a_first_forward_leaves_buffers_that_can_be_written_to():
    target = Target(tiny.fresh_model("llama"))
    cache = target.new_cache(2, 4)
    with torch.no_grad():
        target.forward(Proposal.root_only(torch.tensor([5, 6])), cache)
    for tensor in (*cache.keys.values(), *cache.values.values()):
        assert not tensor.is_inference()
        tensor.zero_()


def test_features_that_a_proposer_takes_can_be_written_to():
    class WritesToFeatures:
        taps, name, seen = (1,), "writes", 0

        def propose(self, context):
            for state in context.fresh[id(self)].take()[0].values():
                state.add_(1)
                self.seen += 1
            return Proposal.root_only(context.root)

    model, proposer = enable_speculation(tiny.fresh_model("llama")), WritesToFeatures()
    model.generate(tiny.prompt_ids(1, 12), speculative=proposer, max_new_tokens=6)
    assert proposer.seen > 4


@pytest.mark.parametrize("rope", [None, DYNAMIC])
def test_the_model_trains_right_after_a_call(rope):
    changed = {} if rope is None else {"rope_parameters": rope, "max_position_embeddings": 16}
    model = enable_speculation(tiny.build(tiny.tiny_config("llama", **changed)))
    ids = tiny.prompt_ids(1, 12)
    model.generate(ids, speculative="prompt_lookup", max_new_tokens=20)  # past the trained positions
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_inference_mode_of_the_callers_own_is_kept():
    model = enable_speculation(tiny.fresh_model("llama"))
    ids = tiny.prompt_ids(1, 12)
    plain = model.generate(ids, max_new_tokens=12)
    with torch.inference_mode():
        assert torch.equal(model.generate(ids, speculative="prompt_lookup", max_new_tokens=12), plain)
