"""The user's `podTemplate` over ours: a strategic merge patch, as `kubectl patch` would do it.

Objects merge, null deletes, lists replace, except those of the table, whose elements merge by a key. `$patch: replace`
in an object starts it anew, in an element the whole list; `$patch: delete` takes an element away or empties an object;
`$retainKeys` keeps only the named fields of ours. They matter: `kubectl apply` drops nulls before the object reaches
the API server. New elements go behind ours. The result equals the API server's own strategic merge patch (tested
against it); other directives are refused, so that none is silently passed on.
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
_RETAIN = "$retainKeys"


def merge_pod_template(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """A new pod template; InvalidSpecError, with the path, for an overlay that can't be merged."""
    return _merge_object(base, overlay, "spec.podTemplate")


def _merge_object(base: Mapping[str, Any], overlay: Mapping[str, Any], path: str) -> dict[str, Any]:
    directive = _directive(overlay, path)
    if directive == "delete":
        return {}
    if directive == "replace":
        return _merge_object({}, {key: value for key, value in overlay.items() if key != _DIRECTIVE}, path)
    merged = _retain(base, overlay, path)
    for key, value in overlay.items():
        where = f"{path}.{key}"
        if key in (_DIRECTIVE, _RETAIN):
            continue
        if key.startswith("$"):
            raise InvalidSpecError(f"{where} is a directive that kvpilot does not support")
        if value is None:
            merged.pop(key, None)
        elif key in MERGE_KEYS and not _is_map(path):
            merged[key] = _merge_list(merged.get(key) or [], value, MERGE_KEYS[key], where)
        elif isinstance(value, Mapping):
            ours = merged.get(key)
            merged[key] = _merge_object(ours if isinstance(ours, Mapping) else {}, value, where)
        else:
            merged[key] = value
    return merged


def _merge_list(base: list[Any], overlay: object, key: str, path: str) -> list[Any]:
    if not isinstance(overlay, list):
        raise InvalidSpecError(f"{path} must be a list")
    elements = [(_checked(element, f"{path}[{number}]"), f"{path}[{number}]") for number, element in enumerate(overlay)]
    directives = [_directive(element, where) for element, where in elements]
    merged = [] if "replace" in directives else list(base)
    # Deletions come first wherever they stand, so that an element can be taken away and put anew.
    for wanted in ("delete", "merge"):
        for (element, where), directive in zip(elements, directives, strict=True):
            if directive == wanted:
                merged = _merge_element(merged, element, key, where)
    return merged


def _merge_element(base: list[Any], element: Mapping[str, Any], key: str, path: str) -> list[Any]:
    if element.get(key) is None:
        raise InvalidSpecError(f"{path} must have {key!r}")
    if element.get(_DIRECTIVE) == "delete":
        return [ours for ours in base if ours.get(key) != element[key]]
    index = next((i for i, ours in enumerate(base) if ours.get(key) == element[key]), len(base))
    ours = base[index] if index < len(base) else {}
    return [*base[:index], _merge_object(ours, element, path), *base[index + 1 :]]


def _checked(element: object, path: str) -> Mapping[str, Any]:
    if not isinstance(element, Mapping):
        raise InvalidSpecError(f"{path} must be an object")
    return element


def _directive(overlay: Mapping[str, Any], path: str) -> str:
    directive = overlay.get(_DIRECTIVE, "merge")
    if directive not in ("merge", "replace", "delete"):
        raise InvalidSpecError(f"{path}.{_DIRECTIVE} must be merge, replace or delete, is {directive!r}")
    return str(directive)


def _retain(base: Mapping[str, Any], overlay: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Our side, without what `$retainKeys` does not name."""
    if _RETAIN not in overlay:
        return dict(base)
    keys = overlay[_RETAIN]
    given = overlay.keys() - {_DIRECTIVE, _RETAIN}
    if not isinstance(keys, list) or not given <= {str(key) for key in keys}:
        raise InvalidSpecError(f"{path}.{_RETAIN} must name every field beside it")
    return {key: value for key, value in base.items() if key in keys}


def _is_map(path: str) -> bool:
    """Inside free-form maps a key that looks like a list's name is just a key."""
    return path.endswith((".labels", ".annotations", ".nodeSelector", ".matchLabels", ".limits", ".requests"))
