"""The official client against every route: its typed answers, streamed and not, and its own error classes.

Typed strictly: what the client would only pass through is held to the client's own types too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pydantic
import pytest
import pytest_asyncio
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from kvpilot_engine.server.testing import make_byte_constraints
from kvpilot_engine.service.testing import FakeModelLoader

Kit = Any
Start = Any
pytestmark = pytest.mark.asyncio(loop_scope="module")
MESSAGES: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "@"}]
TEMPLATE = (
    "{# <tool_call> #}{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools | length }}{% endif %}"
)
FIND: Any = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {
            "type": "object",
            "properties": {"q": {"type": "string"}},
            "required": ["q"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "x"}}\n</tool_call>'


class Answer(pydantic.BaseModel):
    """What a structured answer is parsed into."""

    q: str


def strictly(answer: Any) -> Any:
    """The answer, after its own type took it again without converting anything."""
    type(answer).model_validate(answer.model_dump(exclude_unset=True), strict=True)
    return answer


def make_client(kit: Kit, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=str(kit.client.make_url("/v1")), api_key=key, max_retries=0, timeout=30)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(start_shared: Start) -> AsyncIterator[openai.AsyncOpenAI]:
    kit = await start_shared(FakeModelLoader(make_constraints=make_byte_constraints))
    async with make_client(kit) as made:
        yield made


async def say(start: Start, said: str) -> openai.AsyncOpenAI:
    """A client of a server whose model says just that."""
    loader = FakeModelLoader(max_model_len=340, said=said, make_constraints=make_byte_constraints)
    return make_client(await start(loader, template=TEMPLATE))


async def test_models_are_listed_and_retrieved(client: openai.AsyncOpenAI) -> None:
    models = [strictly(model) async for model in client.models.list()]
    assert [model.id for model in models] == ["fake", "alias"]
    model = strictly(await client.models.retrieve("alias"))
    assert isinstance(model, Model)
    assert (model.id, model.object, model.owned_by) == ("alias", "model", "kvpilot")
    assert model.created > 1_700_000_000


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = strictly(await client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=4, n=2))
    assert isinstance(answer, ChatCompletion)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "ABCD", "length")
        assert choice.message.tool_calls is None
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (9, 8, 17)
    assert answer.usage.prompt_tokens_details is not None


async def test_chat_with_every_sampling_field(client: openai.AsyncOpenAI) -> None:
    answer = strictly(
        await client.chat.completions.create(
            model="fake",
            messages=MESSAGES,
            max_completion_tokens=5,
            temperature=0.5,
            top_p=0.9,
            presence_penalty=0.1,
            frequency_penalty=-0.1,
            logit_bias={"65": 1},
            seed=7,
            stop=["D"],
            user="somebody",
            metadata={"a": "b"},
            store=False,
            service_tier="auto",
            extra_body={
                "top_k": 5,
                "min_p": 0.1,
                "repetition_penalty": 1.1,
                "stop_token_ids": [90],
                "min_tokens": 1,
                "bad_words": ["zz"],
                "ignore_eos": False,
                "priority": 1,
                "cache_salt": "tenant",
            },
        )
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("ABC", "stop")


async def test_chat_log_probabilities(client: openai.AsyncOpenAI) -> None:
    answer = strictly(
        await client.chat.completions.create(
            model="fake", messages=MESSAGES, max_tokens=2, logprobs=True, top_logprobs=4
        )
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [token.token for token in logprobs.content] == ["A", "B"]
    assert [token.bytes for token in logprobs.content] == [[65], [66]]
    assert [len(token.top_logprobs) for token in logprobs.content] == [4, 4]
    assert logprobs.content[0].top_logprobs[3].logprob == -9999.0  # B9


@pytest.mark.parametrize("logprobs", [False, True])
async def test_streamed_chat_joins_to_the_whole(client: openai.AsyncOpenAI, logprobs: bool) -> None:
    options: Any = {"model": "fake", "messages": MESSAGES, "max_tokens": 5, "n": 2}
    options |= {"logprobs": True, "top_logprobs": 2} if logprobs else {}
    whole = await client.chat.completions.create(**options)
    stream = await client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    chunks: list[ChatCompletionChunk] = [strictly(chunk) async for chunk in stream]
    for choice in whole.choices:
        own = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.delta.content or "" for c in own) == choice.message.content
        assert own[0].delta.role == "assistant"
        assert [c.finish_reason for c in own if c.finish_reason] == [choice.finish_reason]
        told = [token for c in own if c.logprobs and c.logprobs.content for token in c.logprobs.content]
        assert told == (choice.logprobs.content if choice.logprobs else [])
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


async def test_the_client_s_own_stream_helper(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="fake", messages=MESSAGES) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert kinds.count("content.done") == 1
    assert final.choices[0].message.content == "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@pytest.mark.parametrize(
    "prompt", ["@", ["@", "@@"], [64], [[64], [65, 66]]], ids=["text", "texts", "ids", "lists of ids"]
)
async def test_completions_take_every_form_of_prompt(client: openai.AsyncOpenAI, prompt: Any) -> None:
    answer = strictly(await client.completions.create(model="fake", prompt=prompt, max_tokens=3))
    assert isinstance(answer, Completion)
    assert len(answer.choices) == (2 if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1)
    assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
    assert answer.choices[0].text == "ABC"


async def test_completion_log_probabilities_with_echo(client: openai.AsyncOpenAI) -> None:  # A16, B7
    # not strictly: nothing precedes the first token, which the API tells as null and the client's type does not know
    answer = await client.completions.create(model="fake", prompt="@", max_tokens=2, logprobs=2, echo=True)
    choice = answer.choices[0]
    assert choice.text == "@AB"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["@", "A", "B"]
    assert choice.logprobs.text_offset == [0, 1, 2]
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[1] == -0.5


async def test_streamed_completion_joins_to_the_whole(client: openai.AsyncOpenAI) -> None:
    options: Any = {"model": "fake", "prompt": ["@", "A"], "max_tokens": 4, "logprobs": 1}
    whole = await client.completions.create(**options)
    stream = await client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    # not strictly: the client has one type for chunks and answers, whose finish reason is never null
    chunks = [chunk async for chunk in stream]
    for choice in strictly(whole).choices:
        own = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.text for c in own) == choice.text
        assert choice.logprobs is not None
        assert [token for c in own if c.logprobs for token in c.logprobs.tokens or []] == choice.logprobs.tokens
    assert chunks[-1].usage == whole.usage


async def test_structured_output_is_parsed_by_the_client(client: openai.AsyncOpenAI, start: Start) -> None:
    async with await say(start, '{"q": "x"}') as said:
        parsed = await said.chat.completions.parse(model="fake", messages=MESSAGES, response_format=Answer)
        assert parsed.choices[0].message.parsed == Answer(q="x")
        answer = strictly(
            await said.chat.completions.create(model="fake", messages=MESSAGES, response_format={"type": "json_object"})
        )
        assert json.loads(answer.choices[0].message.content) == {"q": "x"}
        async with said.chat.completions.stream(model="fake", messages=MESSAGES, response_format=Answer) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == Answer(q="x")


async def test_tool_calls_are_typed_whole_and_streamed(start: Start) -> None:
    options: Any = {"model": "fake", "messages": MESSAGES, "tools": [FIND], "tool_choice": "required"}
    async with await say(start, CALL) as said:
        answer = strictly(await said.chat.completions.create(**options))
        async with said.chat.completions.stream(**options) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_completion()
    for message, reason in [(c.message, c.finish_reason) for c in (answer.choices[0], final.choices[0])]:
        assert reason == "tool_calls"
        assert not message.content
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "find", {"q": "x"})
        assert call.id
    assert "tool_calls.function.arguments.done" in [event.type for event in events]


async def test_a_tool_call_and_its_result_go_back_into_the_conversation(start: Start) -> None:
    async with await say(start, CALL) as said:
        first = await said.chat.completions.create(model="fake", messages=MESSAGES, tools=[FIND])
        assert first.choices[0].message.tool_calls is not None
        call_id = first.choices[0].message.tool_calls[0].id
        history: list[Any] = [
            *MESSAGES,
            first.choices[0].message,
            {"role": "tool", "tool_call_id": call_id, "content": "42"},
        ]
        second = await said.chat.completions.create(model="fake", messages=history, tools=[FIND], tool_choice="none")
    assert second.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("options", "kind", "param"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, None),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"max_tokens": 10_000}, openai.BadRequestError, "max_tokens"),
        ({"response_format": {"type": "xml"}}, openai.BadRequestError, "response_format.type"),
        ({"stream": True, "top_logprobs": 3}, openai.BadRequestError, "top_logprobs"),
    ],
)
async def test_errors_are_the_client_s_own_classes(
    client: openai.AsyncOpenAI, options: dict[str, Any], kind: type[openai.APIStatusError], param: str | None
) -> None:  # B25
    with pytest.raises(kind) as caught:
        await client.chat.completions.create(**{"model": "fake", "messages": MESSAGES, **options})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert caught.value.code
    assert caught.value.request_id


async def test_unknown_models_and_routes_are_not_found(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model="fake", input="x")


async def test_a_wrong_key_is_an_authentication_error(start: Start) -> None:
    kit = await start(api_keys=("right",))
    async with make_client(kit, "wrong") as wrong, make_client(kit, "right") as right:
        with pytest.raises(openai.AuthenticationError):
            await wrong.models.list()
        assert (await right.models.retrieve("fake")).id == "fake"


async def test_the_blocking_client_reads_the_same(client: openai.AsyncOpenAI) -> None:
    def ask() -> tuple[str, str]:
        options: Any = {"model": "fake", "messages": MESSAGES, "max_tokens": 3}
        with openai.OpenAI(base_url=client.base_url, api_key="none", max_retries=0) as blocking:
            whole = blocking.chat.completions.create(**options)
            chunks = list(blocking.chat.completions.create(**options, stream=True))
        return whole.choices[0].message.content or "", "".join(c.choices[0].delta.content or "" for c in chunks)

    assert await asyncio.to_thread(ask) == ("ABC", "ABC")
