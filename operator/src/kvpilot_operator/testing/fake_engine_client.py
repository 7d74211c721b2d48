"""The `EngineClient` port without a network: engines answer what a test has put there."""

from __future__ import annotations

from collections.abc import Sequence

from kvpilot_operator.core.observation import EngineState, Unknown
from kvpilot_operator.core.ports import EngineTarget


class FakeEngineClient:
    """Answers what it was told to, by pod UID; any other pod is unreachable."""

    def __init__(self) -> None:
        self.states: dict[str, EngineState | Unknown] = {}
        self.targets: list[EngineTarget] = []

    async def fetch_states(self, targets: Sequence[EngineTarget]) -> dict[str, EngineState | Unknown]:
        self.targets.extend(targets)
        return {target.uid: self.states.get(target.uid, Unknown("Unreachable")) for target in targets}
