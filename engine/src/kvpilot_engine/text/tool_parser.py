"""Parts a model's output into text for people and tool calls, while it arrives.

    output    Let me look. <tool_call>\\n{"name": "find", "arguments": {"q": "kv"}}\\n</tool_call>
    content   Let me look.
    calls     index 0, id, name find                        {"q": "kv"}   in as many fragments as came

What may still become a mark is held back, so no markup is ever content; white space around calls belongs to neither.
An output that follows a grammar is let through as it comes. Any other is held until a call is complete: what proves to
be no call of a known tool with a JSON object as arguments becomes content again.
Invariant: content and calls, joined, do not depend on how the output was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from kvpilot_engine.text.call_reader import CallReader
from kvpilot_engine.text.tool_dialects import ToolDialect


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """News of one call. The first has its id and name; the arguments of all, joined, are a JSON object."""

    index: int
    call_id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedDelta:
    """What may be sent now, perhaps nothing."""

    content: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class _Stage(Enum):
    START = auto()
    """Nothing but white space yet, in a dialect whose calls come first."""
    CONTENT = auto()
    OPENED = auto()
    CALL = auto()
    BETWEEN = auto()
    """After a call: another one, the end of a list, or the closing mark."""
    REST = auto()
    """No call can come any more."""


@dataclass(slots=True)
class _News:
    content: list[str] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)


class ToolParser:
    """One per choice. `push` for each piece of text, then `finish` once."""

    def __init__(
        self, dialect: ToolDialect, tool_names: Iterable[str], *, is_constrained: bool, is_required: bool = False
    ) -> None:
        """`is_constrained`: the output follows the dialect's grammar; `is_required`: which begins with a call."""
        self._dialect = dialect
        self._tool_names = frozenset(tool_names)
        self._is_constrained = is_constrained
        self._has_no_content = is_required and is_constrained
        self._stage = _Stage.CONTENT if dialect.opens_anywhere else _Stage.START
        self._pending = ""
        self._raw = ""
        """What was read of a call (or a list) that is not announced: content again, should it be none."""
        self._blank = ""
        """White space at the end of the content so far."""
        self._reader = CallReader(dialect.arguments_mark)
        self._is_in_list = False
        self._is_announced = False
        self._news = _News()
        self.num_calls = 0

    def push(self, text: str) -> ParsedDelta:
        """Return what is certain now."""
        self._pending += text
        while self._pending and self._advance():
            pass
        return self._take_news()

    def finish(self) -> ParsedDelta:
        """Return the rest: of an output that ended in the middle of a mark or a call, what is not markup."""
        rest = self._raw + self._pending
        match self._stage:
            case _Stage.OPENED | _Stage.CALL:
                is_markup = self._is_constrained and (self._dialect.opens_anywhere or self._has_no_content)
                if not self._is_announced and not is_markup:
                    self._add_content(rest)
            case _Stage.BETWEEN:
                pass
            case _:
                self._add_content(rest)
        if not self.num_calls:
            self._news.content.append(self._blank)
        return self._take_news()

    def map_finish_reason(self, reason: str) -> str:
        """The finish reason of an answer that ended for `reason`: a whole call makes "stop" to "tool_calls"."""
        is_cut = self._stage is _Stage.CALL and self._is_announced
        return "tool_calls" if reason == "stop" and self.num_calls and not is_cut else reason

    def _take_news(self) -> ParsedDelta:
        news, self._news = self._news, _News()
        return ParsedDelta("".join(news.content), tuple(news.calls))

    def _advance(self) -> bool:
        """Read on; False when more output is needed to know."""
        match self._stage:
            case _Stage.START:
                return self._read_start()
            case _Stage.CONTENT:
                return self._read_content()
            case _Stage.OPENED:
                return self._read_opened()
            case _Stage.CALL:
                return self._read_call()
            case _Stage.BETWEEN:
                return self._read_between()
            case _Stage.REST:
                self._add_content(self._pending)
                self._pending = ""
                return False

    def _read_start(self) -> bool:
        self._skip_space()
        opening = self._dialect.opening
        if opening and self._consume(opening):
            self._stage = _Stage.OPENED
            return True
        if not self._pending or (opening and opening.startswith(self._pending)):
            return False
        if self._pending[0] in ("{[" if self._dialect.may_be_list else "{"):
            self._stage = _Stage.OPENED
        else:
            self._give_up()
        return True

    def _read_content(self) -> bool:
        before, opening, after = self._pending.partition(self._dialect.opening)
        if not opening:
            num_held = _count_held(before, self._dialect.opening)
            self._add_content(before[: len(before) - num_held])
            self._pending = before[len(before) - num_held :]
            return False
        self._add_content(before)
        self._raw, self._pending = opening, after
        self._stage = _Stage.OPENED
        return True

    def _read_opened(self) -> bool:
        self._skip_space()
        if not self._pending:
            return False
        if (self._dialect.begins_list or self._dialect.may_be_list) and self._consume("["):
            self._is_in_list = True
        elif self._dialect.begins_list:
            self._give_up()
            return True
        self._begin_call()
        return True

    def _read_call(self) -> bool:
        reader = self._reader
        self._shift(reader.push(self._pending))
        if reader.is_broken or (reader.name is not None and reader.name not in self._tool_names):
            self._give_up()
            return True
        if reader.name is not None and reader.arguments and (self._is_constrained or reader.is_complete):
            self._announce(reader.name, reader.take_fragment())
        if not reader.is_complete:
            return False
        self._stage = _Stage.BETWEEN
        self._is_announced = False
        self._raw = ""
        return True

    def _read_between(self) -> bool:
        self._skip_space()
        closing, separator = self._dialect.closing, self._dialect.separator
        if not self._pending:
            return False
        if self._is_in_list:
            self._is_in_list = not self._consume("]")
            if self._is_in_list:
                if self._consume(","):
                    self._begin_call()
                else:
                    self._give_up()
            return True
        if separator and self._consume(separator):
            self._begin_call()
            return True
        if closing and closing.startswith(self._pending) and closing != self._pending:
            return False
        if closing:
            self._consume(closing)
        self._raw = ""
        self._stage = _Stage.CONTENT if self._dialect.opens_anywhere else _Stage.REST
        return True

    def _begin_call(self) -> None:
        self._reader = CallReader(self._dialect.arguments_mark)
        self._stage = _Stage.CALL

    def _announce(self, name: str, fragment: str) -> None:
        if not self._is_announced:
            self._is_announced = True
            self._blank = ""
            self._news.calls.append(ToolCallDelta(self.num_calls, self._dialect.new_call_id(), name, fragment))
            self.num_calls += 1
        elif fragment:
            self._news.calls.append(ToolCallDelta(self.num_calls - 1, None, None, fragment))

    def _give_up(self) -> None:
        """It is no call. Its opening is content, and what came after may open one."""
        raw = "" if self._is_announced else self._raw
        self._raw = ""
        self._is_announced = self._is_in_list = False
        if self._dialect.opens_anywhere:
            num_first = len(self._dialect.opening) if raw.startswith(self._dialect.opening) else 1
            self._add_content(raw[:num_first])
            self._pending = raw[num_first:] + self._pending
            self._stage = _Stage.CONTENT
        else:
            self._add_content(raw)
            self._stage = _Stage.REST

    def _add_content(self, text: str) -> None:
        if self._has_no_content:
            return
        text = self._blank + text
        kept = text.rstrip()
        self._blank = text[len(kept) :]
        self._news.content.append(kept)

    def _shift(self, num_chars: int) -> None:
        self._raw += self._pending[:num_chars]
        self._pending = self._pending[num_chars:]

    def _skip_space(self) -> None:
        self._shift(len(self._pending) - len(self._pending.lstrip()))

    def _consume(self, text: str) -> bool:
        if not self._pending.startswith(text):
            return False
        self._shift(len(text))
        return True


def _count_held(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0
