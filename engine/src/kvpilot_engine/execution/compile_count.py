"""How many kernels were really compiled: for one log line, which tells whether those that came along were found.

Counts numba's own events, of all threads: what is loaded from the cache makes none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from numba.core import event


class CompileCount(event.Listener):
    """Functions compiled since it listens, a kernel's own parts included."""

    def __init__(self) -> None:
        self.compiled = 0

    def on_start(self, _event: object) -> None:
        self.compiled += 1

    def on_end(self, _event: object) -> None:
        """Nothing: a compilation that fails has taken its time, too."""

    def describe(self, folder: str) -> str:
        """`kernels: none compiled, all loaded from /…`"""
        if self.compiled == 0:
            return f"kernels: none compiled, all loaded from {folder}"
        return f"kernels: {self.compiled} compiled, kept in {folder}"


@contextmanager
def count_compiled() -> Iterator[CompileCount]:
    """Listens while the body runs."""
    count = CompileCount()
    with event.install_listener("numba:compile", count):
        yield count
