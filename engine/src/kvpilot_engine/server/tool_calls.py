"""Tool calls in the shapes of OpenAI's answers, whole and in chunks. Pure: plain data in, JSON data out."""

from __future__ import annotations

from collections.abc import Iterable

from kvpilot_engine.text.tool_parser import ToolCallDelta


class WholeCalls:
    """The calls of one choice, put together from their deltas."""

    def __init__(self) -> None:
        self._heads: list[tuple[str | None, str | None]] = []
        self._arguments: list[list[str]] = []

    def take(self, deltas: Iterable[ToolCallDelta]) -> None:
        for delta in deltas:
            if delta.index == len(self._heads):
                self._heads.append((delta.call_id, delta.name))
                self._arguments.append([])
            self._arguments[delta.index].append(delta.arguments)

    @property
    def body(self) -> list[dict[str, object]]:
        return [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": "".join(arguments)}}
            for (call_id, name), arguments in zip(self._heads, self._arguments, strict=True)
        ]


def chunk_calls(deltas: Iterable[ToolCallDelta]) -> list[dict[str, object]]:
    """`tool_calls` of a chunk: id, type and name come with the first entry of a call only."""
    return [
        {"index": delta.index, "function": {"arguments": delta.arguments}}
        if delta.call_id is None
        else {
            "index": delta.index,
            "id": delta.call_id,
            "type": "function",
            "function": {"name": delta.name, "arguments": delta.arguments},
        }
        for delta in deltas
    ]
