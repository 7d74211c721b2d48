"""How model families write tool calls, as data, and which family a chat template belongs to.

    hermes       text <tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call> …     Hermes, Qwen 2.5, Qwen 3
    llama3_json  {"name": …, "parameters": {…}}; {…}        only at the beginning, perhaps after <|python_tag|>
    mistral      text [TOOL_CALLS][{"name": …, "arguments": {…}}, …]
    mistral_v11  text [TOOL_CALLS]name[ARGS]{…}[TOOL_CALLS]…                           Mistral since tokenizer 11
    json         {"name": …, "arguments": {…}} or a list of them, only at the beginning: any other template with tools

Not here: grammars (`tool_grammar`) and parsing (`tool_parser`), which both read this.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass

AUTO_DIALECT = "auto"
_ALPHANUMERIC = string.ascii_letters + string.digits


def _new_openai_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _new_mistral_id() -> str:
    """Mistral's own templates refuse ids of any other form when the call comes back in the history."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDialect:
    """The marks around calls. A call is one JSON object, unless `arguments_mark` is set: then name, mark, arguments."""

    name: str
    opening: str = ""
    """Turns text into calls."""
    closing: str = ""
    """Ends what `opening` began; empty: the call's own end does."""
    opens_anywhere: bool = True
    """False: calls come first or not at all, and the opening may be missing."""
    arguments_key: str = "arguments"
    arguments_mark: str = ""
    begins_list: bool = False
    """After the opening comes a JSON list of calls."""
    may_be_list: bool = False
    """A list of calls may stand for one call."""
    separator: str = ""
    """Between two calls that no opening parts; empty: only a list holds more than one call without another opening."""
    new_call_id: Callable[[], str] = _new_openai_id

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be control tokens of the model, and must then be seen in its output."""
        return tuple(mark for mark in (self.opening, self.closing, self.arguments_mark) if mark)


HERMES = ToolDialect(name="hermes", opening="<tool_call>", closing="</tool_call>", may_be_list=True)
LLAMA3_JSON = ToolDialect(
    name="llama3_json", opening="<|python_tag|>", opens_anywhere=False, arguments_key="parameters", separator=";"
)
MISTRAL = ToolDialect(name="mistral", opening="[TOOL_CALLS]", begins_list=True, new_call_id=_new_mistral_id)
MISTRAL_V11 = ToolDialect(
    name="mistral_v11", opening="[TOOL_CALLS]", arguments_mark="[ARGS]", new_call_id=_new_mistral_id
)
JSON = ToolDialect(name="json", opens_anywhere=False, may_be_list=True)

DIALECTS = {dialect.name: dialect for dialect in (HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_V11, JSON)}
DIALECT_NAMES = (AUTO_DIALECT, HERMES.name, LLAMA3_JSON.name, MISTRAL.name, JSON.name)
"""What --tool-call-parser takes; which form of mistral it is, its template says."""


def find_dialect(name: str, template_source: str) -> ToolDialect:
    """The named one, or for AUTO_DIALECT the one whose marks the template writes."""
    if name != AUTO_DIALECT and not (name == MISTRAL.name and MISTRAL_V11.arguments_mark in template_source):
        return DIALECTS[name]
    if MISTRAL.opening in template_source:
        return MISTRAL_V11 if MISTRAL_V11.arguments_mark in template_source else MISTRAL
    if HERMES.opening in template_source:
        return HERMES
    if LLAMA3_JSON.opening in template_source or "ipython" in template_source:
        return LLAMA3_JSON
    return JSON
