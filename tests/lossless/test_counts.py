"""Speculating, not pretending: how many target forwards a call takes and how many tokens it feeds, by a hook."""

import pytest
import torch
from transformers import DynamicCache

from spechead import Proposal, SpeculativeConfig, enable_speculation
from tests import tiny
from tests.running import ForwardCount
from tests.tiny_heads import make_head


def generate(model, ids, method, depth, new=40, **kwargs):
    config = SpeculativeConfig(method=method, num_draft_tokens=depth)
    kwargs.setdefault("attention_mask", torch.ones_like(ids))  # texts may hold the pad's id
    return model.generate(
        ids, max_new_tokens=new, do_sample=False, speculative=config, return_dict_in_generate=True, **kwargs
    )


def enabled(family="llama", seed=0):
    """A target with a copy of itself (or, by another seed, a stranger) as draft, its probe over."""
    return enable_speculation(tiny.fresh_model(family), draft_model=tiny.fresh_model(family, seed=seed))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_copy_as_draft_gives_40_tokens_in_five_forwards_after_the_prompts(family):
    """The first token comes of the prompt; 39 more take ceil(39 / 9) = 5 forwards of a root and 8 drafted tokens."""
    model, ids = enabled(family), tiny.prompt_ids(1, 10)
    with ForwardCount(model) as count:
        out = generate(model, ids, "draft_model", 8)
    assert out.sequences.shape[1] == 50
    assert count.forwards - 1 == out.stats.target_forwards == 5
    assert count.fed == 10 + out.stats.nodes_fed
    assert count.shapes == [(1, 10), (1, 9), (1, 9), (1, 9), (1, 9), (1, 3)]  # the last as short as what is left
    assert out.stats.acceptance_length == pytest.approx(39 / 5)
    assert out.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("period", [3, 5, 11])
