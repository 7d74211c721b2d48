"""What an output must match, as text, and the two ports through which the core follows a sequence in its grammar.

Not for how masks are computed: that needs the vocabulary, which is text. A mask is opaque here; the sampler reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvpilot_engine.core.ids import TokenId


class GrammarKind(StrEnum):
    """The language that a GrammarSpec is written in."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar that was found valid at the door."""

    kind: GrammarKind
    text: str = ""
    """The schema as JSON, the expression, or the grammar; empty for JSON_OBJECT."""


class TokenMask(Protocol):
    """Which tokens may come next. Made and read outside the core (a bit per token of the vocabulary)."""


class TokenConstraint(Protocol):
    """Where one sequence stands in its grammar. Moved by commits only."""

    def compute_mask(self) -> TokenMask:
        """The tokens that may come next; an end token among them where the grammar may end. Changes nothing.

        Raises GrammarTooComplexError when there is none or it can't be computed; the sequence then ends.
        """
        ...

    def accept(self, token_id: TokenId) -> None:
        """Follow a sampled token. Raises ModelExecutionError when the grammar does not allow it, GrammarTooComplexError
        when it can't be followed further; the sequence then ends.

        Not called for a stop token that ends the sequence.
        """
        ...

    @property
    def is_complete(self) -> bool:
        """True when nothing but the end may follow."""
        ...


class ConstraintCompiler(Protocol):
    """Makes constraints for one model's vocabulary."""

    def compile(self, grammar: GrammarSpec) -> TokenConstraint:
        """Raises InvalidRequestError for a grammar that can't be followed."""
        ...
