"""Percentiles, ratios and the peers' model: the arithmetic of the benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvpilot_tools.bench.cases import build_cases
from kvpilot_tools.bench.comparison import OURS, Sample, compute_ratios, needed_cases, ratios_json
from kvpilot_tools.bench.hf_folder import canonical_name, to_bfloat16, unpermute
from kvpilot_tools.bench.peers import PeerError, keep_amx_stores
from kvpilot_tools.bench.sample_statistics import percentile, summarize

ISSUE_KEYS = {
    "vs_llamacpp": {
        "decode_tps_ratio_1", "decode_tps_ratio_8", "decode_tps_ratio_32",
        "prefill_tps_ratio_512", "prefill_tps_ratio_2048", "ttft_ratio_1",
    },
    "vs_vllm": {
        "throughput_ratio_1", "throughput_ratio_8", "throughput_ratio_32",
        "ttft_ratio_512", "ttft_ratio_stress", "startup_ratio",
    },
    "vs_transformers": {"throughput_ratio_1", "throughput_ratio_8", "throughput_ratio_32"},
}  # fmt: skip


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95, 0.99, 1.0])
def test_percentiles_are_those_of_numpy(share: float) -> None:
    sample = sorted(np.random.default_rng(1).gamma(2.0, size=37).tolist())
    assert percentile(sample, share) == pytest.approx(float(np.quantile(sample, share)))


def test_a_summary_of_nothing_is_none_and_of_one_is_that_one() -> None:
    assert summarize([]) is None
    only = summarize([3.0])
    assert only is not None
    assert (only.median, only.p99, only.largest) == (3.0, 3.0, 3.0)
    with pytest.raises(ValueError, match=r"share is 1\.5"):
        percentile([1.0], 1.5)


def samples(server: str, case: str, figure: str, *values: float) -> list[Sample]:
    return [Sample(turn, server, case, figure, value) for turn, value in enumerate(values)]


def test_ratios_are_above_one_where_ours_is_better_whichever_way_a_figure_goes() -> None:
    measured = [
        *samples(OURS, "single", "throughput_tps", 100.0, 120.0),
        *samples("vllm", "single", "throughput_tps", 25.0, 20.0),
        *samples(OURS, "stress_21", "ttft_s", 2.0),
        *samples("vllm", "stress_21", "ttft_s", 8.0),
    ]
    by_name = {entry.rule.name: entry for entry in compute_ratios(measured, ["vllm"])}
    rate = by_name["throughput_ratio_1"]
    assert rate.ratio == pytest.approx(110 / 22.5)
    assert rate.spread == pytest.approx((4.0, 6.0))
    assert rate.is_met
    assert by_name["ttft_ratio_stress"].ratio == pytest.approx(4.0)
    assert by_name["throughput_ratio_8"].ratio is None
    assert by_name["throughput_ratio_8"].is_met is None


def test_the_result_names_every_ratio_also_where_nothing_was_measured() -> None:
    report = ratios_json(compute_ratios([], ["llamacpp", "vllm", "transformers"]))
    for group, names in ISSUE_KEYS.items():
        assert names <= report[group].keys()
        assert all(report[group][name] is None for name in names)
    json.dumps(report, allow_nan=False)


def test_every_ratio_is_of_a_case_that_is_run() -> None:
    for is_quick in (False, True):
        names = {case.name for case in build_cases(is_quick=is_quick)} | {"start"}
        entries = compute_ratios([], ["llamacpp", "llamacpp-no-amx", "vllm", "transformers"])
        assert {entry.rule.case for entry in entries} <= names


def test_a_server_is_measured_only_in_what_a_ratio_needs() -> None:
    assert "stress_21" not in needed_cases("llamacpp", ["llamacpp", "vllm"])
    assert needed_cases("vllm", []) < needed_cases(OURS, ["llamacpp", "vllm"])


def test_bfloat16_rounds_to_nearest_and_ties_to_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, 1.005, -2.5, 3.3e38], dtype=np.float32)
    restored = (to_bfloat16(values).astype(np.uint32) << 16).view(np.float32)
    assert restored[:5].tolist() == [1.0, 1.0, 1.015625, 1.0078125, -2.5]
    assert np.all(np.abs(restored - values) <= np.abs(values) * 2.0**-8)


def test_the_order_of_rows_in_q_is_undone() -> None:
    config = {"num_attention_heads": 2, "num_key_value_heads": 1}
    halves_first = np.arange(16, dtype=np.float32).reshape(8, 2)  # two heads of four rows
    interleaved = halves_first.reshape(2, 2, 2, 2).swapaxes(1, 2).reshape(8, 2)
    assert np.array_equal(unpermute("blk.0.attn_q.weight", interleaved, config), halves_first)
    assert np.array_equal(unpermute("blk.0.ffn_up.weight", interleaved, config), interleaved)


def test_tensors_get_the_names_of_transformers() -> None:
    assert canonical_name("blk.12.attn_k.weight") == "model.layers.12.self_attn.k_proj.weight"
    assert canonical_name("token_embd.weight") == "model.embed_tokens.weight"


def test_the_barrier_is_put_once_and_a_changed_source_is_told(tmp_path: Path) -> None:
    source = tmp_path / "mmq.cpp"
    source.write_text("    tc.palette_id = 1;\n    _tile_loadconfig(&tc);\n")
    keep_amx_stores(source)
    once = source.read_text()
    assert once.index("__asm__") < once.index("_tile_loadconfig")
    keep_amx_stores(source)
    assert source.read_text() == once
    source.write_text("nothing of the kind\n")
    with pytest.raises(PeerError, match="0 times"):
        keep_amx_stores(source)
