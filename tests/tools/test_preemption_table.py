"""The simulation behind the table of reserves and victims: everybody ends, and our own rules keep the bound."""

from __future__ import annotations

import pytest

from kvpilot_tools.bench.preemption_table import RESERVES, VICTIMS, Trace, make_long_trace, make_mixed_trace, simulate

SMALL = Trace(
    name="small", num_blocks=12, budget=64, prompts=(20,) * 6, limits=(100,) * 6, outputs=(100, 30, 100, 60, 100, 1)
)


@pytest.mark.parametrize("reserve", RESERVES)
@pytest.mark.parametrize("victim", VICTIMS)
def test_every_variant_comes_to_an_end(reserve: str, victim: str) -> None:
    outcome = simulate(SMALL, reserve_rule=RESERVES[reserve], victim_rule=VICTIMS[victim])
    assert outcome.num_steps >= 100
    assert outcome.num_preemptions > 0 or reserve != "none"


@pytest.mark.parametrize("trace", [make_long_trace(0), make_mixed_trace(0, end_early=False)], ids=["long", "mixed"])
def test_the_engines_rules_preempt_nobody_more_than_five_times(trace: Trace) -> None:  # A4
    (reserve, *_), (victim, *_) = RESERVES.values(), VICTIMS.values()
    outcome = simulate(trace, reserve_rule=reserve, victim_rule=victim)
    assert outcome.num_preemptions > 0
    assert outcome.most_of_one_request <= 5
    assert outcome.recomputed_share < 0.15
