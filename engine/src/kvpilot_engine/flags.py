"""The one table of command-line flags: honoured, warned about, refused. The help text and the reference come from it.

vLLM's names where the meaning is the same, so that a vLLM command line works after changing the module's name; a flag
that means nothing here is named in a warning, one whose effect is missing here is an error. Never silence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from kvpilot_engine.text.tool_dialects import DIALECT_NAMES

ENV_PREFIX = "KVPILOT_"
_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?) ?(?:(?P<prefix>[kKMGT])(?P<binary>i?))?[Bb]?")
_HEADER_NAME = re.compile(r"[A-Za-z0-9-]{1,64}")
_PREFIX_POWER = {"k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """An honoured flag. Its environment twin is KVPILOT_ and the name in capitals; the flag wins."""

    name: str
    group: str
    text: str
    parse: Callable[[str], object]
    """Raises ValueError with what is wanted. Not asked for switches."""
    metavar: str = ""
    default_text: str = ""
    is_switch: bool = False
    """Takes no value; `--no-NAME` turns it off."""
    is_list: bool = False
    """Takes one or more values."""
    aliases: tuple[str, ...] = ()

    @property
    def option(self) -> str:
        return f"--{self.name}"

    @property
    def env_name(self) -> str:
        return ENV_PREFIX + self.name.upper().replace("-", "_")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFlag:
    """A flag of others. `num_values` says what to skip: 0, 1, or None for all up to the next flag."""

    name: str
    reason: str
    num_values: int | None = 1
    is_refused: bool = False


def parse_text(raw: str) -> str:
    if not raw:
        raise ValueError("a value is needed")
    return raw


def parse_path(raw: str) -> Path:
    return Path(parse_text(raw))


def parse_int(low: int, high: int = 2**31) -> Callable[[str], int]:
    """An integer in low..high; 8k is 8000 and 8K is 8192, as in vLLM."""

    def parse(raw: str) -> int:
        scale = {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}.get(raw[-1:], 1)
        digits = raw[:-1] if scale > 1 else raw
        if not (digits.isascii() and digits.isdigit()) or not low <= int(digits) * scale <= high:
            raise ValueError(f"an integer from {low} to {high} is needed")
        return int(digits) * scale

    return parse


def parse_number(low: float, high: float, *, is_low_excluded: bool = False) -> Callable[[str], float]:
    def parse(raw: str) -> float:
        wanted = f"a number {'above' if is_low_excluded else 'from'} {low:g} to {high:g} is needed"
        try:
            value = float(raw)
        except ValueError:
            raise ValueError(wanted) from None
        if not low <= value <= high or (is_low_excluded and value == low):
            raise ValueError(wanted)
        return value

    return parse


def parse_bytes(raw: str) -> int:
    """A size in whole bytes: a number, alone or with a unit, as people and Kubernetes write it."""
    found = _SIZE.fullmatch(raw.strip())
    if found is not None:
        unit = (1024 if found["binary"] else 1000) ** _PREFIX_POWER.get(found["prefix"], 0)
        size = int(Decimal(found["number"]) * unit)
        if 1 <= size < 2**63:
            return size
    raise ValueError("a size is needed: bytes (1073741824), or with a unit (512MiB, 4GiB, 4Gi, 1.5GB, 4G)")


def parse_choice(
    *choices: str, later: Iterable[str] = (), same: Mapping[str, str] | None = None
) -> Callable[[str], str]:
    """One of `choices`; `later` are values that exist elsewhere and are not supported here yet, `same` other names."""

    def parse(raw: str) -> str:
        raw = (same or {}).get(raw, raw)
        if raw in later:
            raise ValueError(f"{raw} is not supported yet; supported: {', '.join(choices)}")
        if raw not in choices:
            raise ValueError(f"one of {', '.join(choices)} is needed")
        return raw

    return parse


def parse_generation_config(raw: str) -> str:
    return "none" if raw == "vllm" else parse_text(raw)


def parse_bool(raw: str) -> bool:
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if raw.lower() not in values:
        raise ValueError("true or false is needed")
    return values[raw.lower()]


def parse_words(raw: str) -> tuple[str, ...]:
    """One word, or vLLM's form, a JSON list of them."""
    if not raw.startswith("["):
        return (parse_text(raw),)
    try:
        words = json.loads(raw)
    except ValueError:
        words = None
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        raise ValueError("a word or a JSON list of words is needed")
    return tuple(words)


