"""The fields of a request's body that chat and completions share: how to sample, when to stop, what to report.

Types and limits only; what needs the model (its vocabulary, its length, its defaults) is `sampling_builder`'s part.
Strict: `"5"` and `1.5` are no integers. None means that the client said nothing.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvpilot_engine.core.sampling_params import MAX_LOGIT_BIAS, MAX_PENALTY, MAX_TEMPERATURE
from kvpilot_engine.errors import InvalidRequestError
from kvpilot_engine.text.structured_output import GRAMMAR_FIELDS

_LOG = logging.getLogger(__name__)
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
"""Of one stop string: what may become one is compared again with each token."""
MAX_BAD_WORDS = 128
MAX_PRIORITY = 2**31 - 1
MAX_SALT = 256
"""Characters."""
ALL_TOKENS = -1
"""vLLM's way to say that top_k is off; ours is 0."""

_NOT_SUPPORTED: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "repetition_detection": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
"""Field → values besides null that mean "not used"."""
WITHOUT_EFFECT = frozenset(
    {
        "guided_decoding_backend",
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "user",
        "verbosity",
    }
)
"""Accepted for the sake of clients; the answer is the same without them."""


class RequestBody(BaseModel):
    """Fields that an API has and we don't support are refused when they would change the answer: an ignored one is a
    wrong answer that nobody sees. Fields that no API has are ignored, with a debug line."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    not_supported: ClassVar[dict[str, tuple[object, ...]]] = _NOT_SUPPORTED

    @model_validator(mode="after")
    def _refuse_what_is_not_supported(self) -> RequestBody:
        for name, value in (self.model_extra or {}).items():
            if name in self.not_supported:
                if value is not None and not any(_is_same(value, unused) for unused in self.not_supported[name]):
                    raise InvalidRequestError(f"{name} is not supported by this server", param=name)
            elif name not in WITHOUT_EFFECT:
                _LOG.debug("unknown field ignored: %s", name)
        return self


def _is_same(value: object, unused: object) -> bool:
    """Equal and of the same kind: `true` is not the number 1."""
    return value == unused and isinstance(value, bool) == isinstance(unused, bool)


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    include_usage: bool | None = None
    """Send the usage in a last chunk."""
    continuous_usage_stats: bool | None = None
    """With include_usage: send the usage so far in every chunk."""


Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Bias = Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]


class GenerationBody(RequestBody):
    """Upper limits that depend on the model (lengths, ids, log-probabilities) are checked later."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=ALL_TOKENS)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    logit_bias: dict[str, Bias] | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_BAD_WORDS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Count | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_SALT)] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _check_together(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError('stream_options is only allowed with "stream": true', param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError('prompt_logprobs is not allowed with "stream": true', param="prompt_logprobs")
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError(
                "truncate_prompt_tokens is 0; it must be at least 1, or -1 for as many as fit",
                param="truncate_prompt_tokens",
            )
        stops = self.stop_strings
        if len(stops) > MAX_STOPS:
            raise InvalidRequestError(f"stop has {len(stops)} entries; at most {MAX_STOPS} are allowed", param="stop")
        longest = max(map(len, stops), default=0)
        if longest > MAX_STOP_CHARS:
            raise InvalidRequestError(
                f"stop holds a string of {longest} characters; at most {MAX_STOP_CHARS} are allowed", param="stop"
            )
        if "" in stops:
            raise InvalidRequestError("stop holds an empty string, which would end every text", param="stop")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def grammar_fields(self) -> dict[str, object]:
        """What the output must match, as `structured_output` reads it."""
        return {name: getattr(self, name) for name in GRAMMAR_FIELDS}

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def num_candidates(self) -> int:
        """Outputs generated for each prompt, of which num_choices are answered."""
        return self.num_choices

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def wanted_max_tokens(self) -> tuple[str, int | None]:
        """The name of the field that set the limit, and the limit; None when the client set none."""
        return "max_tokens", self.max_tokens

    @property
    @abstractmethod
    def wanted_logprobs(self) -> tuple[str, int | None]:
        """The field that asks for most, and for how many of the most probable tokens; None: report nothing."""

    @property
    def echoes(self) -> bool:
        """The answer begins with the prompt."""
        return False
