"""What can go wrong with the local cluster, by what the caller can do about it.

ClusterError
├── RequirementError   the machine lacks something; the text says what, and what to do instead
├── BuildError         a binary or an image could not be built; the text names the log
├── StartError         a component did not come up; the text ends with the tail of its log
└── CleanupError       something that we made could not be removed
"""

from __future__ import annotations


class ClusterError(Exception):
    """The root of the tree: its text is meant for a person's terminal."""


class RequirementError(ClusterError):
    """The machine lacks something that we can't or may not provide."""


class BuildError(ClusterError):
    """A build failed."""


class StartError(ClusterError):
    """A component did not start or did not become ready in time."""


class CleanupError(ClusterError):
    """Something that an earlier run made is still there after cleaning."""
