"""Follows grammars over one model's vocabulary with llguidance: implements the core's ConstraintCompiler.

    mask     uint32 words, one bit per logit: token t is allowed when  mask[t // 32] >> (t % 32) & 1
             the model's logits may be wider than the vocabulary; what is past it is never allowed

The vocabulary (0.3 s and 60 MB for 49,000 tokens) is prepared on first use, compiled grammars are kept for the next
request with the same text. Runs on the engine thread: all work is bounded (`grammar_source`), and a sequence whose
masks cost more than its budget ends with an error instead of slowing the others down.
Not here: which grammar a request means (`structured_output`, `tool_grammar`).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvpilot_engine.core.grammar import ConstraintCompiler, GrammarSpec, TokenConstraint
from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.errors import GrammarTooComplexError, InvalidRequestError, ModelExecutionError, StartupError
from kvpilot_engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # at run time on first use only
    from llguidance import LLMatcher, LLTokenizer

MAX_CACHED_GRAMMARS = 64
MAX_CACHED_CHARS = 512 * 1024
"""Of all cached grammars together. The costliest kinds of schema take about 100 bytes a character."""
MASK_BUDGET_S = 0.5
MASK_BUDGET_PER_TOKEN_S = 0.001
"""A sequence may have used MASK_BUDGET_S + n × MASK_BUDGET_PER_TOKEN_S of processor time for masks after n tokens."""
_WORD_BITS = 32

BitMask = npt.NDArray[np.uint32]


class GrammarCompiler(ConstraintCompiler):
    """One per engine; used by one thread."""

    def __init__(
        self,
        load_tokenizer: Callable[[], Tokenizer],
        *,
        num_logits: int,
        max_cached_grammars: int = MAX_CACHED_GRAMMARS,
        max_cached_chars: int = MAX_CACHED_CHARS,
        thread_time: Callable[[], float] = time.thread_time,
    ) -> None:
        """`num_logits` is the width of the model's logits; `thread_time` is for the budget of masks."""
        self._load_tokenizer = load_tokenizer
        self._num_logits = num_logits
        self._max_cached_grammars = max_cached_grammars
        self._max_cached_chars = max_cached_chars
        self._thread_time = thread_time
        self._vocabulary: _Vocabulary | None = None
        self._compiled: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()

    @property
    def num_cached_grammars(self) -> int:
        return len(self._compiled)

    def compile(self, grammar: GrammarSpec) -> TokenConstraint:
        if self._vocabulary is None:
            try:
                tokenizer = self._load_tokenizer()
            except StartupError as error:
                raise InvalidRequestError(f"the model's tokenizer can't be read any more: {error}") from error
            self._vocabulary = _Vocabulary(tokenizer, num_logits=self._num_logits)
        matcher = self._compiled.pop(grammar, None) or self._vocabulary.build_matcher(grammar)
        self._compiled[grammar] = matcher
        self._drop_oldest()
        return _GrammarConstraint(matcher.deep_copy(), self._vocabulary, self._thread_time)

    def _drop_oldest(self) -> None:
        num_chars = sum(len(grammar.text) for grammar in self._compiled)
        while len(self._compiled) > 1 and (
            len(self._compiled) > self._max_cached_grammars or num_chars > self._max_cached_chars
        ):
            dropped, _ = self._compiled.popitem(last=False)
            num_chars -= len(dropped.text)


