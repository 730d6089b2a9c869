"""The paired comparison: what is run in which order, what is counted, what the figures are made of."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from spechead import SpeculativeConfig, enable_speculation
from spechead.bench import measure
from spechead.bench.differences import Judge, first_difference
from spechead.bench.figures import interval, mean_by_place, paired_ratios, summarise
from spechead.bench.measure import Method, cut, pad_left, run_once, twin
from spechead.bench.plots import acceptance_by_position
from spechead.bench.prompts import Prompt
from spechead.bench.results import Difference, Load, Record
from spechead.bench.timing import MEAN, batched, compare
from spechead.cli.tables import costs
from spechead.mixin import SpeculativeGenerationMixin
from tests.tiny import fresh_model, table_model
from tests.tiny_tokenizer import tiny_tokenizer

CYCLE = [*range(1, 48), 4]  # the greedy answer counts up and starts over, so prompt lookup can match


def prompt(name: str, words: str, group: str = "chat", *follow_ups: str) -> Prompt:
    return Prompt(name, group, ({"role": "user", "content": words},), follow_ups)


@pytest.fixture
def target() -> Any:
    return table_model([0, 1, 2, 3, 5, 6, 7, 4, *range(9, 48), 8])


def lookup(target: Any, tokens: int = 4) -> Method:
    config = SpeculativeConfig(method="prompt_lookup", num_draft_tokens=tokens)
    return Method("prompt_lookup", enable_speculation(twin(target)), {"speculative": config})


class TestTwin:
    def test_it_shares_every_weight_and_leaves_the_first_instance_untouched(self) -> None:
        model = fresh_model("llama")
        before, kind = dict(model.__dict__), type(model)
        other = enable_speculation(twin(model))
        assert all(mine is theirs for mine, theirs in zip(model.parameters(), other.parameters(), strict=True))
        assert type(model) is kind
        assert not isinstance(model, SpeculativeGenerationMixin)
        assert isinstance(other, SpeculativeGenerationMixin)
        assert model.__dict__.keys() == before.keys()

    def test_moving_one_moves_both(self) -> None:
        model = fresh_model("llama")
        other = twin(model)
        model.to(torch.float64)
        assert {parameter.dtype for parameter in other.parameters()} == {torch.float64}


class TestRunOnce:
    def test_tokens_are_counted_from_ids(self, target: Any) -> None:
        timed = run_once(Method("plain", target), [[4, 5, 6]], Load(9), 0)
        assert timed.tokens == [[7, 4, 5, 6, 7, 4, 5, 6, 7]]
        assert timed.stats is None
        assert 0 < timed.seconds_to_first_token < timed.seconds

    def test_an_end_token_counts_and_what_follows_does_not(self, target: Any) -> None:
        target.generation_config.eos_token_id = [6]
        timed = run_once(Method("plain", target), [[4], [6, 7]], Load(8), 0)
        assert timed.tokens == [[5, 6], [4, 5, 6]]

    def test_speculation_brings_its_own_figures(self, target: Any) -> None:
        timed = run_once(lookup(target), [[4, 5, 6, 7, 4, 5]], Load(11), 0)
        assert timed.tokens == [[6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4]]
        assert (timed.stats.steps, timed.stats.emitted_tokens) == (2, 10)

    def test_transformers_own_lookup_is_counted_from_outside(self, target: Any) -> None:
        own = Method("transformers_lookup", target, {"prompt_lookup_num_tokens": 4})
        timed = run_once(own, [[4, 5, 6, 7, 4, 5]], Load(15), 0)
        assert len(timed.tokens[0]) == 15
        assert timed.stats.emitted_per_step == [[(5, 4), (5, 4)]]
        assert (timed.stats.steps, timed.stats.drafted_tokens, timed.stats.kept_tokens) == (2, 8, 8)
        assert timed.stats.acceptance_length == 5
        assert timed.stats.acceptance_rate == 1
        assert timed.stats.first_tokens == 5, "its first forward drafts too, so its first step begins at 5"
        assert not target._forward_pre_hooks

    def test_transformers_rejected_drafts_lower_the_rate(self) -> None:
        target = table_model([0, 1, 2, 3, 5, 6, 7, 8, *range(9, 48), 47])
        own = Method("transformers_lookup", target, {"prompt_lookup_num_tokens": 2})
        timed = run_once(own, [[4, 5, 9, 9, 4, 5, 4]], Load(6), 0)
        assert timed.tokens == [[5, 6, 7, 8, 9, 10]]
        assert timed.stats.acceptance_rate < 1
        assert timed.stats.emitted_tokens < 6

    def test_sampling_draws_from_the_whole_law_and_repeats_by_seed(self) -> None:
        method = Method("plain", fresh_model("llama"))
        load = Load(12, temperature=1.5)
        first = run_once(method, [[4, 5]], load, 3)
        assert run_once(method, [[4, 5]], load, 3).tokens == first.tokens
        assert run_once(method, [[4, 5]], load, 4).tokens != first.tokens
        assert measure.sampling_arguments(1.5)["top_k"] == 0

    def test_a_prompt_beyond_the_targets_positions_is_refused(self, target: Any) -> None:
        with pytest.raises(ValueError, match=r"300 tokens and 8 new ones exceed the target's 256 positions"):
            run_once(Method("plain", target), [[4] * 300], Load(8), 0)

    def test_padding_is_on_the_left(self, target: Any) -> None:
        inputs = pad_left(target, [[4, 5, 6], [7]], 1)
        assert inputs["input_ids"].tolist() == [[4, 5, 6], [0, 0, 7]]
        assert inputs["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]

    def test_cut_keeps_the_end_token(self) -> None:
        assert cut([4, 3, 0, 0], {3}) == [4, 3]
        assert cut([4, 5], {3}) == [4, 5]


class Recorder:
    """Methods whose `generate` is replaced: they note their calls and answer with given tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> None:
        self.calls: list[tuple[str, list[list[int]], int]] = []
        self.methods = [Method(name, None) for name in seconds]

        def fake(method: Method, rows: Any, load: Load, seed: int) -> measure.Timed:
            self.calls.append((method.name, [list(row) for row in rows], load.max_new_tokens))
            return measure.Timed([[5] * 4 for _ in rows], seconds[method.name], 0.1, None)

        monkeypatch.setattr("spechead.bench.timing.run_once", fake)


