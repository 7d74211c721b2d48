"""Reads one tool call while it arrives, and lets its arguments through piece by piece.

    {"name": "get_weather", "arguments": {"city": "Br
      name known ─┘                       └─ fragment: {"city": "Br

Takes the keys in any order: arguments that come before the name are kept until it is known. Follows brackets and
strings only; whether a finished value is JSON is looked at once, at its end.
Not here: what stands around calls (`tool_parser`).
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_SPACE = " \t\r\n"
_PLAIN_IN_STRING = re.compile(r'[^"\\]+')
_PLAIN_OUTSIDE = re.compile(r'[^"{}\[\]]+')


class _State(Enum):
    OBJECT = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    AFTER_VALUE = auto()
    NAME = auto()
    DONE = auto()


class ValueReader:
    """Finds the end of one JSON value."""

    def __init__(self) -> None:
        self.text = ""
        self.is_complete = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> int:
        """Take from the front of `text` what belongs to the value; how many characters that is."""
        index = 0
        while index < len(text) and not self.is_complete:
            index = self._step(text, index)
        self.text += text[:index]
        return index

    def _step(self, text: str, index: int) -> int:
        character = text[index]
        if self._escaped:
            self._escaped = False
            return index + 1
        if self._in_string:
            plain = _PLAIN_IN_STRING.match(text, index)
            if plain is not None:
                return plain.end()
            self._escaped = character == "\\"
            self._in_string = self._escaped
            self.is_complete = not self._in_string and self._depth == 0
            return index + 1
        if self._depth == 0:
            return self._step_at_top(text, index)
        plain = _PLAIN_OUTSIDE.match(text, index)
        if plain is not None:
            return plain.end()
        self._in_string = character == '"'
        self._depth += (character in "{[") - (character in "}]")
        self.is_complete = self._depth == 0
        return index + 1

    def _step_at_top(self, text: str, index: int) -> int:
        character = text[index]
        if not self.text and index == 0:
            self._in_string = character == '"'
            self._depth = int(character in "{[")
            return index + 1
        # A number or a word: it ends before what can't belong to one.
        self.is_complete = character in _SPACE or character in ",}]"
        return index if self.is_complete else index + 1


class CallReader:
    """One call. `push` until `is_complete` or `is_broken`; `take_fragment` after each push."""

    def __init__(self, arguments_mark: str = "") -> None:
        """With a mark the call is  name mark arguments  instead of a JSON object."""
        self._mark = arguments_mark
        self._state = _State.NAME if arguments_mark else _State.OBJECT
        self._key = ""
        self._value: ValueReader | None = None
        self._name_text = ""
        self._num_taken = 0
        self.name: str | None = None
        self.arguments: str | None = None
        """As far as they have come; None before they begin."""
        self.has_all_arguments = False
        self.is_broken = False
        """What came can't be a call."""

    @property
    def is_complete(self) -> bool:
        return self._state is _State.DONE

    def take_fragment(self) -> str:
        """The arguments that came since the last time."""
        arguments = self.arguments or ""
        fragment = arguments[self._num_taken :]
        self._num_taken = len(arguments)
        return fragment

    def push(self, text: str) -> int:
        """Take from the front of `text` what belongs to the call; how many characters that is."""
        index = 0
        while index < len(text) and not self.is_complete and not self.is_broken:
            index += self._step(text[index:])
        return index

    def _step(self, text: str) -> int:
        if self._state is _State.NAME:
            return self._read_marked_name(text)
        if self._value is not None:
            return self._read_value(self._value, text)
        character = text[0]
        if character not in _SPACE:
            self._move(character)
        return 0 if self._value is not None else 1

    def _move(self, character: str) -> None:
        """Between values: one character that is no white space."""
        match self._state, character:
            case _State.OBJECT, "{":
                self._state = _State.FIRST_KEY
            case ((_State.FIRST_KEY | _State.KEY), '"'):
                self._value = ValueReader()
            case _State.COLON, ":":
                self._state = _State.VALUE
            case _State.VALUE, _:
                self._value = ValueReader()
            case _State.AFTER_VALUE, ",":
                self._state = _State.KEY
            case ((_State.FIRST_KEY | _State.AFTER_VALUE), "}"):
                self._state = _State.DONE
                self.is_broken = self.name is None or not self.has_all_arguments
            case _:
                self.is_broken = True

    def _read_value(self, value: ValueReader, text: str) -> int:
        num_read = value.push(text)
        is_argument = self._state is _State.VALUE and self._key in ARGUMENT_KEYS
        if is_argument:
            self.arguments = value.text
            self.is_broken = value.text[0] != "{"
        if value.is_complete:
            self._value = None
            self._finish_value(value.text, is_argument=is_argument)
        return num_read

    def _finish_value(self, text: str, *, is_argument: bool) -> None:
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            self.is_broken = True
            return
        if self._mark:
            self._state = _State.DONE
            self.has_all_arguments = True
        elif self._state is not _State.VALUE:
            self._key = parsed
            self._state = _State.COLON
        else:
            self._state = _State.AFTER_VALUE
            if is_argument:
                self.has_all_arguments = True
            elif self._key == "name":
                self.name = parsed if isinstance(parsed, str) else None
                self.is_broken = self.name is None

    def _read_marked_name(self, text: str) -> int:
        self._name_text += text
        name, mark, rest = self._name_text.partition(self._mark)
        if not mark:
            return len(text)
        self.name = name.strip()
        self._key = "arguments"
        self._state = _State.VALUE
        return len(text) - len(rest)
