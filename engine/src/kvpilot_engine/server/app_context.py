"""What the routes share: engine, text, settings, metrics and whether new requests are refused. One per application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import ParamSpec, TypeVar

from aiohttp import web

from kvpilot_engine.errors import UnavailableError
from kvpilot_engine.observability.metrics import EngineMetrics
from kvpilot_engine.server.request_builder import RequestBuilder
from kvpilot_engine.server.settings import ServerSettings
from kvpilot_engine.service.async_engine import AsyncEngine
from kvpilot_engine.text.model_text import ModelText

TEXT_THREADS = 2
P = ParamSpec("P")
R = TypeVar("R")


class AppContext:
    def __init__(
        self, engine: AsyncEngine, settings: ServerSettings, metrics: EngineMetrics, *, fingerprint: str
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = metrics
        self.fingerprint = fingerprint
        """`system_fingerprint` of answers: equal ones come from the same version with the same model."""
        self.text: ModelText | None = None
        """None until the tokenizer is loaded, which happens beside the model's own loading."""
        self.started_at = self.unix_time()
        self.num_calls = 0
        """Handlers of generating calls that run now, from the body's first byte to the answer's last."""
        self._is_refusing = False
        self._builder: RequestBuilder | None = None
        self._text_pool = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text")

    @property
    def is_ready(self) -> bool:
        return self.engine.is_ready and self.text is not None

    def refuse_requests(self) -> None:
        """From now on every new request gets 503; what runs goes on."""
        self._is_refusing = True

    def require_builder(self) -> tuple[RequestBuilder, ModelText]:
        """Raise UnavailableError unless requests are taken now."""
        if self._is_refusing:
            raise UnavailableError("the server is draining")
        self.engine.require_available()
        if self.text is None:
            raise UnavailableError("the tokenizer is loading")
        if self._builder is None:
            self._builder = RequestBuilder(
                self.text,
                served_names=self.settings.served_names,
                max_model_len=self.engine.max_model_len,
                vocab_size=self.engine.vocab_size,
                max_logprobs=self.settings.max_logprobs,
                takes_salt=not self.settings.cache_salt_header,
            )
        return self._builder, self.text

    async def in_text_thread(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run parsing and tokenizing off the event loop (B24)."""
        return await asyncio.get_running_loop().run_in_executor(self._text_pool, lambda: work(*args, **kwargs))

    def close(self) -> None:
        self._text_pool.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def monotonic() -> float:
        return time.monotonic()

    @staticmethod
    def unix_time() -> int:
        return int(datetime.now(UTC).timestamp())


CONTEXT = web.AppKey("context", AppContext)
