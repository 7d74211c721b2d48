"""The constants of both loops that are not in the spec, each with the reason for its value.

They are here and not in the spec because a user has no better number than ours; a test passes its own object.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConstants:
    confirm_up_s: float = 10.0
    """Load must be above target this long before replicas are added: two ticks of 5 s; one burst starts no GPU."""
    stale_after_s: float = 30.0
    """A load older than this is unknown: six ticks, above the longest step of a loaded CPU engine."""
    max_growth: int = 2
    """Replicas may grow by this factor at once: past it a wrong reading costs more than a second step."""
    down_headroom: float = 0.9
    """With a replica less the rest must stay below this share of target, or the next pass would add it again."""
    preemptions_per_minute_at_target: float = 6.0
    """A preemption every ten seconds recomputes about a tenth of the work: that is the most to accept."""
    max_preemption_load: float = 1.5
    """Preemptions alone never ask for more than half as much again: they say that KV is short, not by how much."""
    preemption_sample_s: float = 15.0
    """A rate over less would be noise."""
    unschedulable_after_s: float = 30.0
    """The scheduler needs a moment; past this the pod is reported and nothing more is asked for."""

    memory_step: float = 0.02
    """The least step of the cap: below it a second OOM is as likely as the first was."""
    max_memory_step: float = 0.10
    """One event never takes more: its evidence is one allocation."""
    failed_margin: float = 0.02
    """Distance kept from a share that failed; memory use varies by about this from run to run."""
    failed_expiry_s: float = 14 * 24 * 3600.0
    """A failed share is forgotten after two weeks: drivers, images and loads change."""
    max_failed_starts: int = 3
    """Failed starts in a row before tuning stops: the engine's own ledger gives up after as many."""

    oom_loop_window_s: float = 600.0
    """Two memory kills within this are a loop: twice the kubelet's longest back-off."""
    max_restarts_in_loop: int = 2
    """Restarts from which a recent memory kill counts as one of a loop."""
    stamp_write_s: float = 60.0
    """Since when load is high or low is written once it has lasted this long; a restart may wait anew by as much."""
    load_only_write_s: float = 300.0
    """Status whose load alone changed is written this rarely: at 1,000 objects etcd feels each tick."""


POLICY = PolicyConstants()
