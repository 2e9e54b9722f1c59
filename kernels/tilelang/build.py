"""Builds TileLang kernels: one target, one cache, one error for a machine that lacks what it takes.

A builder is a function of compile-time numbers that returns a TileLang `prim_func`. Row counts are dynamic dimensions
of it, so a kernel is built once for a model. Tile sizes and reduction orders must not depend on the number of rows in a
way that changes a row's bits: see `docs/kernels.md`.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from flashmesh.errors import KernelsUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

TARGET = {"kind": "cuda", "arch": "sm_90a"}
"""Hopper with its own instructions; compiles on a machine without a GPU too."""


class Variant(NamedTuple):
    """A kernel to build: a name for reports, its builder, and the builder's arguments."""

    name: str
    builder: Callable[..., Any]
    args: tuple[Any, ...]

    def build(self) -> Any:
        """Compiles it, or finds it in TileLang's cache on disk."""
        return build(self.builder, *self.args)


@functools.cache
def build(builder: Callable[..., Any], *args: Any) -> Any:
    """Compiles `builder(*args)` for Hopper; a second call with the same arguments returns the same kernel.

    Returns:
        A callable that takes the prim_func's tensors in order and launches on torch's current stream.

    Raises:
        KernelsUnavailable: TileLang is not installed.
    """
    try:
        import tilelang
    except ImportError as error:
        raise KernelsUnavailable(
            f"TileLang is not installed ({error}): pip install 'flashmesh[cuda]'"
        ) from error
    logging.getLogger("tilelang").setLevel(logging.WARNING)  # it would announce every kernel
    options = getattr(builder, "pass_configs", None)
    return tilelang.compile(builder(*args), target=TARGET, pass_configs=options)