def parse_header_name(raw: str) -> str:
    if not _HEADER_NAME.fullmatch(raw):
        raise ValueError("the name of a header is needed")
    return raw


_SERVE, _MODEL, _MEMORY, _BATCH, _POD, _LOG = "Serving", "Model", "Memory", "Batching", "Platform", "Logging"

HONOURED: tuple[Flag, ...] = (
    Flag(
        name="model",
        group=_MODEL,
        metavar="MODEL",
        parse=parse_text,
        text="GGUF file, model folder, hf://REPO[:VARIANT][@REVISION] or file:///PATH; also the word after `serve`",
    ),
    Flag(
        name="served-model-name",
        group=_MODEL,
        metavar="NAME",
        is_list=True,
        parse=parse_text,
        default_text="MODEL as given",
        text="names that requests may use; the first is shown in answers and metrics",
    ),
    Flag(name="revision", group=_MODEL, metavar="REV", parse=parse_text, text="branch, tag or commit of hf:// models"),
    Flag(
        name="tokenizer",
        group=_MODEL,
        metavar="PATH",
        parse=parse_path,
        default_text="the model's own",
        text="file or folder whose tokenizer and chat template are used instead",
    ),
    Flag(
        name="chat-template",
        group=_MODEL,
        metavar="PATH",
        parse=parse_path,
        default_text="the model's own",
        text="file with a jinja chat template",
    ),
    Flag(
        name="dtype",
        group=_MODEL,
        metavar="TYPE",
        parse=parse_choice("auto", "float32", later=("half", "float16", "bfloat16"), same={"float": "float32"}),
        default_text="auto",
        text="arithmetic; on the CPU auto is compiled kernels on weights as stored, float32 the exact reference",
    ),
    Flag(
        name="quantization",
        group=_MODEL,
        metavar="NAME",
        parse=parse_choice("auto", "none", "int8", later=("fp8", "gptq", "awq", "bitsandbytes"), same={"gguf": "auto"}),
        default_text="auto",
        aliases=("-q",),
        text="auto and none keep what the model's files say; int8 makes 16 and 32 bit weights 8 bit",
    ),
    Flag(
        name="kv-cache-dtype",
        group=_MODEL,
        metavar="TYPE",
        parse=parse_choice("auto", "float16", "bfloat16", "float32", later=("fp8", "fp8_e4m3", "fp8_e5m2")),
        default_text="auto",
        text="auto is bfloat16 on processors with AMX, else float16; and float32 with --dtype float32",
    ),
    Flag(
        name="tensor-parallel-size",
        group=_MODEL,
        metavar="N",
        parse=parse_int(1, 1),
        default_text="1",
        aliases=("-tp",),
        text="devices that share one model; only 1 for now",
    ),
    Flag(
        name="generation-config",
        group=_MODEL,
        metavar="WHERE",
        parse=parse_generation_config,
        default_text="auto",
        text="sampling defaults: auto (the model's generation_config.json), none (or vllm: the API's), or a folder",
    ),
    Flag(
        name="tool-call-parser",
        group=_MODEL,
        metavar="NAME",
        parse=parse_choice(*DIALECT_NAMES),
        default_text="auto",
        text="how the model writes tool calls: auto (as its chat template shows), hermes, llama3_json, mistral or json",
    ),
    Flag(
        name="device",
        group=_MEMORY,
        metavar="KIND",
        parse=parse_choice("cpu", "auto", later=("cuda",)),
        default_text="cpu",
        text="where the model runs",
    ),
    Flag(
        name="device-memory",
        group=_MEMORY,
        metavar="SIZE",
        parse=parse_bytes,
        default_text="the container's limit",
        text="total memory of the device, on the CPU",
    ),
    Flag(
        name="gpu-memory-utilization",
        group=_MEMORY,
        metavar="SHARE",
        parse=parse_number(0, 1, is_low_excluded=True),
        default_text="0.9",
        text="share of the device's total memory for this process; the tuning file wins over it",
    ),
    Flag(
        name="num-gpu-blocks-override",
        group=_MEMORY,
        metavar="N",
        parse=parse_int(1),
        default_text="as many as fit",
        text="use at most this many KV blocks",
    ),
    Flag(
        name="kv-cache-memory-bytes",
        group=_MEMORY,
        metavar="SIZE",
        parse=parse_bytes,
        default_text="what is left of the share",
        text="use at most this much memory for KV blocks",
    ),
    Flag(
        name="block-size",
        group=_MEMORY,
        metavar="TOKENS",
        parse=parse_int(1, 256),
        default_text="16",
        text="tokens per KV block",
    ),
    Flag(
        name="enable-prefix-caching",
        group=_MEMORY,
        is_switch=True,
        parse=parse_bool,
        default_text="on",
        text="reuse the blocks of equal prompt prefixes",
    ),
    Flag(
        name="max-model-len",
        group=_BATCH,
        metavar="TOKENS",
        parse=parse_int(1),
        default_text="the longest that fits",
        text="longest sequence, prompt and output together",
    ),
    Flag(
        name="max-num-seqs",
        group=_BATCH,
        metavar="N",
        parse=parse_int(1, 4096),
        default_text="64",
        text="most sequences in one step",
    ),
    Flag(
        name="max-num-batched-tokens",
        group=_BATCH,
        metavar="TOKENS",
        parse=parse_int(1),
        default_text="what the device computes in 150 ms, at most 512",
        text="token budget of one step, prefill and decode together",
    ),
    Flag(
        name="max-queue-len",
        group=_BATCH,
        metavar="N",
        parse=parse_int(0),
        default_text="256",
        text="most choices waiting for a place; one more is refused with 429",
    ),
    Flag(
        name="num-threads",
        group=_BATCH,
        metavar="N",
        parse=parse_int(1, 1024),
        default_text="the container's CPUs",
        text="threads of the CPU path",
    ),
    Flag(
        name="host",
        group=_SERVE,
        metavar="ADDRESS",
        parse=parse_text,
        default_text="0.0.0.0",  # noqa: S104  a server in a pod listens on every address
        text="address to listen on",
    ),
    Flag(
        name="port",
        group=_SERVE,
        metavar="PORT",
        parse=parse_int(0, 65535),
        default_text="8000",
        text="0 takes a free one",
    ),
    Flag(
        name="api-key",
        group=_SERVE,
        metavar="KEY",
        is_list=True,
        parse=parse_text,
        default_text="none",
        text="keys, one of which is asked for under /v1; better given as KVPILOT_API_KEY (several with commas), "
        "which other users can't see",
    ),
    Flag(
        name="api-key-file",
        group=_SERVE,
        metavar="PATH",
        parse=parse_path,
        default_text="none",
        text="file with more keys, one a line",
    ),
    Flag(
        name="allowed-origins",
        group=_SERVE,
        metavar="ORIGIN",
        is_list=True,
        parse=parse_words,
        default_text="none",
        text="sites whose pages may call this server from a browser; * for all; also as a JSON list",
    ),
    Flag(
        name="allowed-methods",
        group=_SERVE,
        metavar="METHOD",
        is_list=True,
        parse=parse_words,
        default_text="*",
        text="methods that those pages may use",
    ),
    Flag(
        name="allowed-headers",
        group=_SERVE,
        metavar="HEADER",
        is_list=True,
        parse=parse_words,
        default_text="*",
        text="headers that those pages may send",
    ),
    Flag(
        name="allow-credentials",
        group=_SERVE,
        is_switch=True,
        parse=parse_bool,
        default_text="off",
        text="those pages may send credentials",
    ),
    Flag(
        name="cache-salt-header",
        group=_SERVE,
        metavar="NAME",
        parse=parse_header_name,
        default_text="none",
        text="header in which a trusted gateway sends the cache salt; cache_salt in a body is refused then",
    ),
    Flag(
        name="max-logprobs",
        group=_SERVE,
        metavar="N",
        parse=parse_int(0, 1000),
        default_text="20",
        text="most log-probabilities of alternatives that a request may ask for, per token",
    ),
    Flag(
        name="request-timeout",
        group=_SERVE,
        metavar="SECONDS",
        parse=parse_number(0, 86400, is_low_excluded=True),
        default_text="1800",
        text="deadline of one request; the header x-request-timeout may ask for a shorter one",
    ),
    Flag(
        name="keep-alive",
        group=_SERVE,
        metavar="SECONDS",
        parse=parse_number(0, 3600, is_low_excluded=True),
        default_text="15",
        text="a silent stream gets a comment this often",
    ),
    Flag(
        name="drain-timeout",
        group=_SERVE,
        metavar="SECONDS",
        parse=parse_number(0, 86400),
        default_text="110",
        text="after SIGTERM, seconds until what still runs is cut off; keep it below the pod's grace period",
    ),
    Flag(
        name="drain-grace",
        group=_SERVE,
        metavar="SECONDS",
        parse=parse_number(0, 3600),
        default_text="5",
        text="after SIGTERM, seconds in which late arrivals are still served",
    ),
    Flag(
        name="step-timeout",
        group=_SERVE,
        metavar="SECONDS",
        parse=parse_number(0, 3600, is_low_excluded=True),
        default_text="60",
        text="an engine silent for this long counts as hung: /livez turns 503",
    ),
    Flag(
        name="tuning-file",
        group=_POD,
        metavar="PATH",
        parse=parse_path,
        default_text="none",
        text="file of the operator with the share of memory to use; watched",
    ),
    Flag(
        name="state-dir",
        group=_POD,
        metavar="DIR",
        parse=parse_path,
        default_text="none",
        text="folder that survives a container's restart, for the start ledger",
    ),
    Flag(
        name="termination-log",
        group=_POD,
        metavar="PATH",
        parse=parse_path,
        default_text="/dev/termination-log where it exists",
        text="where the last words go",
    ),
    Flag(
        name="pod-uid", group=_POD, metavar="UID", parse=parse_text, text="selects this pod's value in the tuning file"
    ),
    Flag(
        name="log-level",
        group=_LOG,
        metavar="LEVEL",
        parse=parse_choice("DEBUG", "INFO", "WARNING", "ERROR"),
        default_text="INFO",
        text="least level of what is logged",
    ),
    Flag(
        name="log-format",
        group=_LOG,
        metavar="FORM",
        parse=parse_choice("text", "json"),
        default_text="text",
        text="key=value for people, JSON for machines",
    ),
)

