"""From a request's body to valid GenerationRequests: parse, render, tokenize, check the length.

Synchronous and slow for long prompts (tens of milliseconds): called on a worker thread, never on the event loop.
Invariant: past here there is no JSON and no text that the engine would have to look at.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from kvpilot_engine.core.ids import RequestId, TokenId
from kvpilot_engine.core.request import GenerationRequest
from kvpilot_engine.core.sampling_params import SamplingParams
from kvpilot_engine.errors import InvalidRequestError, ModelNotServedError, NeverFitsError
from kvpilot_engine.server.openai_schema import (
    ChatCompletionBody,
    ChatMessage,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
)
from kvpilot_engine.text.model_text import ModelText

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions; a chat goes on to the model's limit."""
ALL_TOKENS = -1
"""vLLM's way to say that top_k is off; ours is 0."""
_SEED_MASK = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCall:
    """One API call, ready for the engine. Choice i is requests[i]."""

    call_id: str
    created: int
    model: str
    requests: tuple[GenerationRequest, ...]
    stop_strings: tuple[str, ...]
    num_prompt_tokens: int
    """Of all prompts; a prompt counts once, however many choices it has."""
    num_choices: int
    """n of the body."""
    is_streamed: bool
    include_usage: bool


class RequestBuilder:
    """Bound to one loaded model. Safe to use from several threads."""

    def __init__(self, text: ModelText, *, served_names: tuple[str, ...], max_model_len: int, vocab_size: int) -> None:
        self._text = text
        self._served_names = served_names
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        tokenizer = text.tokenizer
        self._longest_token = max(
            (len(tokenizer.token_bytes(TokenId(i))) for i in range(tokenizer.vocab_size)), default=1
        )

    def prepare_chat(self, raw: bytes, *, created: int) -> PreparedCall:
        body = parse_body(ChatCompletionBody, raw)
        model = self._check_model(body.model)
        self._check_text_length(sum(_content_size(message) for message in body.messages), "messages")
        prompt = self._text.encode_chat(
            [message.model_dump(exclude_unset=True) for message in body.messages],
            add_generation_prompt=body.add_generation_prompt,
            variables=body.chat_template_kwargs,
        )
        return self._build(body, [prompt], "chatcmpl", created, model, param="messages", default_max_tokens=None)

    def prepare_completion(self, raw: bytes, *, created: int) -> PreparedCall:
        body = parse_body(CompletionBody, raw)
        model = self._check_model(body.model)
        prompts = [
            self._encode_text(prompt, "prompt") if isinstance(prompt, str) else self._check_ids(prompt, "prompt")
            for prompt in body.prompts
        ]
        return self._build(
            body, prompts, "cmpl", created, model, param="prompt", default_max_tokens=COMPLETION_MAX_TOKENS
        )

    def tokenize(self, raw: bytes) -> dict[str, object]:
        body = parse_body(TokenizeBody, raw)
        self._check_model(body.model)
        if body.messages is not None:
            self._check_text_length(sum(_content_size(message) for message in body.messages), "messages")
            ids = self._text.encode_chat(
                [message.model_dump(exclude_unset=True) for message in body.messages],
                add_generation_prompt=body.add_generation_prompt,
            )
        else:
            ids = self._encode_text(body.prompt or "", "prompt", add_bos=body.add_special_tokens)
        return {"count": len(ids), "max_model_len": self._max_model_len, "tokens": ids}

    def detokenize(self, raw: bytes) -> dict[str, object]:
        body = parse_body(DetokenizeBody, raw)
        self._check_model(body.model)
        return {"prompt": self._text.tokenizer.decode(self._check_ids(body.tokens, "tokens"))}

    def _build(
        self,
        body: ChatCompletionBody | CompletionBody,
        prompts: list[list[TokenId]],
        prefix: str,
        created: int,
        model: str,
        *,
        param: str,
        default_max_tokens: int | None,
    ) -> PreparedCall:
        call_id = f"{prefix}-{secrets.token_hex(16)}"
        seed = secrets.randbits(63) if body.seed is None else body.seed & _SEED_MASK
        requests: list[GenerationRequest] = []
        for prompt in prompts:
            if not prompt:
                raise InvalidRequestError(f"{param} has no tokens; at least 1 is needed", param=param)
            sampling = self._sampling(body, len(prompt), seed, param, default_max_tokens)
            requests += [
                GenerationRequest(
                    request_id=RequestId(f"{call_id}-{len(requests) + choice}"),
                    prompt_token_ids=tuple(prompt),
                    sampling=sampling,
                    choice=choice,
                    cache_salt=body.cache_salt or "",
                )
                for choice in range(body.num_choices)
            ]
        return PreparedCall(
            call_id=call_id,
            created=created,
            model=model,
            requests=tuple(requests),
            stop_strings=body.stop_strings,
            num_prompt_tokens=sum(len(prompt) for prompt in prompts),
            num_choices=body.num_choices,
            is_streamed=bool(body.stream),
            include_usage=body.include_usage,
        )

    def _sampling(
        self,
        body: ChatCompletionBody | CompletionBody,
        num_prompt_tokens: int,
        seed: int,
        param: str,
        default_max_tokens: int | None,
    ) -> SamplingParams:
        defaults = self._text.generation_defaults
        stop_ids = self._check_ids(body.stop_token_ids or [], "stop_token_ids")
        return SamplingParams(
            max_tokens=self._max_tokens(body, num_prompt_tokens, param, default_max_tokens),
            temperature=defaults.temperature if body.temperature is None else body.temperature,
            top_p=defaults.top_p if body.top_p is None else body.top_p,
            top_k=defaults.top_k if body.top_k is None else 0 if body.top_k == ALL_TOKENS else body.top_k,
            seed=seed,
            stop_token_ids=self._text.end_token_ids | frozenset(stop_ids),
            ignore_eos=bool(body.ignore_eos),
        )

    def _max_tokens(
        self, body: ChatCompletionBody | CompletionBody, num_prompt_tokens: int, param: str, default: int | None
    ) -> int:
        """The limit of the output; every number in a refusal is one that the client sent or the model has."""
        limit = self._max_model_len
        if num_prompt_tokens >= limit:
            raise NeverFitsError(
                f"the prompt has {num_prompt_tokens} tokens; this model's context is {limit} tokens, "
                "prompt and at least 1 token of output together",
                param=param,
            )
        room = limit - num_prompt_tokens
        name, wanted = body.wanted_max_tokens
        if wanted is None:
            return room if default is None else min(default, room)
        if wanted < 1:
            raise InvalidRequestError(f"{name} is {wanted}; it must be at least 1", param=name)
        if wanted > room:
            raise NeverFitsError(
                f"the prompt has {num_prompt_tokens} tokens and {name} is {wanted}, together "
                f"{num_prompt_tokens + wanted}; this model's context is {limit} tokens",
                param=name,
            )
        return wanted

    def _check_model(self, name: str | None) -> str:
        if name is None:
            return self._served_names[0]
        if name not in self._served_names:
            raise ModelNotServedError(f"the model {name[:200]!r} does not exist here; served: {self._served_names[0]}")
        return name

    def _encode_text(self, prompt: str, param: str, *, add_bos: bool = True) -> list[TokenId]:
        self._check_text_length(len(prompt), param)
        return self._text.encode_prompt(prompt, param=param, add_bos=add_bos)

    def _check_text_length(self, num_chars: int, param: str) -> None:
        """Refuse before tokenizing what can't fit even if it were all of the vocabulary's longest token."""
        if num_chars > self._max_model_len * self._longest_token:
            least = num_chars // self._longest_token
            raise NeverFitsError(
                f"{param} has {num_chars} characters, at least {least} tokens; this model's context is "
                f"{self._max_model_len} tokens",
                param=param,
            )

    def _check_ids(self, ids: list[int], param: str) -> list[TokenId]:
        for token in ids:
            if not 0 <= token < self._vocab_size:
                raise InvalidRequestError(
                    f"{param} holds {token}; token ids of this model are 0..{self._vocab_size - 1}", param=param
                )
        return [TokenId(token) for token in ids]


def _content_size(message: ChatMessage) -> int:
    content = message.content
    if isinstance(content, str):
        return len(content)
    return sum(len(part["text"]) for part in content or () if isinstance(part.get("text"), str))