def test_a_cycle_is_looked_up_in_24_tokens_by_four_forwards(period):
    """One token comes of the prompt; 23 more take ceil(23 / 6) = 4 forwards of a root and 5 copied tokens."""
    model = enable_speculation(tiny.table_model([*[(i + 1) % period for i in range(period)], *range(period, 16)]))
    ids = torch.tensor([[*range(period), *range(period)]])
    with ForwardCount(model) as count:
        out = generate(model, ids, "prompt_lookup", 5, new=24)
    assert out.sequences[0].tolist() == [i % period for i in range(2 * period + 24)]
    assert count.forwards - 1 == out.stats.target_forwards == 4
    assert out.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("method", ["prompt_lookup", "draft_model"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_batch_takes_as_many_forwards_as_its_slowest_row_alone(family, method):
    model = enabled(family, seed=1)
    ids, mask = tiny.left_padded(4, 18)
    alone = []
    for row in range(4):
        pads = int((1 - mask[row]).sum())
        alone.append(generate(model, ids[row : row + 1, pads:], method, 4, new=20).stats.steps)
    with ForwardCount(model) as count:
        out = generate(model, ids, method, 4, new=20, attention_mask=mask)
    assert out.stats.steps == count.forwards - 1 == max(alone)
    assert [len(steps) for steps in out.stats.emitted_per_step] == alone
    assert method != "prompt_lookup" or len(set(alone)) > 1  # the rows do not run alike


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_what_is_fed_is_the_prompt_and_the_nodes_past_the_window_too(family, batch):
    model, ids = enabled(family, seed=1), tiny.prompt_ids(batch, 20)
    with ForwardCount(model) as count:
        out = generate(model, ids, "draft_model", 4, new=20)
    assert count.fed == batch * 20 + out.stats.nodes_fed
    assert out.stats.prompt_fed == batch * 20
    # A row's nodes are one root a step and what was drafted for it; a batch is padded to its longest row.
    assert out.stats.nodes_fed >= out.stats.row_steps + out.stats.drafted_tokens
    assert batch > 1 or out.stats.nodes_fed == out.stats.row_steps + out.stats.drafted_tokens


@pytest.mark.parametrize("method", ["prompt_lookup", "draft_model"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_second_turn_feeds_only_what_is_new(family, method):
    """The first turn's cache lacks the last token alone; the second turn feeds that, the new text, and nodes."""
    model = enabled(family)
    first = generate(model, tiny.prompt_ids(1, 12), method, 4, new=15)
    assert first.cache.get_seq_length() == 12 + 15 - 1
    second_prompt = torch.cat([first.sequences, tiny.prompt_ids(1, 7, seed=9)], dim=1)
    mask = torch.ones_like(second_prompt)
    plain = model.generate(second_prompt, attention_mask=mask, max_new_tokens=15, do_sample=False)
    with ForwardCount(model) as count:
        second = generate(model, second_prompt, method, 4, new=15, cache=first.cache)
    assert torch.equal(second.sequences, plain)
    assert count.shapes[0] == (1, 8)
    assert second.stats.prompt_fed == 8
    assert count.fed == 8 + second.stats.nodes_fed
    assert second.cache is first.cache
    assert second.cache.get_seq_length() == second.sequences.shape[1] - 1
    assert method != "draft_model" or second.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_a_turn_may_start_from_the_librarys_own_cache(family):
    model, ids = enabled(family), tiny.prompt_ids(1, 30)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :25], cache=cache)
    with ForwardCount(model) as count:
        out = generate(model, ids, "draft_model", 4, new=20, cache=cache)
    assert torch.equal(out.sequences, model.generate(ids, max_new_tokens=20, do_sample=False))
    assert count.fed == 5 + out.stats.nodes_fed


def test_a_proposer_that_never_drafts_takes_a_forward_a_token():
    class Nothing:
        taps = ()

        def propose(self, context):
            return Proposal.root_only(context.root)

    model = enabled()
    with ForwardCount(model) as count:
        out = model.generate(
            tiny.prompt_ids(1, 6), max_new_tokens=20, speculative=Nothing(), return_dict_in_generate=True
        )
    assert count.forwards == 20
    assert count.fed == 6 + 19
    assert out.stats.acceptance_length == 1.0


@pytest.mark.parametrize("new", range(1, 7))
def test_few_new_tokens_take_no_more_forwards_than_they_need(new):
    model = enabled()
    with ForwardCount(model) as count:
        out = generate(model, tiny.prompt_ids(1, 6), "draft_model", 4, new=new)
    assert out.sequences.shape[1] == 6 + new
    assert count.forwards == 1 + -(-(new - 1) // 5)
    assert count.fed == 6 + max(new - 1, 0)  # no node is fed that could not be kept


def samples(model, ids, method, mask=None, count=3, **settings):
    """Several samples of each prompt by one seed, each row's draws its own."""
    torch.manual_seed(0)
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(
        ids,
        attention_mask=mask,
        num_return_sequences=count,
        do_sample=True,
        max_new_tokens=20,
        speculative=SpeculativeConfig(method=method, num_draft_tokens=4),
        return_dict_in_generate=True,
        **settings,
    )


@pytest.mark.parametrize("method", ["prompt_lookup", "draft_model"])
@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("padded", [False, True])
def test_several_samples_of_a_prompt_feed_it_once(method, chunk, padded):
    model = enabled()
    ids, mask = tiny.left_padded(2, 12) if padded else (tiny.prompt_ids(2, 12), torch.ones(2, 12, dtype=torch.long))
    settings = {"prefill_chunk_size": chunk} if chunk else {}
    with ForwardCount(model) as count:
        out = samples(model, ids, method, mask, top_k=1, **settings)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    assert out.sequences.tolist() == expected.repeat_interleave(3, dim=0).tolist()
    assert out.stats.prompt_fed == 2 * 12
    assert count.fed == 2 * 12 + out.stats.nodes_fed
    assert out.stats.acceptance_length > 1.5 or method == "prompt_lookup"


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa"])
def test_heads_take_the_features_of_a_prompt_that_was_fed_once(kind):
    model = tiny.fresh_model("llama")
    model = enable_speculation(model, head=make_head(kind, model))
    method = "medusa" if kind == "medusa" else "eagle"
    ids = tiny.prompt_ids(2, 12)
    alone = [samples(model, ids[row : row + 1], method, count=1, top_k=1) for row in range(2)]
    out = samples(model, ids, method, count=2, top_k=1)
    assert out.stats.prompt_fed == 2 * 12
    assert out.stats.drafted_tokens > 0
    for row in range(4):
        assert out.sequences[row].tolist() == alone[row // 2].sequences[0].tolist()
        assert out.stats.emitted_per_step[row] == alone[row // 2].stats.emitted_per_step[0]


def test_samples_of_one_prompt_differ():
    out = samples(enabled(), tiny.prompt_ids(1, 12), "draft_model", count=8)
    assert len({tuple(row) for row in out.sequences.tolist()}) > 1
    assert out.stats.prompt_fed == 12