_NO_MEANING = "has no meaning here"
FOREIGN: tuple[ForeignFlag, ...] = (
    ForeignFlag(name="enable-chunked-prefill", num_values=0, reason="chunked prefill is always on"),
    ForeignFlag(name="swap-space", reason="preempted sequences are recomputed, never swapped"),
    ForeignFlag(name="cpu-offload-gb", reason=_NO_MEANING),
    ForeignFlag(name="enforce-eager", num_values=0, reason="there are no graphs to turn off"),
    ForeignFlag(name="disable-log-requests", num_values=0, reason="requests' texts are never logged"),
    ForeignFlag(name="no-enable-log-requests", num_values=0, reason="requests' texts are never logged"),
    ForeignFlag(name="enable-log-requests", num_values=0, reason="requests' texts are never logged"),
    ForeignFlag(name="disable-log-stats", num_values=0, reason="statistics are on /metrics only"),
    ForeignFlag(name="trust-remote-code", num_values=0, reason="code from model repositories is never run"),
    ForeignFlag(name="uvicorn-log-level", reason="use --log-level"),
    ForeignFlag(name="disable-uvicorn-access-log", num_values=0, reason="there is no access log"),
    ForeignFlag(name="distributed-executor-backend", reason=_NO_MEANING),
    ForeignFlag(name="async-scheduling", num_values=0, reason=_NO_MEANING),
    ForeignFlag(name="seed", reason="a request's seed is its own"),
    ForeignFlag(
        name="no-enable-chunked-prefill", num_values=0, is_refused=True, reason="chunked prefill can't be turned off"
    ),
    ForeignFlag(name="enable-auto-tool-choice", num_values=0, reason="models whose template takes tools may call them"),
    ForeignFlag(name="reasoning-parser", is_refused=True, reason="reasoning output is not split yet"),
    ForeignFlag(name="enable-lora", num_values=0, is_refused=True, reason="adapters are not supported yet"),
    ForeignFlag(name="lora-modules", num_values=None, is_refused=True, reason="adapters are not supported yet"),
    ForeignFlag(name="speculative-config", is_refused=True, reason="speculative decoding is not supported yet"),
    ForeignFlag(name="pipeline-parallel-size", is_refused=True, reason="one device holds the whole model"),
    ForeignFlag(name="data-parallel-size", is_refused=True, reason="run more replicas instead"),
    ForeignFlag(name="root-path", is_refused=True, reason="serve under / and let the gateway rewrite"),
    ForeignFlag(name="ssl-keyfile", is_refused=True, reason="TLS ends in front of the server"),
    ForeignFlag(name="ssl-certfile", is_refused=True, reason="TLS ends in front of the server"),
    ForeignFlag(
        name="chunked-prefill",
        num_values=0,
        is_refused=True,
        reason="--enable-chunked-prefill was meant; it is always on",
    ),
    ForeignFlag(name="max-chunk-list-len", is_refused=True, reason="--max-num-batched-tokens was meant"),
    ForeignFlag(name="num-prefill-threads", is_refused=True, reason="--max-num-batched-tokens was meant"),
)