class TestCompare:
    def run(self, methods: list[Method], prompts: list[Prompt], load: Load, **kwargs: Any) -> list[list[Record]]:
        reported: list[list[Record]] = []
        compare(methods, prompts, load, tiny_tokenizer(), lambda records, _: reported.append(records), **kwargs)
        return reported

    def test_the_order_rotates_and_the_warm_up_is_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        recorder = Recorder(monkeypatch, {"plain": 2.0, "a": 1.0, "b": 4.0})
        prompts = [prompt(str(number), f"w{number + 5}") for number in range(4)]
        reported = self.run(recorder.methods, prompts, Load(20))
        warm, timed = recorder.calls[:3], recorder.calls[3:]
        assert [(name, tokens) for name, _, tokens in warm] == [("plain", 8), ("a", 8), ("b", 8)]
        order = [name for name, _, _ in timed]
        assert order == ["plain", "a", "b", "a", "b", "plain", "b", "plain", "a", "plain", "a", "b"]
        assert [[record.method for record in records] for records in reported] == [["plain", "a", "b"]] * 4
        assert {record.new_tokens for records in reported for record in records} == {4}

    def test_repeats_rotate_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        recorder = Recorder(monkeypatch, {"plain": 1.0, "a": 1.0})
        (records,) = self.run(recorder.methods, [prompt("x", "w5")], Load(20, repeats=3))
        assert [name for name, _, _ in recorder.calls[2:]] == ["plain", "a", "a", "plain", "plain", "a"]
        assert [(record.method, record.repeat) for record in records] == [
            (name, repeat) for repeat in range(3) for name in ("plain", "a")
        ]

    def test_a_follow_up_comes_after_plains_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        recorder = Recorder(monkeypatch, {"plain": 1.0, "a": 1.0})
        (records,) = self.run(recorder.methods, [prompt("x", "w6", "chat", "w7")], Load(20))
        assert [record.prompts for record in records] == [["x"], ["x"], ["x/2"], ["x/2"]]
        assert {tuple(rows[0]) for _, rows, _ in recorder.calls[4:]} == {(1, 6, 2, 5, 5, 5, 5, 1, 7, 2)}

    def test_measured_batches_are_skipped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        recorder = Recorder(monkeypatch, {"plain": 1.0})
        skip: Callable[[list[str]], bool] = lambda ids: ids == ["x"]  # noqa: E731  # one line in a test
        (records,) = self.run(recorder.methods, [prompt("x", "w5"), prompt("y", "w5")], Load(8), skip=skip)
        assert records[0].prompts == ["y"]

    @pytest.mark.parametrize("names", [["a", "plain"], ["plain", "a", "a"], []])
    def test_plain_comes_first_and_names_differ(self, names: list[str]) -> None:
        with pytest.raises(ValueError, match="'plain' first"):
            self.run([Method(name, None) for name in names], [prompt("x", "w5")], Load(8))

    def test_the_real_thing(self, target: Any) -> None:
        own = Method("transformers_lookup", target, {"prompt_lookup_num_tokens": 4})
        methods = [Method("plain", target), lookup(target), own]
        reported = self.run(
            methods, [prompt("x", "w4 w5 w6 w7 w4"), prompt("y", "w8", "code")], Load(24), judge=Judge(target)
        )
        records = [record for records in reported for record in records]
        assert all(record.new_tokens == 24 for record in records)
        assert [record.differences for record in records] == [None, [], []] * 2
        cells = {(cell.group, cell.method): cell for cell in summarise(records, [m.name for m in methods], [Load(24)])}
        assert set(cells) == {(group, method.name) for group in ("chat", "code", MEAN) for method in methods}
        assert cells["chat", "prompt_lookup"].acceptance_length > 3
        assert cells["chat", "prompt_lookup"].identical == 1
        assert cells["chat", "plain"].ratio == 1
        assert cells["chat", "plain"].identical is None

    def test_batches_hold_one_group_and_as_many_turns(self) -> None:
        prompts = [
            prompt("a", "w5"),
            prompt("b", "w5", "code"),
            prompt("c", "w5"),
            prompt("d", "w5", "chat", "w6"),
            prompt("e", "w5"),
        ]
        assert [[p.id for p in batch] for batch in batched(prompts, 2)] == [
            ["a", "c"],
            ["e", "a"],
            ["b", "b"],
            ["d", "d"],
        ]


