"""Plans: against measured peaks, and the rules of advice."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, MixtralConfig

from scripts.check_plan import compare
from spechead import enable_speculation
from spechead.bench import footprint as footprint_module
from spechead.bench.advice import advise, draft_cost, expected, judge, table
from spechead.bench.footprint import Footprint, cached_bytes, footprint, head_footprint
from spechead.bench.measure import twin
from spechead.bench.memory import PeakMemory, parameter_bytes
from spechead.bench.plan import Draft, Workload, capacity, draft_model, eagle, lookup, plain, speculative
from spechead.cache import RaggedCache
from spechead.cli.plan import bytes_of
from spechead.target import Target
from tests import tiny
from tests.unit.heads.targets import make_head

GB = 1_000_000_000


def sizes(**changes: Any) -> Footprint:
    """A model of a billion parameters in two-byte numbers."""
    values: dict[str, Any] = {
        "name": "t",
        "parameters": GB,
        "active": GB,
        "weight_bytes": 2 * GB,
        "cached": 1000,
        "layers": 10,
        "hidden": 100,
        "intermediate": 400,
        "heads": 4,
        "head_size": 25,
        "vocabulary": 50_000,
        "bytes": 2,
        "grouped": True,
    }
    return Footprint(**{**values, **changes})


SMALL = sizes(name="d", parameters=GB // 20, active=GB // 20, weight_bytes=GB // 10)


class TestMeasured:
    def test_plans_hold_at_two_batch_sizes(self) -> None:
        size = {"hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 128, "max_position_embeddings": 512}
        model = tiny.build(tiny.tiny_config("llama", vocab_size=4000, **size), std=0.05)
        draft = tiny.build(tiny.tiny_config("llama", vocab_size=4000, max_position_embeddings=512), seed=3)
        heads = [make_head("medusa", model), make_head("eagle3", model)]
        enabled = enable_speculation(twin(model), draft_model=draft, head=heads)
        loads = [Workload(96, 8, rows, sampled) for rows, sampled in ((1, False), (4, True))]
        found = compare(model, enabled, ["prompt_lookup", "draft_model", "medusa", "eagle"], loads)
        assert len(found) == 10
        for each in found:
            assert each.close, f"{each.plan.method}, {each.load}: {each.plan.peak} planned, {each.measured} measured"
        peaks = {(each.plan.method, each.load.batch_size): each.measured for each in found}
        assert peaks["eagle", 4] > 1.1 * peaks["plain", 4], "the methods differ enough for the test to mean something"

    def test_the_peak_counts_what_lives_at_once(self) -> None:
        module = torch.nn.Linear(100, 10)
        with PeakMemory(torch.device("cpu"), [module]) as memory:
            first = torch.zeros(1000)
            second = first + 1
            del first
            _ = second[:10] * 2
            del second
            _ = torch.zeros(500)
        assert memory.peak == parameter_bytes([module]) + 2 * 4000

    def test_views_and_arguments_count_once(self) -> None:
        before = torch.zeros(1000)
        with PeakMemory(torch.device("cpu"), []) as memory:
            before.add_(1)
            _ = before.view(10, 100)
        assert memory.peak == 0


class TestFootprint:
    @pytest.mark.parametrize("family", tiny.FAMILIES)
    def test_sizes_are_those_of_the_loaded_model(self, family: str) -> None:
        model = tiny.tiny_model(family)
        found = footprint(model.config, family)
        assert found.parameters == found.active == sum(parameter.numel() for parameter in model.parameters())
        assert found.weight_bytes == parameter_bytes([model])
        half = footprint(model.config, family, torch.bfloat16)
        assert half.weight_bytes < found.weight_bytes
        assert half.cached * 2 == found.cached

    @pytest.mark.parametrize("family", tiny.FAMILIES)
    def test_a_token_takes_what_the_cache_allocates(self, family: str) -> None:
        target = Target(tiny.tiny_model(family))
        cache = target.new_cache(1, 5)
        with torch.no_grad():
            target.prefill(tiny.prompt_ids(1, 5), None, cache)
        assert footprint(target.model.config, family).cached * 5 == cache.nbytes()

    def test_a_model_that_was_just_saved_is_sized_like_before(self, tmp_path: Path) -> None:
        model = tiny.fresh_model("llama").bfloat16()
        before = footprint(model.config, "t", torch.bfloat16)
        model.save_pretrained(tmp_path)
        assert model.config.dtype == "bfloat16"
        assert footprint(model.config, "t") == before
        assert before.bytes == 2

    def test_a_family_without_a_meta_forward_is_sized_from_its_config(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuses(*_: Any, **__: Any) -> None:
            raise RuntimeError("meta")

        model = tiny.tiny_model("qwen3")
        right = cached_bytes(model, model.config)
        monkeypatch.setattr(footprint_module.hf, "call", refuses)
        assert cached_bytes(model, model.config) == right > 0

    def test_a_mixture_of_experts_uses_a_part(self) -> None:
        config = MixtralConfig(
            vocab_size=48,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=1,
        )
        found = footprint(config, "moe")
        experts = 2 * 4 * 3 * 32 * 64
        assert found.parameters - found.active == experts * 3 // 4
        assert found.is_sparse
        worth, reason = judge(found, lookup(), speculative(found, lookup(), Workload()), Workload(overlap=0.9), GB)
        assert worth == "measure first"
        assert "experts" in reason

    @pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
    def test_a_head_is_sized_from_its_config(self, kind: str) -> None:
        model = tiny.fresh_model("llama")
        head = make_head(kind, model)
        found = head_footprint(head.config, footprint(model.config, "t"))
        assert found.weight_bytes == sum(parameter.numel() * 4 for parameter in head.parameters())
        assert (found.cached > 0) == (kind != "medusa")


class TestMemory:
    def test_slots_are_those_of_the_cache(self) -> None:
        assert capacity(Workload(100, 50), 9) == 100 + 50 + 64
        assert capacity(Workload(100, 50), 80) == 256
        assert capacity(Workload(100, 9000), 9) == 9216

    def test_the_cache_grows_in_the_planned_blocks(self) -> None:
        cache = RaggedCache(1, 10)
        cache.reserve(11)
        assert cache.capacity == capacity(Workload(1, 1), 200) == 256

    def test_what_stays_adds_up_and_moments_do_not(self) -> None:
        plan = speculative(sizes(), eagle(SMALL, 3), Workload(100, 50, 2))
        stays = sum(part.bytes for part in plan.parts if part.stays)
        moments = [part.bytes for part in plan.parts if not part.stays]
        assert plan.peak == stays + max(moments)
        assert stays == 2 * GB + 2 * 214 * 1000 + SMALL.weight_bytes + 2 * 214 * SMALL.cached

    def test_more_rows_and_drawn_laws_take_more(self) -> None:
        load = Workload(8, 50)
        peaks = [
            speculative(sizes(), draft_model(SMALL), each).peak
            for each in (load, replace(load, sampled=True), replace(load, sampled=True, batch_size=8))
        ]
        assert peaks == sorted(set(peaks))
        assert plain(sizes(), load).peak < peaks[0]

    @pytest.mark.parametrize("change", [{"batch_size": 0}, {"prompt_tokens": 0}, {"overlap": 1.5}])
    def test_no_load_is_refused(self, change: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(change))):
            Workload(**change)


class TestAdvice:
    def rank(self, load: Workload, *drafts: Draft, memory: int = 100 * GB, target: Footprint | None = None) -> Any:
        target = target or sizes()
        plans = [speculative(target, draft, load) for draft in drafts]
        return {tip.method: tip.worth for tip in advise(target, drafts, plans, load, memory, "spechead bench")}

    def test_copied_answers_are_looked_up(self) -> None:
        assert self.rank(Workload(overlap=0.6), lookup()) == {"prompt_lookup": "try"}
        assert self.rank(Workload(overlap=0.1), lookup(), eagle(SMALL, 3)) == {
            "eagle": "try",
            "prompt_lookup": "leave",
        }

    def test_without_anything_that_pays_a_head_is_proposed_and_auto(self) -> None:
        found = self.rank(Workload(overlap=0.0), lookup())
        assert found == {"auto": "try", "eagle": "train one", "prompt_lookup": "leave"}

    def test_large_batches_are_measured_first(self) -> None:
        assert self.rank(Workload(batch_size=32), eagle(SMALL, 3))["eagle"] == "measure first"

    def test_short_answers_are_left(self) -> None:
        assert self.rank(Workload(max_new_tokens=8), eagle(SMALL, 3))["eagle"] == "leave"

    def test_too_little_memory_is_left(self) -> None:
        assert self.rank(Workload(), eagle(SMALL, 3), memory=2 * GB)["eagle"] == "leave"

    def test_a_heavy_draft_is_left(self) -> None:
        heavy = draft_model(sizes(active=GB // 2))
        assert draft_cost(sizes(), heavy) == 0.5
        assert self.rank(Workload(), heavy)["draft_model"] == "leave"

    def test_every_piece_of_advice_says_how_to_measure_it(self) -> None:
        load = Workload(overlap=0.6)
        (tip,) = advise(sizes(), [lookup()], [speculative(sizes(), lookup(), load)], load, 100 * GB, "spechead bench")
        assert tip.command == "spechead bench --method prompt_lookup"


class TestExpected:
    def test_the_series_of_leviathan(self) -> None:
        found = expected(0.75, 4, 0.1)
        assert found.tokens == pytest.approx((1 - 0.75**5) / (1 - 0.75))
        assert (found.best, found.worst) == (5, 1)
        assert found.speed_up == pytest.approx(found.tokens / 1.4)
        assert found.slowest == pytest.approx(1 / 1.4)

    def test_certain_and_hopeless_drafts(self) -> None:
        assert expected(1.0, 5, 0.0).speed_up == 6
        assert expected(0.0, 5, 0.1).speed_up == pytest.approx(1 / 1.5)

    def test_a_dear_draft_is_kept_short(self) -> None:
        cheap, dear = (max(table(0.75, cost), key=lambda row: row.speed_up).depth for cost in (0.01, 0.3))
        assert cheap > dear

    def test_a_step_over_more_nodes_may_cost_more(self) -> None:
        assert expected(0.5, 4, 0.0, 2.0).speed_up == pytest.approx(expected(0.5, 4, 0.0).speed_up / 2)

    @pytest.mark.parametrize("arguments", [(1.5, 4, 0.1), (0.5, 0, 0.1), (0.5, 4, -1.0), (0.5, 4, 0.1, 0.0)])
    def test_no_chances_are_refused(self, arguments: tuple[Any, ...]) -> None:
        with pytest.raises(ValueError, match="must lie in"):
            expected(*arguments)


@pytest.mark.parametrize(
    ("text", "amount"),
    [("24G", 24 * GB), ("80GiB", 80 * 1024**3), ("512M", 512_000_000), ("1.5 TB", 1500 * GB), ("7", 7)],
)
def test_amounts_of_memory(text: str, amount: int) -> None:
    assert bytes_of(text) == amount


@pytest.mark.parametrize("text", ["", "much", "1.2.3G", ".", "-1G"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no amount of memory"):
        bytes_of(text)


def test_nothing_is_loaded_to_plan(tmp_path: Path) -> None:
    tiny.fresh_model("llama").config.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    config = AutoConfig.from_pretrained(tmp_path)
    before = config.to_dict()
    with PeakMemory(torch.device("cpu"), []) as memory:
        found = footprint(config, "t", torch.bfloat16)
    assert found.weight_bytes > 40_000
    assert memory.peak < 2_000
    assert config.to_dict() == before
