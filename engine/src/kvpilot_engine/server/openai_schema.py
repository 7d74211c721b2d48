"""The JSON of the OpenAI API as types: what comes in is parsed once here, and nothing past here sees raw JSON.

What chat and completions have in common is in `sampling_fields`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvpilot_engine.errors import InvalidRequestError
from kvpilot_engine.server.sampling_fields import MAX_CHOICES, Count, GenerationBody, RequestBody
from kvpilot_engine.text.output_plan import OUTPUT_FIELDS


class ChatMessage(BaseModel):
    """Roles and content forms are checked here; what a template does with the rest is its business."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None


class ChatCompletionBody(GenerationBody):
    not_supported: ClassVar[dict[str, tuple[object, ...]]] = {
        **GenerationBody.not_supported,
        "best_of": (1,),
        "echo": (False,),
    }
    tools: Any = None
    tool_choice: Any = None
    """This and tools: read by `tool_definitions`, which names the place of what is wrong."""
    parallel_tool_calls: bool | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    """Without effect: a chat's prompt begins with exactly one BOS where the model wants one."""
    reasoning_effort: str | None = None
    """Handed to the template."""
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionBody:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError(
                f'top_logprobs is {self.top_logprobs}; it needs "logprobs": true', param="top_logprobs"
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt can't both be true", param="continue_final_message"
            )
        return self

    @property
    def opens_new_turn(self) -> bool:
        """Whether the template is to begin the assistant's answer."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @property
    def output_fields(self) -> dict[str, object]:
        """What the output must be like, as `output_plan` reads it."""
        return {name: getattr(self, name) for name in OUTPUT_FIELDS}

    @property
    def template_variables(self) -> dict[str, Any]:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **(self.chat_template_kwargs or {})}

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

    @property
    def wanted_logprobs(self) -> tuple[str, int | None]:
        return "top_logprobs", (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(GenerationBody):
    not_supported: ClassVar[dict[str, tuple[object, ...]]] = {**GenerationBody.not_supported, "suffix": ("",)}
    prompt: str | list[str] | list[int] | list[list[int]]
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    logprobs: Count | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_best_of(self) -> CompletionBody:
        if self.best_of is None:
            return self
        if self.best_of < self.num_choices:
            raise InvalidRequestError(
                f"best_of is {self.best_of} and n is {self.num_choices}; best_of must be at least n", param="best_of"
            )
        if self.best_of > self.num_choices and self.stream:
            raise InvalidRequestError(
                f'best_of is {self.best_of} and n is {self.num_choices}; with "stream": true they must be equal',
                param="best_of",
            )
        return self

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

    @property
    def num_candidates(self) -> int:
        return self.num_choices if self.best_of is None else self.best_of

    @property
    def wanted_logprobs(self) -> tuple[str, int | None]:
        return "logprobs", self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)


class TokenizeBody(RequestBody):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None
    tools: Any = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_one_of(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("exactly one of prompt and messages is needed", param="prompt")
        return self


class DetokenizeBody(RequestBody):
    model: str | None = None
    tokens: list[int]