def record(method: str, name: str, seconds: float, group: str = "chat", repeat: int = 0, **changes: Any) -> Record:
    values: dict[str, Any] = {"load": 0, "method": method, "prompts": [name], "group": group, "repeat": repeat}
    return Record(**{**values, "seconds": seconds, "seconds_to_first_token": 0.1, "new_tokens": 10, **changes})


class TestFigures:
    def test_ratios_pair_within_prompt_and_repeat(self) -> None:
        records = [record("plain", "x", 2.0), record("a", "x", 1.0), record("plain", "y", 9.0), record("a", "y", 3.0)]
        records += [record("plain", "x", 4.0, repeat=1), record("a", "x", 1.0, repeat=1)]
        assert paired_ratios(records, "chat", "a") == [3.0, 3.0]  # x: the median of 2 and 4

    def test_the_interval_holds_the_median_and_narrows_to_a_point(self) -> None:
        low, high = interval([[1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6]])
        assert 1.0 <= low < 1.3 < high <= 1.6
        assert interval([[1.5, 1.5, 1.5]]) == (1.5, 1.5)
        assert interval([[1.0] * 3, [2.0] * 3]) == (1.5, 1.5)

    def test_two_prompts_make_no_interval(self) -> None:
        assert interval([[1.0, 1.1, 1.2], [1.5, 1.5]]) == (None, None)

    def test_the_mean_is_over_groups_not_prompts(self) -> None:
        records = []
        for name, group, seconds in (("x", "chat", 1.0), ("y", "chat", 1.0), ("z", "code", 4.0)):
            records += [record("plain", name, 2.0, group), record("a", name, seconds, group)]
        cells = {(cell.group, cell.method): cell for cell in summarise(records, ["plain", "a"], [Load(10)])}
        assert cells["chat", "a"].ratio == 2.0
        assert cells["code", "a"].ratio == 0.5
        assert cells[MEAN, "a"].ratio == 1.25

    def test_acceptance_is_pooled_over_steps_not_averaged_over_calls(self) -> None:
        def stats(emitted: int, steps: int, tried: list[int], kept: list[int], places: list[Any]) -> dict[str, Any]:
            counts = {"emitted_tokens": emitted, "row_steps": steps, "tried_by_depth": tried, "kept_by_depth": kept}
            spans = {"seconds_drafting": 1.0, "seconds_verifying": 2.0, "seconds_other": 1.0}
            return {**counts, **spans, "lossy": False, "by_position": places}

        calls = [stats(10, 2, [2, 2], [2, 1], [(2, 10)]), stats(8, 8, [8], [0], [[6, 6], [2, 2]])]
        records = [record("plain", "x", 1.0), record("plain", "y", 1.0)]
        records += [record("a", name, 1.0, stats=each, differences=[]) for name, each in zip("xy", calls, strict=True)]
        cell = summarise(records, ["plain", "a"], [Load(10)])[1]
        assert cell.acceptance_length == 1.8
        assert cell.acceptance_rate == 0.25
        assert cell.acceptance_rate_by_depth == [0.2, 0.5]
        assert cell.acceptance_length_by_position == [2.0, 1.0]  # (10 + 6) / (2 + 6) tokens a step, then 2 / 2
        assert (cell.drafting, cell.verifying, cell.other) == (0.25, 0.5, 0.25)

    def test_differences_are_counted_by_verdict(self) -> None:
        tie, bug = Difference(1, 4, 5, 0.1, 0.2, "tie"), Difference(1, 4, 5, 3.0, 0.2, "bug")
        records = [record("plain", name, 1.0) for name in "xyz"]
        found = {"x": [tie], "y": [bug], "z": []}
        records += [record("a", name, 1.0, differences=each) for name, each in found.items()]
        cell = summarise(records, ["plain", "a"], [Load(10)])[1]
        assert (cell.identical, cell.ties, cell.bugs) == (pytest.approx(1 / 3), 1, 1)

    def test_sampled_loads_compare_no_tokens(self) -> None:
        records = [record("plain", "x", 1.0), record("a", "x", 1.0)]
        assert summarise(records, ["plain", "a"], [Load(10, temperature=1.0)])[1].identical is None


