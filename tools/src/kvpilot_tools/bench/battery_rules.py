"""Why our answers differ from vLLM's where they do: one rule for each difference that is meant.

Not for what could be mended. A rule covers as little as it can; the battery fails on a rule that covers nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One meant difference; patterns as in a shell, `*` for anything."""

    title: str
    reason: str
    kinds: tuple[str, ...]
    places: tuple[str, ...] = ("*",)
    cases: tuple[str, ...] = ("*",)
    theirs: str | None = None
    ours: str | None = None
    is_occasional: bool = False
    """May be without a difference: it hangs on what texts the models write."""


def _both(*names: str) -> tuple[str, ...]:
    return tuple(f"{route}: {name}" for route in ("chat", "completions") for name in names)


RULES: tuple[Rule, ...] = (
    Rule(
        title="Fields that are always null are absent",
        reason=(
            "vLLM writes many fields of other servers and deployments (`kv_transfer_params`, `metrics`, "
            "`service_tier`, `routed_experts`, `audio`, …) as `null`. We leave out what we never fill: clients "
            "read both as nothing."
        ),
        kinds=("missing",),
        theirs="null",
    ),
    Rule(
        title="`error.code` is a word",
        reason=(
            "vLLM repeats the HTTP status as a number. OpenAI's `code` is a word or null, and its clients "
            "branch on it (`context_length_exceeded`, `model_not_found`); ours is always one of the words "
            "listed in `engine-http.md`."
        ),
        kinds=("type",),
        places=(".error.code",),
        theirs="number",
        ours="string",
    ),
    Rule(
        title="`error.param` names the field",
        reason=(
            "Ours names the field in every error that is about one, vLLM's only where its parser found it; and "
            "ours is null where the body as a whole or the model's name is wrong."
        ),
        kinds=("type",),
        places=(".error.param",),
    ),
    Rule(
        title="Errors of routing have the OpenAI shape too",
        reason=(
            'An unknown path or method answers `{"detail": …}` in vLLM and `{"error": …}` in ours: under every '
            "path a client finds the same shape."
        ),
        kinds=("missing", "extra"),
        places=(".detail", ".error"),
    ),
    Rule(
        title="Cached tokens are always told",
        reason=(
            "vLLM fills `usage.prompt_tokens_details` only with `--enable-prompt-tokens-details`; ours always "
            "says how many tokens of the prompt came from the cache, as OpenAI does."
        ),
        kinds=("type", "extra"),
        places=(".usage.prompt_tokens_details*",),
    ),
    Rule(
        title="`usage` is null before the last event of a stream",
        reason=("With `include_usage`, OpenAI sends `usage: null` in all events but the last one; vLLM leaves it out."),
        kinds=("type",),
        places=(".usage",),
        cases=("* stream: include_usage true",),
    ),
    Rule(
        title="`logprobs.refusal` is there",
        reason=("OpenAI's chat log-probabilities have a list for refusals beside `content`; ours is always null."),
        kinds=("extra",),
        places=(".choices[].logprobs.refusal",),
    ),
    Rule(
        title="Ids of the prompt are told per choice",
        reason=(
            "With `return_token_ids` a stream of vLLM tells the prompt's ids once for chat and in a first event"
            " for completions, ours with the first event of each choice."
        ),
        kinds=("missing", "extra", "type"),
        places=(".prompt_token_ids", ".choices[].prompt_token_ids"),
        cases=("* stream: return_token_ids", "completions stream: echo"),
    ),
    Rule(
        title="Echo without output",
        reason=(
            "`echo` with `max_tokens: 0` scores a prompt: ours generates nothing and says so, vLLM generates a "
            "token. The prompt's own log-probabilities are in `logprobs`, as OpenAI has them; vLLM repeats them"
            " in `prompt_logprobs`."
        ),
        kinds=("missing", "counts"),
        places=(".choices[].prompt_logprobs", "completion_tokens"),
        cases=("completions: echo with *",),
    ),
    Rule(
        title="`/health` has a body",
        reason=("vLLM's is empty. Ours answers the state as JSON; probes look at the status alone."),
        kinds=("kind",),
        cases=("GET /health",),
    ),
    Rule(
        title="Wrong types are refused",
        reason=(
            'Python reads `"5"`, `"yes"`, `1` and `true` as numbers and booleans, and so does vLLM. Ours '
            "refuses them with the field's name: a client that sends them has a bug that it wants to see."
        ),
        kinds=("status",),
        theirs="200",
        ours="400",
        cases=(
            *_both(
                "temperature true", 'max_tokens "5"', "max_tokens true", 'ignore_eos "yes"', 'stream "yes"', "stream 1"
            ),
            'chat: max_completion_tokens "5"',
            "chat: logprobs 1",
            "completions: logprobs true",
            "completions: prompt [true]",
        ),
    ),
    Rule(
        title="Malformed structured output is the client's error",
        reason=('`structured_outputs: "x"` is a 500 in vLLM.'),
        kinds=("status",),
        theirs="500",
        ours="400",
        cases=_both('structured_outputs "x"'),
    ),
    Rule(
        title="Out of range is refused, not bent",
        reason=(
            "vLLM clips a `logit_bias` of 1000 to 100, ignores `best_of: 0` and gives an empty text for a token"
            " id outside the vocabulary. OpenAI's ranges are kept here."
        ),
        kinds=("status",),
        theirs="200",
        ours="400",
        cases=(*_both('logit_bias {"5": 1000}'), "completions: best_of 0", "detokenize: tokens [999999]"),
    ),
    Rule(
        title="Fields that contradict each other are refused",
        reason=(
            "Both `max_tokens` and `max_completion_tokens` with different values, `stream_options` without a "
            "stream, both a prompt and messages: vLLM silently takes one of them."
        ),
        kinds=("status",),
        theirs="200",
        ours="400",
        cases=(
            *_both("stream_options {}"),
            "chat: max_completion_tokens 1",
            "chat: max_completion_tokens 9",
            "chat: max_tokens 3 and max_completion_tokens 2",
            "tokenize: both",
        ),
    ),
    Rule(
        title="Roles are those of the API",
        reason=(
            "vLLM hands any role to the template, which for most models writes it into the prompt; ours knows "
            "the six roles of the API."
        ),
        kinds=("status",),
        theirs="200",
        ours="400",
        cases=('chat: messages [{"role": "king", "content": "x"}]',),
    ),
    Rule(
        title="Fields of vLLM's chat that we do not have",
        reason=("`echo` in chat and `documents` would change the answer, so they are refused by name and not ignored."),
        kinds=("status",),
        theirs="200",
        ours="400",
        cases=("chat: echo true", "chat stream: echo", 'chat: documents [{"title": "a", "text": "b"}]'),
    ),
    Rule(
        title="An empty model name is no model",
        reason=('vLLM takes `"model": ""` as its own one; ours takes only an absent or null name so.'),
        kinds=("status",),
        theirs="200",
        ours="404",
        cases=_both('model ""'),
    ),
    Rule(
        title="Other content types are 415",
        reason=("vLLM answers 400. The status that HTTP has for it tells the client what is wrong."),
        kinds=("status",),
        theirs="400",
        ours="415",
        cases=("* body: text/plain",),
    ),
    Rule(
        title="Several greedy choices are allowed",
        reason=(
            "vLLM refuses `n` above 1 with temperature 0. They are equal, but OpenAI answers them, and clients "
            "with a fixed `n` need not know the temperature."
        ),
        kinds=("status",),
        theirs="400",
        ours="200",
        cases=("*: n 2", "completions: n null", "completions: two prompts with n 2"),
    ),
    Rule(
        title="Null and empty mean not used",
        reason=(
            "`ignore_eos: null`, `structured_outputs: {}`, an empty `cache_salt`, `suffix` or list of tools, a "
            "user message without content: ours takes them as absent, as OpenAI does with optional fields; vLLM"
            " refuses them."
        ),
        kinds=("status",),
        theirs="400",
        ours="200",
        cases=(
            *_both("ignore_eos null", "structured_outputs {}", 'cache_salt ""'),
            'completions: suffix ""',
            "chat: tools []",
            'chat: tool_choice "auto"',
            'chat: messages [{"role": "user", "content": null}]',
        ),
    ),
    Rule(
        title="Fields without effect are not looked at",
        reason=(
            "`user` and `reasoning_effort` change nothing in ours, so that their values are free; vLLM parses them."
        ),
        kinds=("status",),
        theirs="400",
        ours="200",
        cases=(*_both("user 5"), 'chat: reasoning_effort "x"'),
    ),
    Rule(
        title="`continue_final_message` needs no second switch",
        reason=(
            "vLLM refuses it while `add_generation_prompt` has its default of true. Ours takes it as the wish "
            "that it is."
        ),
        kinds=("status",),
        theirs="400",
        ours="200",
        cases=("chat: continue_final_message true",),
    ),
    Rule(
        title="Control tokens in a message are text",
        reason=(
            "A user who writes `<|im_end|>` closes their own turn in vLLM and can open a system turn. In ours "
            "the characters are encoded as text, which takes more tokens."
        ),
        kinds=("counts",),
        places=("prompt_tokens",),
        cases=('chat: messages [{"role": "user", "content": "hi<|im_end|>*',),
    ),  # B12
    Rule(
        title="`best_of` is computed and counted",
        reason=(
            "vLLM ignores the field. Ours generates that many answers, returns the likeliest, and counts all "
            "their tokens, as OpenAI does."
        ),
        kinds=("counts",),
        places=("completion_tokens",),
        cases=("completions: best_of 2",),
    ),
    Rule(
        title="Answers are other texts",
        reason=(
            "Arithmetic, random numbers and the engine of grammars are not vLLM's, so a sampled or constrained "
            "answer may end at another place."
        ),
        kinds=("counts",),
        places=("finish_reasons", "completion_tokens"),
        cases=(
            "*temperature *",
            "*seed *",
            "*structured_outputs *",
            "*response_format *",
            "*guided_*",
            "*json_object*",
            "*tool_choice*",
            "chat: messages *",
            "chat: history *",
        ),
        is_occasional=True,
    ),
)
