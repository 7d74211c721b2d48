"""The out-of-memory events of this process as its operator sees them: numbered, counted once, the newest kept."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping

from kvpilot_engine.errors import OOMCause, OOMPhase
from kvpilot_engine.service.engine_process import KEPT_OOM_EVENTS
from kvpilot_engine.service.messages import OOMEvent


class OOMLog:
    """`seq` is the newest number; the child numbers what it survives to tell, this class the ends of a child."""

    def __init__(self) -> None:
        self._events: deque[OOMEvent] = deque(maxlen=KEPT_OOM_EVENTS)
        self.counts: Counter[tuple[OOMPhase, OOMCause]] = Counter()
        self.seq = 0

    @property
    def events(self) -> tuple[OOMEvent, ...]:
        """Oldest first."""
        return tuple(self._events)

    def note(self, events: Iterable[OOMEvent]) -> None:
        """Take each event once: snapshots repeat the newest ones."""
        for event in events:
            if event.seq > self.seq:
                self.seq = event.seq
                self._events.append(event)
                self.counts[event.phase, event.cause] += 1

    def note_end(self, termination: Mapping[str, object]) -> dict[str, object]:
        """Number an event that is known from a child's last words alone; the words, with the number."""

        def size_of(key: str) -> int | None:
            value = termination.get(key)
            return value if isinstance(value, int) else None

        utilization = termination.get("utilization")
        event = OOMEvent(
            seq=self.seq + 1,
            phase=OOMPhase(str(termination["phase"])),
            cause=OOMCause(str(termination["cause"])),
            utilization=utilization if isinstance(utilization, float) else 0.0,
            message=str(termination.get("message", "")),
            survived=False,
            requested_bytes=size_of("requested_bytes"),
            limit_bytes=size_of("limit_bytes"),
            free_bytes=size_of("free_bytes"),
        )
        self.note([event])
        return {**termination, "oom_seq": event.seq}
