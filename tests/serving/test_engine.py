"""spechead.serving.engine: rows of many requests in one batch, each as it would be alone, whatever others do."""

import gc
import itertools
import threading
from contextlib import contextmanager

import pytest
import torch

from spechead import SpeculativeConfig
from spechead.attach import Speculation
from spechead.proposers.base import BaseProposer
from spechead.serving.engine import Engine
from spechead.serving.errors import ApiError
from spechead.serving.limits import Limits, bytes_a_slot
from spechead.serving.ticket import Finish, Piece, Sampling, Ticket
from spechead.target import Target
from tests.running import ForwardCount, plain_greedy
from tests.serving.loopback import VOCAB, byte_model, byte_tokenizer, slowed, speculating, wait_for
from tests.tiny_heads import make_head

GREEDY = Sampling(temperature=0.0)
PROMPTS = [f"{word} prompt number {i}".encode() for i, word in enumerate(("one", "another", "a third", "the last"))]


@pytest.fixture(scope="module")
def model():
    target = speculating(byte_model(ends=False))
    Speculation.of(target).heads = [make_head("eagle3", target, std=0.1)]
    return target


class Heard:
    """A ticket's events."""

    def __init__(self, prompt, max_tokens=20, **settings):
        self.events, self.ended = [], threading.Event()
        settings.setdefault("sampling", GREEDY)
        self.ticket = Ticket(list(prompt), max_tokens, self.hear, **settings)

    def hear(self, event):
        self.events.append(event)
        if isinstance(event, (Finish, ApiError)):
            self.ended.set()

    def wait(self):
        assert self.ended.wait(30)
        return self

    @property
    def text(self):
        return "".join(event.text for event in self.events if isinstance(event, Piece))

    @property
    def end(self):
        return self.events[-1]


@contextmanager
def running(model, speculative="auto", **limits):
    engine = Engine(model, byte_tokenizer(), speculative, Limits(**({"max_rows": 4, "max_length": 512} | limits)))
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def hooked(model, hook):
    handle = model.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def ask(engine, *heard):
    engine.submit([one.ticket for one in heard])
    return heard


def expected(model, prompt, max_tokens=20):
    return byte_tokenizer().decode(plain_greedy(model, list(prompt), max_tokens))


@pytest.mark.parametrize("method", ["off", "auto", "prompt_lookup", "draft_model", "eagle"])
def test_rows_that_join_and_leave_write_what_plain_generation_writes(model, method):
    lengths = (40, 7, 25, 1)
    with running(model, method, max_rows=3) as engine:
        heard = [Heard(prompt, n) for prompt, n in zip(PROMPTS, lengths, strict=True)]
        ask(engine, heard[0])
        wait_for(lambda: heard[0].events)
        ask(engine, *heard[1:])
        for one, prompt, n in zip(heard, PROMPTS, lengths, strict=True):
            assert one.wait().text == expected(model, prompt, n)
            assert one.end == Finish("length")
            assert one.ticket.emitted == n
        wait_for(lambda: engine.context is None)
        assert engine.stats.emitted_tokens == sum(lengths) - 4  # the prompt's own tokens are no step's
        assert engine.stats.prefill_forwards == 4
        assert (engine.stats.drafted_tokens > 0) == (method != "off")
        assert engine.stats.emitted_per_step == []


def test_one_target_forward_a_step_serves_all_rows(model):
    with running(model, "draft_model") as engine, ForwardCount(Speculation.of(model).target.model) as count:
        heard = ask(engine, *(Heard(prompt, 60) for prompt in PROMPTS))
        for one in heard:
            one.wait()
        wait_for(lambda: engine.context is None)
        stats = engine.stats
        assert count.forwards == stats.steps + stats.prefill_forwards
        assert max(rows for rows, _ in count.shapes) == 4
        assert stats.row_steps > 2 * stats.steps


def test_a_prompt_is_fed_between_steps_so_that_running_rows_keep_moving(model):
    """While eight long prompts join, no two of them are fed without a step of the running row between."""
    with running(model, "off", max_rows=9, prefill_tokens=16) as engine:
        target = Speculation.of(model).target.model
        with ForwardCount(target) as count:
            (first,) = ask(engine, Heard(PROMPTS[0], 200))
            wait_for(lambda: len(first.events) > 2)
            others = ask(engine, *(Heard(b"x" * 60, 2) for _ in range(8)))
            for one in (first, *others):
                one.wait()
        fed = [width >= 60 for _, width in count.shapes]
        assert sum(fed) == 8
        assert not any(a and b for a, b in itertools.pairwise(fed))


def test_waiting_rows_come_in_order(model):
    order = []
    with running(model, "off", max_rows=1) as engine:
        heard = [Heard(prompt, 5) for prompt in (*PROMPTS, *PROMPTS)]
        for place, one in enumerate(heard):
            plain = one.ticket.deliver

            def deliver(event, place=place, plain=plain):
                order.append(place)
                plain(event)

            one.ticket.deliver = deliver
            ask(engine, one)
        for one in heard:
            one.wait()
    assert order == sorted(order)


