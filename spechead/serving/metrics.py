"""Prometheus metrics, under vLLM's names where vLLM has the same figure, so that its dashboards work.

Names and meanings are vLLM's at 016a8587edb04ae53c913a1da9355a07dc0ca4ae (vllm/v1/spec_decode/metrics.py) and
005a810bc40faa25b8870fbc8559c3462581eee3 (vllm/v1/metrics/loggers.py); what it has no name for begins with `spechead:`.
Counters of drafting are read from the engine's cumulative DecodeStats when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)


class Metrics:
    """The metrics of one engine, in a registry of their own.

    Args:
        model_name: label of every metric.
    """

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.registry = CollectorRegistry()
        self._first = self._histogram("vllm:time_to_first_token_seconds", "Time from arrival to the first token.")
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Time spent in the queue.")
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "Time from arrival to the last token.")
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of ended rows.")
        self._generated = self._counter("vllm:generation_tokens", "Tokens generated for ended rows.")
        reasons = ["model_name", "finished_reason"]
        self._success = Counter("vllm:request_success", "Rows by how they ended.", reasons, registry=self.registry)

    def left_queue(self, seconds: float) -> None:
        """Record how long a row waited."""
        self._queue.observe(seconds)

    def first_token(self, seconds: float) -> None:
        """Record a row's first token."""
        self._first.observe(seconds)

    def ended(self, reason: str, seconds: float, prompt_tokens: int, new_tokens: int) -> None:
        """Record a row's end: "stop", "length", "abort", "timeout" or "error"."""
        self._whole.observe(seconds)
        self._prompt.inc(prompt_tokens)
        self._generated.inc(new_tokens)
        self._success.labels(self.model_name, reason).inc()

    def watch(self, engine: Any) -> None:
        """Read an engine's state and cumulative stats whenever the metrics are asked for."""
        self.registry.register(EngineCollector(engine, self.model_name))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, help_text: str) -> Histogram:
        family = Histogram(name, help_text, ["model_name"], buckets=SECONDS, registry=self.registry)
        return family.labels(self.model_name)

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(name, help_text, ["model_name"], registry=self.registry).labels(self.model_name)


class EngineCollector:
    """Makes metrics of what an engine counts anyway.

    Args:
        engine: read, never changed.
        model_name: label of every metric.
    """

    def __init__(self, engine: Any, model_name: str) -> None:
        self.engine, self.model_name = engine, model_name

    def collect(self) -> Iterator[Metric]:
        """Yield gauges of the load and counters of the steps."""
        engine, stats = self.engine, self.engine.stats
        yield self._gauge("vllm:num_requests_running", "Rows in the batch.", engine.running)
        yield self._gauge("vllm:num_requests_waiting", "Rows in the queue.", engine.waiting)
        yield self._gauge("spechead:kv_cache_bytes_max", "Most bytes the key-value caches can take.", engine.kv_bytes)
        drafts = stats.tried_by_depth[0] if stats.tried_by_depth else 0
        for name, help_text, value in (
            ("vllm:spec_decode_num_drafts", "Rows' steps that drafted.", drafts),
            ("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", stats.drafted_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were kept.", stats.kept_tokens),
            ("spechead:steps", "Target forwards over drafts.", stats.steps),
            ("spechead:row_steps", "Rows in those forwards; divided by steps, the mean batch size.", stats.row_steps),
            ("spechead:prefill_forwards", "Target forwards over prompts.", stats.prefill_forwards),
            ("spechead:emitted_tokens", "Tokens emitted by steps.", stats.emitted_tokens),
            ("spechead:near_ties", "Greedy decisions that rounding may decide.", stats.near_ties),
        ):
            yield self._labelled(CounterMetricFamily(name, help_text, labels=["model_name"]), [((), value)])
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        family = CounterMetricFamily(name, "Kept drafted tokens by depth, from 0.", labels=["model_name", "position"])
        yield self._labelled(family, [((str(d),), kept) for d, kept in enumerate(list(stats.kept_by_depth))])
        family = CounterMetricFamily("spechead:plan_steps", "Steps by what auto chose.", labels=["model_name", "plan"])
        yield self._labelled(family, [((plan,), count) for plan, count in dict(stats.plans).items()])

    def _labelled(self, family: CounterMetricFamily, values: list[tuple[tuple[str, ...], float]]) -> Metric:
        for labels, value in values:
            family.add_metric([self.model_name, *labels], value)
        return family

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help_text, labels=["model_name"])
        family.add_metric([self.model_name], value)
        return family