def build_help() -> str:
    """What --help prints."""
    lines = [
        "usage: kvpilot-engine serve MODEL [flags]",
        "       python -m kvpilot_engine --model MODEL [flags]",
        "",
        "Serve a model through the OpenAI API, with its memory accounted for to the byte.",
        f"Every flag has an environment twin ({ENV_PREFIX} and its name in capitals); the flag wins.",
    ]
    for group in dict.fromkeys(flag.group for flag in HONOURED):
        lines += ["", f"{group}:"]
        for flag in HONOURED:
            if flag.group != group:
                continue
            values = "" if flag.is_switch else f" {flag.metavar}{' …' if flag.is_list else ''}"
            option = f"--[no-]{flag.name}" if flag.is_switch else flag.option
            default = f" (default: {flag.default_text})" if flag.default_text else ""
            lines += [f"  {option}{values}", f"      {flag.text}{default}"]
    lines += ["", "Flags of vLLM that are accepted with a warning or refused: docs/reference/flags.md", ""]
    return "\n".join(lines)


def build_reference() -> str:
    """docs/reference/flags.md."""
    lines = [
        "# The engine's flags",
        "",
        "Generated from `kvpilot_engine.flags` by `python -m kvpilot_engine --print-flag-reference`; a test compares.",
        "",
        "## Honoured",
        "",
        "The flag wins over its environment variable. Underscores may stand for dashes.",
        "",
        "| flag | environment | default | meaning |",
        "|---|---|---|---|",
    ]
    for flag in HONOURED:
        option = f"`--[no-]{flag.name}`" if flag.is_switch else f"`{flag.option} {flag.metavar}`"
        option += "".join(f", `{alias}`" for alias in flag.aliases)
        lines.append(f"| {option} | `{flag.env_name}` | {flag.default_text or '–'} | {flag.text} |")
    for title, is_refused in (("Accepted with a warning, without effect", False), ("Refused", True)):
        lines += ["", f"## {title}", "", "| flag | why |", "|---|---|"]
        lines += [f"| `--{flag.name}` | {flag.reason} |" for flag in FOREIGN if flag.is_refused is is_refused]
    return "\n".join(lines) + "\n"