def test_the_queue_has_a_limit_and_says_when_to_come_back(model):
    with running(model, "off", max_rows=1, max_queue=2) as engine:
        heard = [Heard(PROMPTS[0], 400), Heard(PROMPTS[1], 2), Heard(PROMPTS[2], 2)]
        with slowed(engine.target.model):
            ask(engine, *heard)
            wait_for(lambda: engine.running == 1 and engine.waiting == 2)
            with pytest.raises(ApiError, match="2 choices wait and 0 more can be taken, not 1") as refused:
                ask(engine, Heard(PROMPTS[3]))
        assert refused.value.status == 429
        assert 1 <= int(refused.value.headers["Retry-After"]) <= 60
        engine.cancel([heard[0].ticket])
        for one in heard[1:]:
            one.wait()
        ask(engine, Heard(PROMPTS[3], 2))[0].wait()


def test_a_cancelled_row_leaves_and_the_others_do_not_notice(model):
    with running(model) as engine:
        gone, stays = ask(engine, Heard(PROMPTS[0], 400), Heard(PROMPTS[1], 60))
        wait_for(lambda: len(gone.events) > 3)
        engine.cancel([gone.ticket])
        assert stays.wait().text == expected(model, PROMPTS[1], 60)
        wait_for(lambda: engine.context is None)
        assert not gone.ended.is_set()
        assert gone.ticket.emitted < 400
        assert 'finished_reason="abort",model_name="spechead"} 1.0' in engine.metrics.text().decode()


def test_a_listener_that_is_gone_cancels_its_row(model):
    with running(model) as engine:
        gone = Heard(PROMPTS[0], 400)

        def deliver(event):
            raise RuntimeError("the loop is closed")

        gone.ticket.deliver = deliver
        ask(engine, gone)
        wait_for(lambda: engine.context is None and gone.ticket.emitted > 0)
        assert gone.ticket.emitted < 20


def test_late_rows_end_with_an_error_also_in_the_queue(model):
    with running(model, "off", max_rows=1, timeout=0.2) as engine:
        slow, queued = ask(engine, Heard(PROMPTS[0], 480), Heard(PROMPTS[1], 480))
        with slowed(engine.target.model):
            for one in (slow, queued):
                assert one.wait().end.status == 504
        assert "0.2 seconds" in slow.end.message
        wait_for(lambda: engine.context is None)


def test_a_prompt_that_fails_takes_nobody_with_it(model, monkeypatch):
    fed = Target.prefill

    def prefill(self, input_ids, *args, **kwargs):
        if bool((input_ids == 33).any()):
            raise RuntimeError("/secret/path broke")
        return fed(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(Target, "prefill", prefill)
    with running(model) as engine:
        good, bad = ask(engine, Heard(PROMPTS[0], 60), Heard(b"fails!", 60))
        assert bad.wait().end.status == 500
        assert "secret" not in bad.end.message
        assert good.wait().text == expected(model, PROMPTS[0], 60)


def test_a_step_that_fails_ends_its_rows_and_the_server_goes_on(model, monkeypatch):
    with running(model, "off") as engine:
        propose = BaseProposer.propose
        calls = []

        def fails(self, context):
            calls.append(1)
            if len(calls) == 5:
                raise RuntimeError("no memory")
            return propose(self, context)

        monkeypatch.setattr(BaseProposer, "propose", fails)
        for one in ask(engine, Heard(PROMPTS[0], 60), Heard(PROMPTS[1], 60)):
            assert one.wait().end.status == 500
        (after,) = ask(engine, Heard(PROMPTS[2], 20))
        assert after.wait().text == expected(model, PROMPTS[2])
        assert engine.alive


def test_closing_finishes_what_runs_and_waits_and_refuses_more(model):
    with running(model, max_rows=1) as engine:
        heard = ask(engine, *(Heard(prompt, 30) for prompt in PROMPTS))
        engine.close()
        for one, prompt in zip(heard, PROMPTS, strict=True):
            assert one.text == expected(model, prompt, 30)
        assert not engine.alive
        with pytest.raises(ApiError, match="shutting down"):
            ask(engine, Heard(PROMPTS[0]))


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_the_key_value_memory_stays_under_its_bound(model, method):
    with running(model, method, max_length=120) as engine:
        largest = 0

        def measure(*_):
            nonlocal largest
            context = engine.context
            caches = (
                []
                if context is None
                else [context.cache, *(s.cache for s in context.state.values() if hasattr(s, "cache"))]
            )
            largest = max(largest, sum(cache.nbytes() for cache in caches))

        with hooked(engine.target.model, measure):
            for one in ask(engine, *(Heard(b"m" * 20, 90) for _ in range(4))):
                one.wait()
        assert engine.kv_bytes / 4 < largest <= engine.kv_bytes
        assert bytes_a_slot(engine.target) == 2 * 2 * 2 * 8 * 4  # layers, K and V, heads, width, float32


def live_tensors():
    gc.collect()
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())


