"""From a body's sampling fields to SamplingParams: the model's defaults, and every limit that depends on the model.

Invariant: what passes here can be sampled; no id is outside the vocabulary, no length outside the context.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.core.sampling_params import SamplingParams
from kvpilot_engine.errors import InvalidRequestError, NeverFitsError
from kvpilot_engine.server.sampling_fields import ALL_TOKENS, GenerationBody
from kvpilot_engine.text.model_text import ModelText

_SEED_MASK = 2**63 - 1


class SamplingBuilder:
    """Bound to one loaded model. Safe to use from several threads."""

    def __init__(self, text: ModelText, *, max_model_len: int, vocab_size: int, max_logprobs: int) -> None:
        self._text = text
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._max_logprobs = max_logprobs

    def draw_seed(self, body: GenerationBody) -> int:
        """The body's seed; without one a new one, the same for all prompts and choices of the call."""
        return secrets.randbits(63) if body.seed is None else body.seed & _SEED_MASK

    def build(
        self, body: GenerationBody, num_prompt_tokens: int, *, seed: int, param: str, default_max_tokens: int | None
    ) -> SamplingParams:
        """Raises InvalidRequestError; `param` names the field that holds the prompt."""
        defaults = self._text.generation_defaults
        own_stops = frozenset(self.check_ids(body.stop_token_ids or (), "stop_token_ids"))
        max_tokens = self.max_tokens(body, num_prompt_tokens, param, default_max_tokens)
        prompt_logprobs = self._prompt_logprobs(body, max_tokens)
        top_k = defaults.top_k if body.top_k is None else 0 if body.top_k == ALL_TOKENS else body.top_k
        ends = frozenset[TokenId]() if body.ignore_eos else self._text.end_token_ids
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=_first(body.temperature, defaults.temperature),
            top_p=_first(body.top_p, defaults.top_p),
            top_k=min(top_k, self._vocab_size),
            min_p=_first(body.min_p, defaults.min_p),
            presence_penalty=_first(body.presence_penalty, 0.0),
            frequency_penalty=_first(body.frequency_penalty, 0.0),
            repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty),
            logit_bias=self._logit_bias(body),
            bad_words=self._bad_words(body),
            min_tokens=body.min_tokens or 0,
            logprobs=self._logprobs(body),
            prompt_logprobs=prompt_logprobs,
            seed=seed,
            stop_token_ids=ends | own_stops,
        )

    def max_tokens(self, body: GenerationBody, num_prompt_tokens: int, param: str, default: int | None) -> int:
        """The limit of the output; every number in a refusal is one that the client sent or the model has."""
        limit = self._max_model_len
        name, wanted = body.wanted_max_tokens
        least = 0 if body.echoes or body.prompt_logprobs is not None else 1
        if wanted is not None and wanted < least:
            hint = "" if least == 0 or wanted < 0 else ", or 0 with echo or prompt_logprobs"
            raise InvalidRequestError(f"{name} is {wanted}; it must be at least {least}{hint}", param=name)
        room = limit - num_prompt_tokens
        if room < 0 or (room == 0 and wanted != 0):
            raise NeverFitsError(
                f"the prompt has {num_prompt_tokens} tokens; this model's context is {limit} tokens, "
                "prompt and at least 1 token of output together",
                param=param,
            )
        if wanted is None:
            return room if default is None else min(default, room)
        if wanted > room:
            raise NeverFitsError(
                f"the prompt has {num_prompt_tokens} tokens and {name} is {wanted}, together "
                f"{num_prompt_tokens + wanted}; this model's context is {limit} tokens",
                param=name,
            )
        return wanted

    def check_ids(self, ids: Iterable[int], param: str) -> list[TokenId]:
        """The ids as tokens of this model."""
        checked = [TokenId(token) for token in ids]
        for token in checked:
            if not 0 <= token < self._vocab_size:
                raise InvalidRequestError(
                    f"{param} holds {token}; token ids of this model are 0..{self._vocab_size - 1}", param=param
                )
        return checked

    def _logprobs(self, body: GenerationBody) -> int | None:
        name, wanted = body.wanted_logprobs
        if wanted is None:
            # Ranking candidates needs the log-probabilities of the tokens themselves.
            return 0 if body.num_candidates > body.num_choices else None
        return self._check_num_logprobs(wanted, name)

    def _prompt_logprobs(self, body: GenerationBody, max_tokens: int) -> int | None:
        name, wanted = "prompt_logprobs", body.prompt_logprobs
        if wanted is None and body.echoes:
            name, wanted = body.wanted_logprobs
        if wanted is None:
            return 0 if max_tokens == 0 else None
        return self._check_num_logprobs(wanted, name)

    def _check_num_logprobs(self, wanted: int, name: str) -> int:
        if wanted > self._max_logprobs:
            raise InvalidRequestError(
                f"{name} is {wanted}; this server reports at most {self._max_logprobs} (--max-logprobs)", param=name
            )
        return min(wanted, self._vocab_size)

    def _logit_bias(self, body: GenerationBody) -> tuple[tuple[TokenId, float], ...]:
        bias = body.logit_bias or {}
        ids: list[int] = []
        for key in bias:
            if not (key.isascii() and key.removeprefix("-").isdigit() and len(key) <= 20):
                raise InvalidRequestError(f"logit_bias holds {key[:40]!r}; keys are token ids", param="logit_bias")
            ids.append(int(key))
        return tuple(zip(self.check_ids(ids, "logit_bias"), bias.values(), strict=True))

    def _bad_words(self, body: GenerationBody) -> tuple[tuple[TokenId, ...], ...]:
        """Each word as it is spelled at the beginning of a text and after a space."""
        found: dict[tuple[TokenId, ...], None] = {}
        for word in body.bad_words or ():
            if not word.strip():
                raise InvalidRequestError("bad_words holds an empty word", param="bad_words")
            for spelling in (word, f" {word.lstrip()}"):
                ids = self._text.tokenizer.encode(spelling, specials_as_text=False)
                found[tuple(self.check_ids(ids, "bad_words"))] = None
        return tuple(found)


def _first(wanted: float | None, default: float) -> float:
    return default if wanted is None else wanted