class _Vocabulary:
    """The model's tokens as llguidance takes them."""

    def __init__(self, tokenizer: Tokenizer, *, num_logits: int) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        num_tokens = min(tokenizer.vocab_size, num_logits)
        self.end_ids = frozenset(i for i in tokenizer.policy.end_ids if i < num_tokens)
        if not self.end_ids:
            raise InvalidRequestError("the model's files name no end token, so its output can't follow a grammar")
        self.num_words = -(-num_logits // _WORD_BITS)
        self.num_mask_bytes = -(-num_tokens // _WORD_BITS) * 4
        self._tokens: LLTokenizer = LLTokenizer(
            TokenizerWrapper(_LLGuidanceView(tokenizer, num_tokens)),
            eos_token=[int(i) for i in sorted(self.end_ids)],
        )

    def build_matcher(self, grammar: GrammarSpec) -> LLMatcher:
        """Compile, and compute the first mask: what fails at once is the request's fault."""
        from llguidance import LLMatcher

        from kvpilot_engine.text.grammar_source import build_source, new_limits, shorten

        matcher = LLMatcher(self._tokens, build_source(grammar), log_level=0, limits=new_limits())
        is_empty = matcher.is_error() or not self.compute_mask(matcher).any()
        if matcher.is_error():
            raise InvalidRequestError(f"the grammar can't be followed: {shorten(matcher.get_error())}")
        if is_empty:
            raise InvalidRequestError("the grammar can't be followed: no token of this model's vocabulary begins it")
        return matcher

    def compute_mask(self, matcher: LLMatcher) -> BitMask:
        mask = np.zeros(self.num_words, np.uint32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, self.num_mask_bytes)
        return mask


class _LLGuidanceView:
    """What llguidance asks of a tokenizer, by the names that it uses."""

    def __init__(self, tokenizer: Tokenizer, num_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._num_tokens = num_tokens
        self.eos_token_id = int(min(tokenizer.policy.end_ids))
        self.bos_token_id = None if tokenizer.policy.bos_id is None else int(tokenizer.policy.bos_id)
        self.tokens = [tokenizer.token_bytes(TokenId(i)) for i in range(num_tokens)]
        self.special_token_ids = [int(i) for i in sorted(tokenizer.special_ids) if i < num_tokens]
        self._id_by_byte = {token[0]: i for i, token in enumerate(self.tokens) if len(token) == 1}

    def __call__(self, text: str | bytes) -> list[int]:
        """The usual tokens for text that the grammar forces; it stands in the middle of an output."""
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        before = TokenId(0)
        ids = [int(i) for i in self._tokenizer.encode_parts([before, text])[1:]]
        if all(i < self._num_tokens for i in ids):
            return ids
        return [self._id_by_byte[byte] for byte in text.encode("utf-8")]  # the model has no logit for the usual one


class _GrammarConstraint(TokenConstraint):
    def __init__(self, matcher: LLMatcher, vocabulary: _Vocabulary, thread_time: Callable[[], float]) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._thread_time = thread_time
        self._mask: BitMask | None = None
        """The last one computed."""
        self._budget_s = MASK_BUDGET_S
        self._has_ended = False

    def compute_mask(self) -> BitMask:
        started_at = self._thread_time()
        mask = self._vocabulary.compute_mask(self._matcher)
        self._budget_s -= self._thread_time() - started_at
        if self._matcher.is_error():
            raise GrammarTooComplexError(self._describe("the grammar became too complex to follow"))
        if self._budget_s < 0:
            raise GrammarTooComplexError(
                f"the grammar costs more than {MASK_BUDGET_S:g} s and {MASK_BUDGET_PER_TOKEN_S * 1000:g} ms a token"
            )
        if not mask.any():
            raise GrammarTooComplexError("the grammar allows no token of this model's vocabulary here")
        self._mask = mask
        return mask

    def accept(self, token_id: TokenId) -> None:
        self._budget_s += MASK_BUDGET_PER_TOKEN_S
        if self._matcher.is_stopped() and token_id in self._vocabulary.end_ids:
            self._has_ended = True
            return
        mask, self._mask = self._mask, None
        if not self._matcher.consume_token(token_id):
            if mask is not None and mask[token_id // _WORD_BITS] >> (token_id % _WORD_BITS) & 1:
                raise GrammarTooComplexError(self._describe("the grammar became too complex to follow"))
            raise ModelExecutionError(self._describe(f"the grammar does not allow token {token_id}"))
        self._has_ended = self._has_ended or token_id in self._vocabulary.end_ids

    @property
    def is_complete(self) -> bool:
        return self._has_ended or self._matcher.is_stopped()

    def _describe(self, what: str) -> str:
        from kvpilot_engine.text.grammar_source import shorten

        return f"{what}: {shorten(self._matcher.get_error())}"
