"""From a request's body to valid GenerationRequests: parse, render, tokenize, check the length.

Synchronous and slow for long prompts (tens of milliseconds): called on a worker thread, never on the event loop.
Invariant: past here there is no JSON and no text that the engine would have to look at.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from kvpilot_engine.core.ids import RequestId, TokenId
from kvpilot_engine.core.request import GenerationRequest
from kvpilot_engine.errors import InvalidRequestError, ModelNotServedError, NeverFitsError
from kvpilot_engine.server.body_parsing import parse_body
from kvpilot_engine.server.openai_schema import (
    ChatCompletionBody,
    ChatMessage,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from kvpilot_engine.server.prepared_call import CallOptions, PreparedCall
from kvpilot_engine.server.sampling_builder import SamplingBuilder
from kvpilot_engine.server.sampling_fields import GenerationBody
from kvpilot_engine.text.model_text import ModelText
from kvpilot_engine.text.output_plan import OutputPlan, plan_output
from kvpilot_engine.text.prompt_text import PromptText, describe_prompt
from kvpilot_engine.text.structured_output import build_grammar
from kvpilot_engine.text.tool_definitions import parse_tools

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions; a chat goes on to the model's limit."""


class RequestBuilder:
    """Bound to one loaded model. Safe to use from several threads."""

    def __init__(
        self,
        text: ModelText,
        *,
        served_names: tuple[str, ...],
        max_model_len: int,
        vocab_size: int,
        max_logprobs: int,
        takes_salt: bool = True,
    ) -> None:
        """`takes_salt`: whether a body may hold cache_salt; False where a trusted header brings it."""
        self._text = text
        self._served_names = served_names
        self._max_model_len = max_model_len
        self._takes_salt = takes_salt
        self._sampling = SamplingBuilder(
            text, max_model_len=max_model_len, vocab_size=vocab_size, max_logprobs=max_logprobs
        )
        tokenizer = text.tokenizer
        self._longest_token = max(
            (len(tokenizer.token_bytes(TokenId(i))) for i in range(tokenizer.vocab_size)), default=1
        )

    def prepare_chat(self, raw: bytes, options: CallOptions) -> PreparedCall:
        body = parse_body(ChatCompletionBody, raw)
        model = self._check_model(body.model)
        if body.truncate_prompt_tokens is None:
            self._check_text_length(sum(_content_size(message) for message in body.messages), "messages")
        plan = plan_output(body.output_fields, self._text)
        prompt = self._text.encode_chat(
            [message.model_dump(exclude_unset=True) for message in body.messages],
            tools=plan.template_tools,
            add_generation_prompt=body.opens_new_turn,
            continue_final_message=bool(body.continue_final_message),
            variables=body.template_variables,
        )
        prompts = [self._truncate(body, prompt, None)]
        return self._build(
            body, prompts, [], plan, model, options, prefix="chatcmpl", param="messages", max_tokens=None
        )

    def prepare_completion(self, raw: bytes, options: CallOptions) -> PreparedCall:
        body = parse_body(CompletionBody, raw)
        model = self._check_model(body.model)
        prompts: list[list[TokenId]] = []
        echoes: list[PromptText] = []
        for prompt in body.prompts:
            if isinstance(prompt, str):
                encoded = self._encode_text(
                    prompt, "prompt", add_bos=body.add_special_tokens, keeps_end=body.truncate_prompt_tokens is not None
                )
            else:
                encoded = self._sampling.check_ids(prompt, "prompt")
            ids = self._truncate(body, encoded, COMPLETION_MAX_TOKENS)
            prompts.append(ids)
            if body.echoes:
                is_whole = isinstance(prompt, str) and len(ids) == len(encoded)
                text = prompt if isinstance(prompt, str) and is_whole else None
                echoes.append(describe_prompt(self._text.tokenizer, ids, text=text))
        plan = OutputPlan(grammar=build_grammar(body.grammar_fields))
        return self._build(
            body, prompts, echoes, plan, model, options, prefix="cmpl", param="prompt", max_tokens=COMPLETION_MAX_TOKENS
        )

    def tokenize(self, raw: bytes) -> dict[str, object]:
        body = parse_body(TokenizeBody, raw)
        self._check_model(body.model)
        tools = parse_tools(body.tools)
        if body.messages is not None:
            self._check_text_length(sum(_content_size(message) for message in body.messages), "messages")
            ids = self._text.encode_chat(
                [message.model_dump(exclude_unset=True) for message in body.messages],
                tools=None if tools is None else tools.definitions,
                add_generation_prompt=body.add_generation_prompt,
                variables=body.chat_template_kwargs,
            )
        else:
            ids = self._encode_text(body.prompt or "", "prompt", add_bos=body.add_special_tokens)
        answer: dict[str, object] = {"count": len(ids), "max_model_len": self._max_model_len, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = [self._text.tokenizer.decode([token]) for token in ids]
        return answer

    def detokenize(self, raw: bytes) -> dict[str, object]:
        body = parse_body(DetokenizeBody, raw)
        self._check_model(body.model)
        return {"prompt": self._text.tokenizer.decode(self._sampling.check_ids(body.tokens, "tokens"))}

    def _build(
        self,
        body: GenerationBody,
        prompts: Sequence[list[TokenId]],
        echoes: Sequence[PromptText],
        plan: OutputPlan,
        model: str,
        options: CallOptions,
        *,
        prefix: str,
        param: str,
        max_tokens: int | None,
    ) -> PreparedCall:
        call_id = f"{prefix}-{secrets.token_hex(16)}"
        seed = self._sampling.draw_seed(body)
        salt = self._cache_salt(body, options)
        requests: list[GenerationRequest] = []
        for prompt in prompts:
            if not prompt:
                raise InvalidRequestError(f"{param} has no tokens; at least 1 is needed", param=param)
            sampling = self._sampling.build(body, len(prompt), seed=seed, param=param, default_max_tokens=max_tokens)
            requests += [
                GenerationRequest(
                    request_id=RequestId(f"{call_id}-{len(requests) + choice}"),
                    prompt_token_ids=tuple(prompt),
                    sampling=sampling,
                    choice=choice,
                    priority=body.priority or 0,
                    grammar=plan.grammar,
                    cache_salt=salt,
                )
                for choice in range(body.num_candidates)
            ]
        return PreparedCall(
            call_id=call_id,
            created=options.created,
            model=model,
            requests=tuple(requests),
            num_choices=body.num_choices,
            num_candidates=body.num_candidates,
            stop_strings=body.stop_strings,
            own_stop_ids=frozenset(TokenId(token) for token in body.stop_token_ids or ()),
            keeps_stop=bool(body.include_stop_str_in_output),
            skip_specials=body.skip_special_tokens is not False and plan.skips_specials,
            plan=plan,
            echoes=tuple(echoes),
            num_top=body.wanted_logprobs[1],
            shows_prompt_logprobs=body.prompt_logprobs is not None,
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            tells_ids=bool(body.return_token_ids),
            is_streamed=bool(body.stream),
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
        )

    def _cache_salt(self, body: GenerationBody, options: CallOptions) -> str:
        if not self._takes_salt and body.cache_salt:
            raise InvalidRequestError(
                "cache_salt is not allowed in the body; this server takes it from a header of its gateway "
                "(--cache-salt-header)",
                param="cache_salt",
            )
        return options.cache_salt or body.cache_salt or ""

    def _check_model(self, name: str | None) -> str:
        if name is None:
            return self._served_names[0]
        if name not in self._served_names:
            raise ModelNotServedError(f"the model {name[:200]!r} does not exist here; served: {self._served_names[0]}")
        return name

    def _encode_text(self, prompt: str, param: str, *, add_bos: bool = True, keeps_end: bool = False) -> list[TokenId]:
        """keeps_end: the prompt will be truncated, so only its end is looked at when it is far too long."""
        if keeps_end:
            prompt = prompt[-self._max_model_len * self._longest_token :]
        self._check_text_length(len(prompt), param)
        return self._text.encode_prompt(prompt, param=param, add_bos=add_bos)

    def _truncate(self, body: GenerationBody, prompt: list[TokenId], default_max_tokens: int | None) -> list[TokenId]:
        """The last truncate_prompt_tokens tokens; -1 keeps as many as fit beside the output."""
        wanted = body.truncate_prompt_tokens
        if wanted is None:
            return prompt
        if wanted > self._max_model_len:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {wanted}; this model's context is {self._max_model_len} tokens",
                param="truncate_prompt_tokens",
            )
        if wanted < 0:
            _, max_tokens = body.wanted_max_tokens
            output = max_tokens if max_tokens is not None else default_max_tokens or 1
            wanted = max(1, self._max_model_len - max(0, output))
        return prompt[-wanted:]

    def _check_text_length(self, num_chars: int, param: str) -> None:
        """Refuse before tokenizing what can't fit even if it were all of the vocabulary's longest token."""
        if num_chars > self._max_model_len * self._longest_token:
            least = num_chars // self._longest_token
            raise NeverFitsError(
                f"{param} has {num_chars} characters, at least {least} tokens; this model's context is "
                f"{self._max_model_len} tokens",
                param=param,
            )


def _content_size(message: ChatMessage) -> int:
    content = message.content
    if isinstance(content, str):
        return len(content)
    return sum(len(part["text"]) for part in content or () if isinstance(part.get("text"), str))
