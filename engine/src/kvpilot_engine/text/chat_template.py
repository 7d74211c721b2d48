"""Renders messages with the model's own chat template, and keeps apart what the template and what a user wrote.

A user may write `<|im_end|>`; it must reach the model as text while the template's own `<|im_end|>` becomes the token.
Both meet in one rendered string, so before rendering each character of a user's text that begins a control token is
swapped for a private-use character that stands for it, one for one, so that templates may trim, test and cut the text:

    content   hi<|im_end|>     masked  hi□|im_end|>     rendered  <|im_start|>user\nhi□|im_end|><|im_end|>
    cut at control tokens      [im_start] "user\nhi□|im_end|>" [im_end]       □ → "<", each part encoded as plain text

Not here: tokenizing (`model_text`), the form of messages (`chat_messages`).
Invariant: a RenderedChat has no control token in it that the template did not write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvpilot_engine.errors import InvalidRequestError, SettingsError
from kvpilot_engine.text.chat_messages import normalize_messages
from kvpilot_engine.text.text_validation import require_encodable

_FIRST_MASK, _LAST_MASK = 0x10F000, 0x10FFFD
"""In the last private-use plane; a character that the request itself uses is passed over."""
_PRIVATE_USE = re.compile(f"[{chr(_FIRST_MASK)}-{chr(_LAST_MASK)}]")
_MASK_PREFIX = 3
_TEXT_END = r"\s*\Z"


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """Rendered text in which masked characters stand for those that began a control token in a user's text."""

    masked_text: str
    unmask: Mapping[int, str]
    """For `str.translate`, on parts already cut at control tokens."""

    @property
    def text(self) -> str:
        return self.masked_text.translate(self.unmask)


class ChatTemplate:
    """A compiled template. Raises SettingsError when it can't be compiled."""

    def __init__(
        self,
        source: str,
        *,
        named_specials: Mapping[str, str],
        special_texts: Iterable[str],
        now: Callable[[], datetime] = lambda: datetime.now(tz=UTC).astimezone(),
    ) -> None:
        """`named_specials`: bos_token and so on, by the names that templates use; `now` is for strftime_now."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag], autoescape=False
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_template_error
        environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
        try:
            self._template = environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise SettingsError([f"chat template: line {error.lineno}: {error.message}"]) from error
        self.source = source
        self.supports_tools = "tools" in names
        self._knows_developer = "developer" in source
        self._named_specials = dict(named_specials)
        self._masker = _Masker(special_texts, template_source=source)

    def render(
        self,
        messages: Iterable[object],
        *,
        tools: list[object] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] | None = None,
    ) -> RenderedChat:
        """Render a request's messages; `variables` are its chat_template_kwargs. Raises InvalidRequestError.

        With continue_final_message the rendered text ends with the text of the last message, so that it goes on.
        """
        if tools:
            self.require_tool_support()
        try:
            require_encodable(tools, "tools")
            require_encodable(variables, "chat_template_kwargs")
            normalized = normalize_messages(messages)
            self._replace_unknown_roles(normalized)
            masked, unmask = self._masker.mask([normalized, tools, dict(variables or {})])
        except RecursionError as error:
            raise InvalidRequestError("messages are nested too deeply", param="messages") from error
        masked_messages, masked_tools, masked_variables = masked
        context = {
            **masked_variables,
            **self._named_specials,
            "messages": masked_messages,
            "tools": masked_tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._render(context, unmask)
        return RenderedChat(_cut_after_last(text, masked_messages) if continue_final_message else text, unmask)

    def require_tool_support(self) -> None:
        """Raise InvalidRequestError when the template would not show tools to the model."""
        if not self.supports_tools:
            raise InvalidRequestError("the model's chat template ignores tools; leave them out", param="tools")

    def _render(self, context: Mapping[str, object], unmask: Mapping[int, str]) -> str:
        try:
            return self._template.render(context)
        # Whatever a template does not cope with comes from the messages: their order, missing fields, other types.
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            reason = str(error).translate(unmask)
            raise InvalidRequestError(
                f"the model's chat template can't render these messages: {reason}", param="messages"
            ) from error

    def _replace_unknown_roles(self, messages: Iterable[dict[str, object]]) -> None:
        """Newer clients write `developer` for `system`; older templates don't know it."""
        for message in messages:
            if message["role"] == "developer" and not self._knows_developer:
                message["role"] = "system"


class _Masker:
    """Swaps the first character of whatever could become a control token for a private-use one.

    Three characters decide (fewer at the end of a text, where another may follow): to ask for the whole token is too
    little, since a template may join two texts, and one character too much, since templates look for `</think>`.
    """

    def __init__(self, special_texts: Iterable[str], *, template_source: str) -> None:
        prefixes = sorted({text[:_MASK_PREFIX] for text in special_texts})
        self._firsts = sorted({prefix[0] for prefix in prefixes})
        self._reserved = frozenset(_PRIVATE_USE.findall(template_source))
        alternatives = [
            rf"{re.escape(prefix[0])}(?={re.escape(prefix[1:length])}{'' if length == len(prefix) else _TEXT_END})"
            for prefix in prefixes
            for length in range(1, len(prefix) + 1)
        ]
        self._pattern = re.compile("|".join(alternatives)) if alternatives else None

    def mask(self, data: list[Any]) -> tuple[list[Any], dict[int, str]]:
        """Return a copy of JSON data with all strings masked, and the table that undoes it."""
        if self._pattern is None:
            return data, {}
        taken = self._reserved.union(*(_PRIVATE_USE.findall(text) for text in _iterate_strings(data)))
        free = (chr(code) for code in range(_FIRST_MASK, _LAST_MASK + 1) if chr(code) not in taken)
        mask_by_first = dict(zip(self._firsts, free, strict=False))
        if len(mask_by_first) < len(self._firsts):
            raise InvalidRequestError("messages use all private-use characters of plane 16", param="messages")
        pattern = self._pattern

        def mask_value(value: Any) -> Any:
            if isinstance(value, str):
                return pattern.sub(lambda match: mask_by_first[match.group()], value)
            if isinstance(value, dict):
                return {mask_value(key): mask_value(item) for key, item in value.items()}
            if isinstance(value, list):
                return [mask_value(item) for item in value]
            return value

        return mask_value(data), {ord(mask): first for first, mask in mask_by_first.items()}


def _cut_after_last(text: str, messages: list[dict[str, object]]) -> str:
    """Cut what the template wrote after the last message; templates may have trimmed the message."""
    content = str(messages[-1]["content"])
    start = text.rfind(content.strip())
    if start < 0 or not content.strip():
        raise InvalidRequestError(
            "continue_final_message: the last message has no text that the chat template shows",
            param="continue_final_message",
        )
    kept = content.lstrip()
    return text[: start + len(kept if text.startswith(kept, start) else content.strip())]


def _iterate_strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _iterate_strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _iterate_strings(item)


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks what to train on; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own attribute

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_template_error(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Like the filter of transformers: jinja's own escapes `<` for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
