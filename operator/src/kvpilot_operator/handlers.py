"""What kopf calls: each handler hands on and returns None, since kopf would write a returned value into the status.

Only `on.event`: kopf's other handlers put finalizers or annotations on objects. All are coroutines, or kopf would run
them in threads.
"""

from __future__ import annotations

import os
from typing import Any

import kopf

from kvpilot_operator import startup
from kvpilot_operator.core.resources import CHILD_RESOURCES, LLM_DEPLOYMENTS, PODS, ApiResource
from kvpilot_operator.settings import OperatorSettings


def _address(resource: ApiResource) -> tuple[str, str, str]:
    return resource.group, resource.version, resource.plural


@kopf.on.startup()
async def start(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    own = OperatorSettings.load(os.environ)
    startup.configure_kopf(settings, request_timeout_s=own.request_timeout_seconds)
    memo.operator = await startup.build_operator(own)
    await memo.operator.start()


@kopf.on.cleanup()
async def stop(memo: kopf.Memo, **_: Any) -> None:
    await memo.operator.stop()


@kopf.on.login()
async def log_in(**_: Any) -> kopf.ConnectionInfo:
    return await startup.log_in()


@kopf.on.probe(id="health", errors=kopf.ErrorsMode.PERMANENT)
async def check_health(memo: kopf.Memo, **_: Any) -> dict[str, float]:
    health: dict[str, float] = memo.operator.check_health()
    return health


@kopf.on.event(*_address(LLM_DEPLOYMENTS))
async def see_object(event: kopf.RawEvent, memo: kopf.Memo, **_: Any) -> None:
    memo.operator.on_object_event(event)


async def see_child(event: kopf.RawEvent, memo: kopf.Memo, **_: Any) -> None:
    memo.operator.on_child_event(event)


for _resource in (*CHILD_RESOURCES, PODS):
    kopf.on.event(*_address(_resource), id=f"see_{_resource.plural}")(see_child)
