"""The legend of one-letter dimensions that the runtime's comments and names use, and the row tile.

    R  rows of a step, over all sessions, padded to a multiple of TILE
    D  hidden size                      S  residual streams (4)
    H  attention heads                  E  width of a head (the shared key = value row)
    P  rotary dimensions of a head      Q  rank of the query latent
    I  index heads                      F  width of an index head
    K  rows of a top-k selection        W  sliding window, in tokens
    J  compressed rows of a sequence    M  routed experts
    V  vocabulary

A name such as `x_RD` is a tensor `[R, D]`; a lower-case `r` is a ratio, never a dimension.
"""

from __future__ import annotations

TILE = 16
"""Every matrix product runs on a multiple of this many rows: then a row's bits do not depend on how
many rows stand beside it (1, 2, 3, 5 or 7 rows take other code paths in CPU matrix libraries)."""


def pad_up(count: int, multiple: int = TILE) -> int:
    """Returns the smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple
