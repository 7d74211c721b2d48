"""How kernels are compiled: numba's decorators with this package's options, typed for mypy.

Every kernel is a function at the top of a module: numba's disk cache never finds one that was made inside another
function again. No option allows results to depend on how many rows a call has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from numba import njit, prange
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])
Arguments = ParamSpec("Arguments")

_OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy"}

REORDERED_SUMS = {"reassoc", "contract", "nsz"}
"""Lets LLVM sum a row in lanes. A row's order then depends on its length alone; NaN and infinity keep their meaning."""

kernel = cast(Callable[[Function], Function], njit(**_OPTIONS))
"""A function on one thread, callable from Python and from other kernels."""

kernel_with_sums = cast(Callable[[Function], Function], njit(fastmath=REORDERED_SUMS, **_OPTIONS))
"""The same for functions that sum a row."""

kernel_with_fused_products = cast(Callable[[Function], Function], njit(fastmath={"contract"}, **_OPTIONS))
"""The same for functions whose sums must keep their order but may add a product without rounding it before."""

parallel_kernel = cast(Callable[[Function], Function], njit(parallel=True, **_OPTIONS))
"""A function whose prange loops run on all of numba's threads. Not to be called from a parallel loop."""

emitted = cast(
    Callable[[Callable[Concatenate[Any, Arguments], Any]], Callable[Arguments, Any]], intrinsic(prefer_literal=True)
)
"""A function that emits LLVM code (kernels/simd.py), called without its first argument, the typing context. It gets the
types of its arguments; constant integers arrive as literals."""

parallel_range: type[range] = prange
