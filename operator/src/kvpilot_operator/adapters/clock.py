"""The system's clocks behind the `Clock` port. Nothing else in the operator reads the time."""

from __future__ import annotations

import time
from datetime import UTC, datetime


class SystemClock:
    """Wall clock in UTC, and the monotonic one for ages and delays."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()
