"""All settings of an engine process: composes the parts' own classes and loads them from flags and environment.

`load` is a function of its two arguments. Order: default < environment < flag. All problems are reported.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpilot_engine.core.settings import CacheSettings, SchedulerSettings
from kvpilot_engine.errors import SettingsError
from kvpilot_engine.execution.settings import STEP_TARGET_S, ExecutionSettings
from kvpilot_engine.flags import FOREIGN, HONOURED, Flag
from kvpilot_engine.observability.logging_setup import LoggingSettings
from kvpilot_engine.server.cors import CorsSettings
from kvpilot_engine.server.settings import ServerSettings
from kvpilot_engine.service.settings import ServiceSettings

_LOG = logging.getLogger(__name__)
DEFAULT_TERMINATION_LOG = Path("/dev/termination-log")
"""Kubernetes makes this file in every container; elsewhere it does not exist and nothing is written."""
_FLAGS = {flag.option: flag for flag in HONOURED} | {alias: flag for flag in HONOURED for alias in flag.aliases}
_FOREIGN = {f"--{flag.name}": flag for flag in FOREIGN}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    tokenizer: Path | None = None
    """Stands in for the model's own tokenizer and template."""
    chat_template: Path | None = None
    generation_config: str = "auto"
    """auto | none | a folder: where sampling defaults come from."""
    tool_call_parser: str = "auto"
    """How the model writes tool calls; auto: as its chat template shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    model: str
    """As given: a path, hf://… or file://…; resolved before loading."""
    revision: str | None
    execution: ExecutionSettings
    cache: CacheSettings
    scheduler: SchedulerSettings
    service: ServiceSettings
    server: ServerSettings
    text: TextSettings
    logging: LoggingSettings
    warnings: tuple[str, ...] = ()
    """Flags that mean nothing here, to be logged once logging is set up."""

    @classmethod
    def load(cls, argv: Iterable[str], environ: Mapping[str, str]) -> EngineSettings:
        """Raises SettingsError with all problems."""
        reading = _Reading()
        reading.read_environment(environ)
        reading.read_arguments(list(argv))
        values = reading.values
        if "model" not in values and not any(problem.startswith("--model") for problem in reading.problems):
            reading.problems.append("--model (or `serve MODEL`, or KVPILOT_MODEL) is missing")
        if reading.problems:
            raise SettingsError(reading.problems)
        return _compose(values, reading.warnings)


class _Reading:
    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.problems: list[str] = []
        self.warnings: list[str] = []

    def read_environment(self, environ: Mapping[str, str]) -> None:
        for flag in HONOURED:
            raw = environ.get(flag.env_name)
            # A Service named `kvpilot` makes Kubernetes set KVPILOT_PORT=tcp://… in pods: that one isn't ours.
            if raw is None or raw.startswith("tcp://"):
                continue
            if flag.is_list:
                parts = [raw] if raw.startswith("[") else raw.split(",")
                self._take(flag, flag.env_name, [part for part in parts if part])
            elif raw or not flag.default_text:
                self._take(flag, flag.env_name, [raw])

    def read_arguments(self, argv: list[str]) -> None:
        rest = argv
        if rest and rest[0] == "serve":
            rest = rest[1:]
            if rest and not rest[0].startswith("-"):
                self._take(_FLAGS["--model"], "MODEL", [rest[0]])
                rest = rest[1:]
        while rest:
            word, rest = rest[0], rest[1:]
            name, has_value, inline = word.partition("=")
            name = f"--{name[2:].replace('_', '-')}" if name.startswith("--") else name
            num_words = next((i for i, other in enumerate(rest) if _is_flag(other)), len(rest))
            given = [inline] if has_value else rest[:num_words]
            if name in _FLAGS:
                flag = _FLAGS[name]
                num_taken = 0 if has_value or flag.is_switch else num_words if flag.is_list else min(1, num_words)
                wanted = ["true"] if flag.is_switch and not has_value else given if flag.is_list else given[:1]
                self._take(flag, name, wanted)
            elif name.startswith("--no-") and _is_switch(f"--{name[5:]}"):
                num_taken = 0
                self._take(_FLAGS[f"--{name[5:]}"], name, ["false"])
            elif name in _FOREIGN:
                foreign = _FOREIGN[name]
                num_taken = 0 if has_value else num_words if foreign.num_values is None else foreign.num_values
                (self.problems if foreign.is_refused else self.warnings).append(f"{name}: {foreign.reason}")
            else:
                num_taken = num_words if name.startswith("-") else 0
                close = difflib.get_close_matches(name, [*_FLAGS, *_FOREIGN], n=1)
                self.problems.append(f"{name}: unknown flag" + (f"; was {close[0]} meant?" if close else ""))
            rest = rest[num_taken:]

    def _take(self, flag: Flag, name: str, given: list[str]) -> None:
        if not given:
            self.problems.append(f"{name}: a value is needed")
            return
        try:
            parsed = [flag.parse(raw) for raw in given]
        except ValueError as error:
            shown = "(not shown)" if flag.name == "api-key" else repr(" ".join(given))
            self.problems.append(f"{name} is {shown}: {error}")
        else:
            self.values[flag.name] = parsed if flag.is_list else parsed[0]


def _is_flag(word: str) -> bool:
    return word.startswith("--") or word in _FLAGS


def _is_switch(option: str) -> bool:
    return option in _FLAGS and _FLAGS[option].is_switch


def _compose_cors(values: Mapping[str, Any]) -> CorsSettings:
    fields: dict[str, Any] = {
        name.replace("-", "_"): tuple(word for words in values[name] for word in words)
        for name in ("allowed-origins", "allowed-methods", "allowed-headers")
        if name in values
    }
    return CorsSettings(allow_credentials=values.get("allow-credentials", False), **fields)


def _compose(values: Mapping[str, Any], warnings: Iterable[str]) -> EngineSettings:
    """Only what was given is passed on, so that each default stands in one place: the part's own class."""

    def given(**names: str) -> dict[str, Any]:
        return {field: values[name] for field, name in names.items() if name in values}

    model = values["model"]
    limits = given(max_num_seqs="max-num-seqs", max_queue_len="max-queue-len")
    utilization = values.get("gpu-memory-utilization", ServiceSettings().gpu_memory_utilization)
    termination_log = DEFAULT_TERMINATION_LOG if DEFAULT_TERMINATION_LOG.is_file() else None
    return EngineSettings(
        model=model,
        revision=values.get("revision"),
        execution=ExecutionSettings(
            model=Path(model),
            memory_utilization=utilization,
            step_target_s=None if "max-num-batched-tokens" in values else STEP_TARGET_S,
            **given(
                dtype="dtype",
                quantization="quantization",
                kv_cache_dtype="kv-cache-dtype",
                device_memory_bytes="device-memory",
                num_threads="num-threads",
                num_blocks_override="num-gpu-blocks-override",
                kv_cache_memory_bytes="kv-cache-memory-bytes",
                max_model_len="max-model-len",
            ),
        ),
        cache=CacheSettings(**given(block_size="block-size", enable_prefix_caching="enable-prefix-caching")),
        scheduler=SchedulerSettings(**limits, **given(max_num_batched_tokens="max-num-batched-tokens")),
        service=ServiceSettings(
            gpu_memory_utilization=utilization,
            termination_log=values.get("termination-log", termination_log),
            **limits,
            **given(tuning_file="tuning-file", state_dir="state-dir", pod_uid="pod-uid", step_timeout_s="step-timeout"),
        ),
        server=ServerSettings(
            served_names=tuple(values.get("served-model-name", [model])),
            model_root=model,
            api_keys=tuple(values.get("api-key", ())),
            cors=_compose_cors(values),
            **given(
                host="host",
                port="port",
                api_key_file="api-key-file",
                cache_salt_header="cache-salt-header",
                max_logprobs="max-logprobs",
                drain_timeout_s="drain-timeout",
                drain_grace_s="drain-grace",
                keep_alive_s="keep-alive",
                request_timeout_s="request-timeout",
            ),
        ),
        text=TextSettings(
            **given(
                tokenizer="tokenizer",
                chat_template="chat-template",
                generation_config="generation-config",
                tool_call_parser="tool-call-parser",
            )
        ),
        logging=LoggingSettings(**given(level="log-level", log_format="log-format")),
        warnings=tuple(warnings),
    )
