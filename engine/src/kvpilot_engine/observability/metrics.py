"""The engine's metrics on one given registry: a collector that reads at scrape time, and the histograms.

Nothing here is on prometheus_client's global registry. Each histogram exists under our name and under vLLM's, fed by
one call. The full list is docs/contracts/metrics.md, compared with what is exported in both directions by a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvpilot_engine.observability.metric_families import PREFIX, VLLM, EngineReading, build_families

_FIRST_TOKEN_S = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_CHOICES = (1, 2, 5, 10, 20)
STEP_KINDS = ("prefill", "decode", "mixed")


class _Collector(Collector):
    def __init__(self, read: Callable[[], EngineReading]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return build_families(self._read())


class _TwinHistogram:
    """One set of observations under both names."""

    def __init__(
        self,
        own_name: str,
        vllm_name: str | None,
        text: str,
        buckets: tuple[float, ...],
        *,
        registry: CollectorRegistry,
        model_name: str,
    ) -> None:
        self._histograms = [Histogram(PREFIX + own_name, text, buckets=buckets, registry=registry)]
        if vllm_name is not None:
            twin = Histogram(
                VLLM + vllm_name, text, labelnames=["model_name", "engine"], buckets=buckets, registry=registry
            )
            self._histograms.append(twin.labels(model_name, "0"))

    def observe(self, value: float) -> None:
        for histogram in self._histograms:
            histogram.observe(value)


class EngineMetrics:
    """Build once per registry. `read` is called at each scrape."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        model_name: str,
        rejection_codes: Iterable[str],
        read: Callable[[], EngineReading],
    ) -> None:
        registry.register(_Collector(read))

        def twin(own: str, vllm: str | None, text: str, buckets: tuple[float, ...]) -> _TwinHistogram:
            return _TwinHistogram(own, vllm, text, buckets, registry=registry, model_name=model_name)

        self.time_to_first_token_s = twin(
            "time_to_first_token_seconds", "time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_S
        )
        self.inter_token_s = twin(
            "inter_token_latency_seconds", "inter_token_latency_seconds", "Between tokens of one sequence.", _TOKEN_S
        )
        self.time_per_output_token_s = twin(
            "time_per_output_token_seconds",
            "request_time_per_output_token_seconds",
            "Mean time between the tokens of a sequence.",
            _TOKEN_S,
        )
        self.e2e_s = twin("e2e_request_latency_seconds", "e2e_request_latency_seconds", "Arrival to end.", _REQUEST_S)
        self.queue_s = twin(
            "request_queue_time_seconds", "request_queue_time_seconds", "Arrival to first step.", _REQUEST_S
        )
        self.decode_s = twin(
            "request_decode_time_seconds", "request_decode_time_seconds", "First token to last.", _REQUEST_S
        )
        self.prompt_tokens = twin(
            "request_prompt_tokens", "request_prompt_tokens", "Prompt length of a sequence.", _LENGTHS
        )
        self.output_tokens = twin(
            "request_generation_tokens", "request_generation_tokens", "Output length of a sequence.", _LENGTHS
        )
        self.max_tokens = twin(
            "request_params_max_tokens", "request_params_max_tokens", "max_tokens of a request.", _LENGTHS
        )
        self.num_choices = twin("request_params_n", "request_params_n", "n of a request.", _CHOICES)
        step_s = Histogram(
            PREFIX + "step_seconds", "Time of one step.", labelnames=["kind"], buckets=_STEP_S, registry=registry
        )
        self._step_s_by_kind = {kind: step_s.labels(kind) for kind in STEP_KINDS}
        self._rejected = Counter(
            PREFIX + "requests_rejected", "API calls refused, by error code.", labelnames=["code"], registry=registry
        )
        self._vllm_rejected = Counter(
            VLLM + "admission_rejections",
            "API calls refused because the queue is full.",
            labelnames=["model_name", "engine"],
            registry=registry,
        ).labels(model_name, "0")
        for code in rejection_codes:
            self._rejected.labels(code)

    def observe_step(self, kind: str, seconds: float, queue_times_s: Iterable[float]) -> None:
        self._step_s_by_kind[kind].observe(seconds)
        for queue_time_s in queue_times_s:
            self.queue_s.observe(queue_time_s)

    def count_rejection(self, code: str, *, is_overload: bool) -> None:
        self._rejected.labels(code).inc()
        if is_overload:
            self._vllm_rejected.inc()
