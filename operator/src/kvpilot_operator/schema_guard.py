"""Whether the installed schema still fits this operator: looked at when it starts, and again with every resync. # C25

An older schema is no error that any call would show: fields that it does not know are dropped without a word. So it is
said aloud (log, metric, readiness) and nothing else is done about it. What could not be read says nothing either way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from kvpilot_operator.core.ports import KubeApi
from kvpilot_operator.core.schema_check import OPENAPI_PATH, find_missing_fields, needed_fields, object_schema
from kvpilot_operator.errors import OperatorError

logger = logging.getLogger(__name__)

REMEDY = "helm upgrade with crds.install=true, or kubectl apply --server-side -f crds/"

_RECHECK_S = 10.0
"""Until the schema is right: whoever mends it wants to see that it helped."""


class SchemaGuard:
    """Checks in the background; `problem` is what the readiness probe asks for."""

    def __init__(
        self, api: KubeApi, *, recheck_s: float, on_checked: Callable[[int | None], None] = lambda _missing: None
    ) -> None:
        """`on_checked` is told how many fields are missing; None: it could not be found out."""
        self._api = api
        self._recheck_s = recheck_s
        self._on_checked = on_checked
        self._missing: tuple[str, ...] = ()
        self._is_unknown = False
        self.problem: str | None = "the installed schema has not been looked at yet"
        """Why objects can't be trusted to hold what their users wrote; None: nothing speaks against it."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="kvpilot schema")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def check(self) -> bool:
        """One look. Whether the schema is known to be right; each change of that is logged."""
        try:
            document = await self._api.get_openapi(OPENAPI_PATH)
        except OperatorError as error:
            self._on_checked(None)
            if not self._missing:
                self.problem = None
            if not self._is_unknown:
                logger.warning("whether the installed schema is new enough is unknown: %s", error)
            self._is_unknown = True
            return False
        self._is_unknown = False
        schema = object_schema(document or {})
        missing = tuple(sorted(needed_fields())) if schema is None else find_missing_fields(schema)
        self._on_checked(len(missing))
        if not missing:
            self.problem = None
            if self._missing:
                logger.info("the installed CustomResourceDefinition has every field now")
        else:
            self.problem = (
                f"the CustomResourceDefinition of LLMDeployments is not installed: {REMEDY}"
                if schema is None
                else f"the installed CustomResourceDefinition of LLMDeployments is older than this operator, and the"
                f" API server drops what is written into these fields: {', '.join(missing)}; to mend it: {REMEDY}"
            )
            if missing != self._missing:
                logger.error("%s", self.problem, extra={"event": "SchemaTooOld"})
        self._missing = missing
        return not missing

    async def _run(self) -> None:
        while True:
            is_right = await self.check()
            await asyncio.sleep(self._recheck_s if is_right else min(_RECHECK_S, self._recheck_s))
