"""Whether a child still holds what we applied: a subset comparison that forgives what the API server adds.

Others may add fields, labels, containers or environment variables; what we wrote must still be there. Lists whose
elements have a key are compared by it, all others as one value. The server may also write our values differently
(`1000m` for `1`): known quantities are compared as numbers, and `Residues` remembers the rest after one apply, so
that a difference which applying does not mend is applied once and not at every tick.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kvpilot_operator.core.ports import Manifest
from kvpilot_operator.core.quantity import parse_quantity

_LIST_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "env": ("name",),
    "hostAliases": ("ip",),
    "imagePullSecrets": ("name",),
    "initContainers": ("name",),
    "ownerReferences": ("uid",),
    "ports": ("containerPort", "port"),
    "resourceClaims": ("name",),
    "topologySpreadConstraints": ("topologyKey",),
    "volumeDevices": ("devicePath",),
    "volumeMounts": ("mountPath",),
    "volumes": ("name",),
}
_QUANTITIES = ("limits", "requests", "sizeLimit")


class ChildKey(NamedTuple):
    """One child of one owner."""

    kind: str
    name: str


def child_key(manifest: Mapping[str, Any]) -> ChildKey:
    return ChildKey(str(manifest.get("kind")), str(manifest.get("metadata", {}).get("name")))


class Drift(NamedTuple):
    """One place where the child is not as rendered, and what stands there."""

    path: str
    observed: str


def find_drift(rendered: Manifest, observed: Manifest) -> frozenset[Drift]:
    """Empty when `observed` holds all of `rendered`."""
    return frozenset(_compare(rendered, observed, "", is_quantity=False))


class Residues:
    """What stayed different right after our own apply, by child. In memory: forgetting costs one apply."""

    def __init__(self) -> None:
        self._residues: dict[tuple[str, ChildKey], frozenset[Drift]] = {}

    def record(self, owner_uid: str, rendered: Manifest, answer: Manifest) -> None:
        """`answer` is the child as the apply returned it."""
        residue = find_drift(rendered, answer)
        if residue:
            self._residues[owner_uid, child_key(rendered)] = residue
        else:
            self._residues.pop((owner_uid, child_key(rendered)), None)

    def of_owner(self, owner_uid: str) -> dict[ChildKey, frozenset[Drift]]:
        return {key: residue for (uid, key), residue in self._residues.items() if uid == owner_uid}

    def forget(self, owner_uid: str) -> None:
        """The owner is gone."""
        for entry in [entry for entry in self._residues if entry[0] == owner_uid]:
            del self._residues[entry]


def _compare(rendered: object, observed: object, path: str, *, is_quantity: bool) -> Iterator[Drift]:
    if isinstance(rendered, Mapping):
        if not isinstance(observed, Mapping):
            yield Drift(path, repr(observed))
            return
        for key, value in rendered.items():
            where = f"{path}.{key}" if path else str(key)
            if isinstance(value, list) and key in _LIST_KEYS:
                yield from _compare_keyed(value, observed.get(key), where, _LIST_KEYS[key])
            else:
                yield from _compare(value, observed.get(key), where, is_quantity=is_quantity or key in _QUANTITIES)
    elif isinstance(rendered, list):
        if not isinstance(observed, list) or len(rendered) != len(observed):
            yield Drift(path, repr(observed))
            return
        for number, (ours, theirs) in enumerate(zip(rendered, observed, strict=True)):
            yield from _compare(ours, theirs, f"{path}[{number}]", is_quantity=is_quantity)
    elif rendered != observed and not (is_quantity and _is_same_quantity(rendered, observed)):
        yield Drift(path, repr(observed))


def _compare_keyed(rendered: list[Any], observed: object, path: str, keys: tuple[str, ...]) -> Iterator[Drift]:
    theirs = observed if isinstance(observed, list) else []
    for element in rendered:
        key = next((key for key in keys if key in element), keys[0])
        where = f"{path}[{element.get(key)}]"
        match = next((other for other in theirs if other.get(key) == element.get(key)), None)
        if match is None:
            yield Drift(where, "absent")
        else:
            yield from _compare(element, match, where, is_quantity=False)


def _is_same_quantity(rendered: object, observed: object) -> bool:
    ours = parse_quantity(rendered)
    return ours is not None and ours == parse_quantity(observed)
