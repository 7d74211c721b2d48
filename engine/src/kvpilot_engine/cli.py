"""The composition root: arguments → settings → build everything → run.

The only place that maps a failed start to an exit code. Importing this module imports no torch: the parent never needs
it, and the engine child imports it when it loads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, disable_created_metrics

from kvpilot_engine.core.settings import CacheSettings, SchedulerSettings
from kvpilot_engine.errors import ExitCode, SettingsError
from kvpilot_engine.execution.cpu_threads import limit_spinning, prefer_openmp
from kvpilot_engine.execution.settings import ExecutionSettings
from kvpilot_engine.execution.start_times import StartTimes
from kvpilot_engine.flags import build_help, build_reference
from kvpilot_engine.kernels.compile_cache import prepare_compile_cache
from kvpilot_engine.models.source import resolve_model
from kvpilot_engine.observability.logging_setup import configure_logging
from kvpilot_engine.server.app import create_app
from kvpilot_engine.server.lifecycle import serve
from kvpilot_engine.server.ops_routes import ENGINE_VERSION
from kvpilot_engine.service.async_engine import AsyncEngine
from kvpilot_engine.service.ports import ServingModel
from kvpilot_engine.service.termination import describe_failure, write_termination
from kvpilot_engine.settings import DEFAULT_TERMINATION_LOG, EngineSettings
from kvpilot_engine.text.model_text import ModelText, load_model_text, load_tokenizer

_LOG = logging.getLogger(__name__)
DEVICE_NAME = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionModelLoader:
    """Loads the real model, in the engine child. Picklable."""

    model: str
    revision: str | None
    execution: ExecutionSettings
    cache: CacheSettings
    scheduler: SchedulerSettings
    tokenizer: Path | None = None
    """Stands in for the model's own, as in the parent."""
    device_name: str = DEVICE_NAME

    def load(self, utilization: float) -> ServingModel:
        limit_spinning(os.environ)
        prefer_openmp(os.environ)
        prepare_compile_cache(os.environ)
        times = StartTimes()
        with times.part("imports"):  # numba, perhaps torch: in the child only
            from kvpilot_engine.execution.loading import load_engine
            from kvpilot_engine.text.constraints import GrammarCompiler

        path = resolve_model(self.model, revision=self.revision)
        execution = replace(self.execution, model=path, memory_utilization=utilization)
        engine = load_engine(execution, self.cache, self.scheduler, on_progress=_log_progress, times=times)
        # The child has no use for text but to follow grammars: the tokenizer is read when the first one comes.
        constraints = GrammarCompiler(partial(load_tokenizer, self.tokenizer or path), num_logits=engine.vocab_size)
        return replace(engine, constraints=constraints)


def _log_progress(stage: str, done: int, of: int) -> None:
    """About ten lines a stage, whatever its number of steps."""
    if done == of or done % max(1, of // 10) == 0:
        _LOG.info("loading: %s %d of %d", stage, done, of)


def main(argv: Iterable[str] | None = None) -> int:
    """Run the engine; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for option, text in (
        ("-h", build_help),
        ("--help", build_help),
        ("--version", lambda: f"{ENGINE_VERSION}\n"),
        ("--print-flag-reference", build_reference),
    ):
        if option in arguments:
            sys.stdout.write(text())
            return int(ExitCode.DRAINED)
    try:
        settings = EngineSettings.load(arguments, os.environ)
    except SettingsError as error:
        sys.stderr.write("kvpilot-engine: --help lists all flags\n")
        return _report_bad_settings(error, _find_termination_log(arguments))
    configure_logging(settings.logging, "server")
    for warning in settings.warnings:
        _LOG.warning("flag without effect: %s", warning)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a series per counter that nobody reads
    try:
        return asyncio.run(_serve(settings))
    except SettingsError as error:
        return _report_bad_settings(error, settings.service.termination_log)


def _report_bad_settings(error: SettingsError, termination_log: Path | None) -> int:
    sys.stderr.write("".join(f"kvpilot-engine: {problem}\n" for problem in error.problems))
    code, termination = describe_failure(error, utilization=0.0)
    write_termination(termination_log, termination)
    return int(code)


async def _serve(settings: EngineSettings) -> int:
    loader = ExecutionModelLoader(
        model=settings.model,
        revision=settings.revision,
        execution=settings.execution,
        cache=settings.cache,
        scheduler=settings.scheduler,
        tokenizer=settings.text.tokenizer,
    )
    engine = AsyncEngine(
        loader,
        settings.service,
        configure_child_logging=partial(configure_logging, settings.logging, "engine"),
    )
    app = create_app(engine, settings.server, CollectorRegistry())
    return await serve(
        engine, app, load_text=partial(_load_text, settings), termination_log=settings.service.termination_log
    )


def _load_text(settings: EngineSettings) -> ModelText:
    path = resolve_model(settings.model, revision=settings.revision)
    return load_model_text(
        path,
        tokenizer_path=settings.text.tokenizer,
        chat_template_path=settings.text.chat_template,
        generation_config=settings.text.generation_config,
        tool_call_parser=settings.text.tool_call_parser,
    )


def _find_termination_log(arguments: list[str]) -> Path | None:
    """Where the last words go when the settings as a whole are bad."""
    for i, word in enumerate(arguments):
        if word == "--termination-log" and i + 1 < len(arguments):
            return Path(arguments[i + 1])
        if word.startswith("--termination-log="):
            return Path(word.partition("=")[2])
    return DEFAULT_TERMINATION_LOG if DEFAULT_TERMINATION_LOG.is_file() else None
