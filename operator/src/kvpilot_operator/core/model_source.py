"""`spec.model.source` taken apart: what the engine is told and what must be mounted. No look-up, no download."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvpilot_operator.core.naming import MODEL_DIR
from kvpilot_operator.errors import InvalidSpecError

_HUB = re.compile(r"hf://[A-Za-z0-9][\w.-]*/[\w.-]+(?::[\w.-]+)?(?:@[A-Za-z0-9][\w./-]*)?")
_CLAIM = re.compile(r"pvc://(?P<claim>[a-z0-9](?:[-a-z0-9.]*[a-z0-9])?)/(?P<path>[^/].*)")
_FILE = re.compile(r"file://(?P<path>/[^/].*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    model: str
    """The engine's `--model`: hf://..., which it takes as it is, or an absolute path in the container."""
    claim: str | None = None
    """PersistentVolumeClaim to mount read-only at MODEL_DIR."""


def parse_model_source(source: str) -> ModelSource:
    """InvalidSpecError for anything but hf://, pvc:// and file://, and for a path that climbs."""
    if ".." in source.split("/"):
        raise InvalidSpecError(f"spec.model.source must not contain '..', is {source!r}")
    if _HUB.fullmatch(source):
        return ModelSource(model=source)
    if match := _CLAIM.fullmatch(source):
        return ModelSource(model=f"{MODEL_DIR}/{match['path']}", claim=match["claim"])
    if match := _FILE.fullmatch(source):
        return ModelSource(model=match["path"])
    raise InvalidSpecError(
        "spec.model.source must be hf://OWNER/NAME[:VARIANT][@REVISION], pvc://CLAIM/PATH or file:///PATH, "
        f"is {source!r}"
    )
