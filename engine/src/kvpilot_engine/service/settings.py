"""Settings of the two processes: the memory share, the files shared with the operator, and the limits of the queue."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    gpu_memory_utilization: float = 0.9
    """Share of the device's total memory for this process, 0..1; the tuning file wins over it."""
    tuning_file: Path | None = None
    """Watched by content; None: the share never changes."""
    state_dir: Path | None = None
    """Where the start ledger lives, a folder that survives a container restart; None: failures are not remembered."""
    termination_log: Path | None = None
    """Where the last words go; None: nowhere. A path that can't be written is logged and otherwise ignored."""
    pod_uid: str = ""
    """Selects this pod's own value in the tuning file; empty outside Kubernetes."""
    max_num_seqs: int = 64
    """Most sequences in one step (the scheduler's limit), for the queue's arithmetic."""
    max_queue_len: int = 256
    """Most choices waiting for their first token beyond the free places of the batch; one more is refused."""
    step_timeout_s: float = 60.0
    """A child silent for this long is taken for hung: liveness turns off. Far above any honest step."""