def test_nothing_of_a_request_stays(model):
    """Live tensors after 30 requests are those after 10."""
    with running(model) as engine:

        def ten():
            heard = [Heard(PROMPTS[i % 4], 3 + i, seed=i, sampling=Sampling(), top_logprobs=2) for i in range(10)]
            for one in ask(engine, *heard):
                one.wait()
            wait_for(lambda: engine.context is None)
            return live_tensors()

        before = ten()
        assert [ten(), ten()] == [before, before]


def test_a_long_lived_batch_keeps_no_rows_that_left(model):
    """One row runs on while many come and go: lists, ids and features hold the rows of now."""
    with running(model, "auto") as engine:
        (long,) = ask(engine, Heard(PROMPTS[0], 400))
        wait_for(lambda: engine.context is not None)
        context = engine.context
        for one in range(12):
            ask(engine, Heard(PROMPTS[one % 4], 8))[0].wait()
        assert engine.context is context
        wait_for(lambda: engine.running == 1)
        assert len(context.rows) == len(context.stats.emitted_per_step) == 1
        assert context.stats.steps == engine.stats.steps
        engine.cancel([long.ticket])


def test_auto_keeps_what_it_has_learnt_over_batches(model):
    with running(model) as engine:
        for _ in range(2):
            ask(engine, Heard(PROMPTS[0], 30))[0].wait()
            wait_for(lambda: engine.context is None)
            assert engine.ledger.step_clocks.samples > 0
        first = engine.ledger.step_clocks.samples
        ask(engine, Heard(PROMPTS[1], 30))[0].wait()
        wait_for(lambda: engine.context is None)
        assert engine.ledger.step_clocks.samples >= first


def test_what_cannot_be_served_is_refused_at_the_start(model):
    tokenizer = byte_tokenizer()
    with pytest.raises(ValueError, match="lossy"):
        Engine(model, tokenizer, SpeculativeConfig(method="eagle", acceptance="typical"))
    with pytest.raises(ValueError, match="speculative='best' must be one of"):
        Engine(model, tokenizer, "best")
    with pytest.raises(ValueError, match="max_length=2000 is beyond the target's 1024 positions"):
        Engine(model, tokenizer, "off", Limits(max_length=2000))
    with pytest.raises(ValueError, match="max_rows=0 admits nothing"):
        Limits(max_rows=0)


def test_logprobs_are_the_targets_processed_law(model):
    """Against the library's own processors on plain forwards, with a draft that is mostly accepted."""
    law = Sampling(temperature=0.7, top_k=20, repetition_penalty=1.2)
    with running(model, "draft_model") as engine:
        (one,) = ask(engine, Heard(PROMPTS[0], 16, sampling=law, seed=3, top_logprobs=3))
        entries = [entry for event in one.wait().events if isinstance(event, Piece) for entry in event.entries]
    assert len(entries) == 16
    ids = [*PROMPTS[0]]
    for entry in entries:
        given = torch.tensor([ids])
        with torch.no_grad():
            scores = model(input_ids=given).logits[0, -1]
        seen = scores[given[0]]
        scores[given[0]] = torch.where(seen < 0, seen * 1.2, seen / 1.2)
        scores = scores / 0.7
        scores[scores < scores.topk(20).values[-1]] = -torch.inf
        law_now = torch.log_softmax(scores, -1)
        assert entry.logprob == pytest.approx(float(law_now[entry.token]), abs=1e-4)
        assert [value for _, value in entry.top] == pytest.approx(law_now.topk(3).values.tolist(), abs=1e-4)
        ids.append(entry.token)
    assert max(ids) < VOCAB


def test_a_joining_prompt_is_fed_to_the_head_alone(model):
    """In the joined batch all rows would be as wide as the newcomer's prompt: entries fed stay near tokens fed."""
    fed = []
    head = Speculation.of(model).heads[0]
    handle = head.register_forward_pre_hook(lambda _, args: fed.append(args[0].numel()))
    try:
        with running(model, "eagle") as engine:
            running_rows = ask(engine, *(Heard(prompt, 120) for prompt in PROMPTS[:3]))
            wait_for(lambda: engine.running == 3)
            del fed[:]
            (late,) = ask(engine, Heard(b"w" * 300, 4))
            late.wait()
            engine.cancel([one.ticket for one in running_rows])
    finally:
        handle.remove()
    assert max(fed) < 2 * 300


def test_a_row_joins_a_batch_whose_head_has_drafted_and_one_that_has_not(model):
    """A cache that was never written to has no buffers: rows join it, and it joins others, all the same."""
    target = Speculation.of(model).target
    for first, second in ((True, False), (False, True)):
        caches = [target.new_cache(1, 8), target.new_cache(1, 8)]
        for cache, written in zip(caches, (first, second), strict=True):
            if written:
                target.prefill(torch.tensor([[1, 2, 3]]), None, cache)
        caches[0].add_rows(caches[1])
        assert caches[0].lengths.tolist() == [3 * first, 3 * second]
        assert caches[0].keys[0].shape[0] == 2
        assert bool(caches[0].keys[0][0].any()) == first
        assert bool(caches[0].keys[0][1].any()) == second
