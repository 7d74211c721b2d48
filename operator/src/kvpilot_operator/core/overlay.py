"""The user's `podTemplate` over ours: a strategic merge patch, as `kubectl patch` would do it.

Objects merge, null deletes, lists replace, except those of the table, whose elements merge by a key; `$patch: delete`
and `$patch: replace` work on objects and elements. New elements go behind ours. The result equals the API server's own
strategic merge patch (tested against it). Other directives are refused, so that none is silently passed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpilot_operator.errors import InvalidSpecError

MERGE_KEYS = {
    "containers": "name",
    "env": "name",
    "ephemeralContainers": "name",
    "hostAliases": "ip",
    "imagePullSecrets": "name",
    "initContainers": "name",
    "ports": "containerPort",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "topologySpreadConstraints": "topologyKey",
    "volumeDevices": "devicePath",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
"""Lists of a pod template that merge by key (`patchStrategy: merge` of the API's types); all others are replaced."""

_DIRECTIVE = "$patch"


def merge_pod_template(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """A new pod template; InvalidSpecError, with the path, for an overlay that can't be merged."""
    return _merge_object(base, overlay, "spec.podTemplate")


def _merge_object(base: Mapping[str, Any], overlay: Mapping[str, Any], path: str) -> dict[str, Any]:
    if _directive(overlay, path) == "replace":
        return _clean({key: value for key, value in overlay.items() if key != _DIRECTIVE}, path)
    merged = dict(base)
    for key, value in overlay.items():
        where = f"{path}.{key}"
        if key == _DIRECTIVE:
            continue
        if key.startswith("$"):
            raise InvalidSpecError(f"{where} is a directive that kvpilot does not support")
        if value is None:
            merged.pop(key, None)
        elif key in MERGE_KEYS and not _is_map(path):
            merged[key] = _merge_list(base.get(key) or [], value, MERGE_KEYS[key], where)
        elif isinstance(value, Mapping):
            ours = base.get(key)
            merged[key] = _merge_object(ours if isinstance(ours, Mapping) else {}, value, where)
        else:
            merged[key] = value
    return merged


def _merge_list(base: list[Any], overlay: object, key: str, path: str) -> list[Any]:
    if not isinstance(overlay, list):
        raise InvalidSpecError(f"{path} must be a list")
    merged = list(base)
    for number, element in enumerate(overlay):
        where = f"{path}[{number}]"
        if not isinstance(element, Mapping) or element.get(key) is None:
            raise InvalidSpecError(f"{where} must be an object with {key!r}")
        index = next((i for i, ours in enumerate(merged) if ours.get(key) == element[key]), None)
        directive = _directive(element, where)
        if directive == "delete":
            merged = [ours for ours in merged if ours.get(key) != element[key]]
        elif index is None:
            merged.append(_merge_object({}, element, where))
        else:
            merged[index] = _merge_object(merged[index], element, where)
    return merged


def _directive(overlay: Mapping[str, Any], path: str) -> str:
    directive = overlay.get(_DIRECTIVE, "merge")
    if directive not in ("merge", "replace", "delete"):
        raise InvalidSpecError(f"{path}.{_DIRECTIVE} must be merge, replace or delete, is {directive!r}")
    return str(directive)


def _clean(value: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A replacing object, without its nulls and with the directives inside it carried out."""
    return _merge_object({}, value, path)


def _is_map(path: str) -> bool:
    """Inside free-form maps a key that looks like a list's name is just a key."""
    return path.endswith((".labels", ".annotations", ".nodeSelector", ".matchLabels", ".limits", ".requests"))
