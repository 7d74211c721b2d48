"""The JSON of the OpenAI API as types: what comes in is parsed once here, and nothing past here sees raw JSON.

A field that OpenAI's or vLLM's API has and we don't support yet is refused when its value would change the answer: an
ignored `logit_bias` is a wrong answer that nobody sees. Fields that no API has are ignored, with a debug line.
Strict: `"5"` and `1.5` are no integers.
"""

from __future__ import annotations

import json
import logging
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvpilot_engine.errors import InvalidRequestError
from kvpilot_engine.text.text_validation import require_encodable

_LOG = logging.getLogger(__name__)
MAX_CHOICES = 128
MAX_STOPS = 16

_NOT_SUPPORTED: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "bad_words": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_logprobs": (0, False),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Field → values besides null that mean "not used"."""
_WITHOUT_EFFECT = frozenset(
    {"metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
)


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    silent: ClassVar[frozenset[str]] = _WITHOUT_EFFECT

    @model_validator(mode="after")
    def _refuse_what_is_not_supported(self) -> _Body:
        for name, value in (self.model_extra or {}).items():
            if name in _NOT_SUPPORTED:
                if value is not None and not any(_is_same(value, unused) for unused in _NOT_SUPPORTED[name]):
                    raise InvalidRequestError(f"{name} is not supported by this server", param=name)
            elif name not in self.silent:
                _LOG.debug("unknown field ignored: %s", name)
        return self


def _is_same(value: object, unused: object) -> bool:
    """Equal and of the same kind: `true` is not the number 1."""
    return value == unused and isinstance(value, bool) == isinstance(unused, bool)


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    include_usage: bool | None = None


class _GenerationBody(_Body):
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> _GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError('stream_options is only allowed with "stream": true', param="stream_options")
        stops = self.stop_strings
        if len(stops) > MAX_STOPS:
            raise InvalidRequestError(f"stop has {len(stops)} entries; at most {MAX_STOPS} are allowed", param="stop")
        if "" in stops:
            raise InvalidRequestError("stop holds an empty string, which would end every text", param="stop")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wanted_max_tokens(self) -> tuple[str, int | None]:
        """The name of the field that set the limit, and the limit; None when the client set none."""
        return "max_tokens", self.max_tokens


class ChatMessage(BaseModel):
    """Roles and content forms are checked here; what a template does with the rest is its business."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None


class ChatCompletionBody(_GenerationBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: Literal[False] = False
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wanted_max_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return "max_tokens", self.max_tokens
        if self.max_tokens is not None and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequestError(
                f"max_completion_tokens is {self.max_completion_tokens} and max_tokens is {self.max_tokens}; "
                "set only one of them",
                param="max_completion_tokens",
            )
        return "max_completion_tokens", self.max_completion_tokens


class CompletionBody(_GenerationBody):
    prompt: str | list[str] | list[int] | list[list[int]]

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt, text or ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidRequestError("prompt is an empty list", param="prompt")
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [part for part in self.prompt if not isinstance(part, int)]


class TokenizeBody(_Body):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _check_one_of(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("exactly one of prompt and messages is needed", param="prompt")
        return self


class DetokenizeBody(_Body):
    model: str | None = None
    tokens: list[int]


Body = TypeVar("Body", bound=BaseModel)


def parse_body(kind: type[Body], raw: bytes) -> Body:
    """Read a request body; raises InvalidRequestError that names the first bad field."""
    value = _parse_object(raw)
    for name, field in value.items():
        require_encodable(name, "a key of the body")
        require_encodable(field, name)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _describe(error) from None


def _parse_object(raw: bytes) -> dict[str, object]:
    """The standard library's parser: unlike pydantic's it lets lone surrogates through, so that the field is named."""
    if not raw.strip():
        raise InvalidRequestError("the body is empty; a JSON object is needed")
    try:
        value = json.loads(raw, parse_constant=_refuse_constant)
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return value


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def _describe(error: ValidationError) -> InvalidRequestError:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    place = ".".join(str(part) for part in problems[0]["loc"])
    others = {str(problem["loc"][0]) for problem in problems[1:] if problem["loc"]} - {str(problems[0]["loc"][0])}
    more = f" (also wrong: {', '.join(sorted(others))})" if others else ""
    return InvalidRequestError(f"{place}: {problems[0]['msg']}{more}", param=str(problems[0]["loc"][0]))