class TestDifferences:
    def test_the_first_place(self) -> None:
        assert first_difference([4, 5, 6], [4, 5, 6]) is None
        assert first_difference([4, 5, 6], [4, 9, 6]) == Difference(1, 5, 9)
        assert first_difference([4, 5], [4, 5, 6]) == Difference(2, None, 6)

    def test_a_tie_is_within_rounding_and_a_bug_is_not(self, target: Any) -> None:
        judge = Judge(target)
        with torch.no_grad():
            target.lm_head.weight[20, 4] = 1.000005  # after 4 token 20 ties with 5
        tie = judge.judge(Difference(0, 5, 20), [4], [5])
        assert (tie.verdict, tie.tolerance) == ("tie", 1e-4)
        assert 0 < tie.gap < 1e-4
        bug = judge.judge(Difference(0, 5, 30), [4], [5])
        assert bug.verdict == "bug"
        assert bug.gap > 0.5
        assert judge.judge(Difference(1, None, 6), [4], [5]).verdict == "bug"

    def test_bfloat16_is_judged_by_a_float32_copy_and_wider(self, target: Any) -> None:
        judge = Judge(target.to(torch.bfloat16))
        assert judge.reference.dtype == torch.float32
        assert target.dtype == torch.bfloat16
        verdict = judge.judge(Difference(0, 5, 30), [4], [5])
        assert verdict.verdict == "bug"
        assert verdict.tolerance > 1e-3


def test_a_part_of_an_answer_in_which_no_step_began_has_no_acceptance_length() -> None:
    model = enable_speculation(table_model([1] * 8))
    method = Method("prompt_lookup", model, {"speculative": SpeculativeConfig("prompt_lookup", num_draft_tokens=64)})
    stats = run_once(method, [[1] * 70], Load(150), 0).stats.to_dict()
    assert stats["by_position"] == [(1, 65), (0, 0), (1, 65), (0, 0), (1, 19)]
    records = [record("plain", "x", 1.0), record("prompt_lookup", "x", 1.0, stats=stats)]
    cell = summarise(records, ["plain", "prompt_lookup"], [Load(150)])[1]
    assert cell.acceptance_length_by_position == [65.0, None, 65.0, None, 19.0]
    assert mean_by_place([cell.acceptance_length_by_position, [3.0, 2.0]]) == [34.0, 2.0, 65.0, None, 19.0]
    shown = Console(record=True, width=200)
    shown.print(costs([replace(cell, group="x")], {}))
    assert "65.00 - 65.00 - 19.00" in shown.export_text()
    assert acceptance_by_position([cell], {cell.method: "C0"}) is not None
