"""Every right that the operator uses on the API server: the one list that the chart's Role and ClusterRole come from.

Not a wish list: the adapter refuses to send a request that is not covered here, so that a missing line fails in the
first test instead of in someone's cluster.
"""

from __future__ import annotations

from typing import NamedTuple


class Right(NamedTuple):
    """Verbs on one resource (or subresource) of one group, and what they are for."""

    group: str
    resource: str
    verbs: tuple[str, ...]
    reason: str


RIGHTS = (
    Right("kvpilot.dev", "llmdeployments", ("get", "list", "watch"), "read what the user asked for"),
    Right("kvpilot.dev", "llmdeployments/status", ("patch",), "say what was done and why"),
    Right(
        "kvpilot.dev",
        "llmdeployments/scale",
        ("patch",),
        "write the running count once, when an object enters External mode",
    ),
    Right(
        "kvpilot.dev",
        "llmdeployments/finalizers",
        ("update",),
        "set blockOwnerDeletion on children (OpenShift checks it)",
    ),
    Right("apps", "deployments", ("list", "watch", "create", "patch"), "the engine pods"),
    Right("apps", "deployments/scale", ("patch",), "replicas are written here and nowhere else"),
    Right("apps", "controllerrevisions", ("list", "watch", "create", "patch"), "the stored pod template"),
    Right("", "services", ("list", "watch", "create", "patch"), "the engine's address"),
    Right("", "configmaps", ("list", "watch", "create", "patch"), "the tuned memory cap, the learned limits"),
    Right("policy", "poddisruptionbudgets", ("list", "watch", "create", "patch"), "drains take one pod at a time"),
    Right(
        "",
        "pods",
        ("list", "watch", "patch", "delete"),
        "observe; touch annotations (cap, deletion cost); restart a pod in back-off when its cap changed",
    ),
    Right("", "events", ("create", "patch"), "state changes, for kubectl describe"),
    Right("coordination.k8s.io", "leases", ("get", "create", "update"), "never two operators at once"),
)


def is_covered(verb: str, group: str, resource: str) -> bool:
    """Whether `verb` on `resource` (with its subresource) is one of ours."""
    return any(right.group == group and right.resource == resource and verb in right.verbs for right in RIGHTS)
