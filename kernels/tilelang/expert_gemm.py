"""Grouped products with packed FP4 experts: gate_up with its SwiGLU, and down; see `expert_layout` for the layouts.

Y^T = W X^T on tensor cores: the weights are the operand in registers, widened there to bf16 (exact), and the tokens of
a tile the operand in shared memory. Any number of tokens is thus a good shape, and every token's sums run over columns
in the same order whatever tile it is in. A producer gathers token rows and streams weight tiles through a ring of
stages; each consumer warpgroup multiplies 64 or 128 weight rows. The main loop is device code of our own
(`expert_source`), since TileLang has no fragment that is filled from packed registers in this order.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashmesh.kernels.tilelang.build import Variant, build
from flashmesh.kernels.tilelang.expert_layout import (
    SCALE_BYTES,
    TILE_BYTES,
    ExpertTiles,
    ExpertWeights,
)
from flashmesh.kernels.tilelang.expert_source import SOURCE

SMS = 132
"""Multiprocessors of an H200; sets only how many thread blocks share the work."""


class Shape(NamedTuple):
    """How a thread block works: its consumer warpgroups, 64-row blocks of each, and the ring it reads from.

    Attributes:
        groups: warpgroups that multiply.
        blocks: 64-row blocks of weights of each.
        steps: 64-column steps of a stage.
        stages: of the ring.
        producers: threads that load.
        resident: thread blocks a multiprocessor holds.
        persistent: whether a thread block takes items of work in turn, or just one.
    """

    groups: int
    blocks: int
    steps: int
    stages: int
    producers: int
    resident: int = 1
    persistent: bool = True

    def shared_bytes(self, tokens: int) -> int:
        """Shared memory, as `SOURCE` counts it, for either product."""
        tiles = self.groups * self.blocks
        stage = self.steps * (tokens * 128 + tiles * (TILE_BYTES + SCALE_BYTES))
        stage = -(-stage // 1024) * 1024
        staging = 4 * self.groups * min(tokens, 32) * 48
        return self.stages * (stage + 16) + staging + 16 * tokens * self.groups


SHAPES = {
    8: Shape(1, 1, 4, 4, 32, 4, persistent=False),
    16: Shape(1, 1, 4, 3, 32, 4, persistent=False),
    64: Shape(2, 2, 2, 6, 128),
    128: Shape(2, 2, 1, 8, 128),
}
"""By tokens of a tile. Few tokens: weights stream through small blocks, four to a multiprocessor. Many: one large block
with as many products as its registers hold, which starts to load the next item while it finishes one."""


def _shape(tokens: int, rows: int, columns: int) -> Shape:
    """The shape of a tile size, made to divide the weights."""
    shape = SHAPES[tokens]
    while rows % (64 * shape.groups * shape.blocks):
        shape = shape._replace(blocks=1) if shape.blocks > 1 else shape._replace(groups=1)
    while columns % (64 * shape.steps):
        shape = shape._replace(steps=shape.steps // 2)
    return shape


def _product(kind: int, tokens: int, rows: int, columns: int, *shape: Any) -> Any:
    """A product with weights `[rows, columns]`; `kind` 0 and 1: gate_up without and with rounding, 2: down."""
    import tilelang.language as T

    s = Shape(*shape)
    num_rows, slots, tiles, experts = (
        T.dynamic(name) for name in ("num_rows", "slots", "tiles", "experts")
    )
    size = s.shared_bytes(tokens)
    width = rows if kind == 2 else rows // 2
    items = rows // (64 * s.groups * s.blocks)
    numbers = (s.groups, s.blocks, tokens, s.steps, s.stages, s.producers, kind, columns, width)
    name = f"experts::run<{', '.join(map(str, numbers))}>"

    @T.prim_func
    def product(
        x: T.Tensor((num_rows, columns), "bfloat16"),
        place: T.Tensor((slots,), "int32"),
        weights: T.Tensor((slots,), "float32"),
        expert: T.Tensor((tiles,), "int32"),
        w: T.Tensor((experts, rows // 64, columns // 64, TILE_BYTES), "uint8"),
        scales: T.Tensor((experts, rows // 64, columns // 64, SCALE_BYTES), "uint8"),
        y: T.Tensor((slots, width), "bfloat16"),
        top_k: T.int32,
        limit: T.float32,
    ):
        with T.Kernel(
            T.min(tiles * items, SMS * s.resident) if s.persistent else tiles * items,
            threads=128 * s.groups + s.producers,
        ) as _:
            T.annotate_min_blocks_per_sm(s.resident)
            T.import_source(SOURCE)
            memory = T.alloc_shared((size,), "uint8")
            T.call_extern(
                "handle",
                name,
                T.address_of(memory[0]),
                T.address_of(x[0, 0]),
                T.address_of(place[0]),
                T.address_of(weights[0]),
                T.address_of(expert[0]),
                T.address_of(w[0, 0, 0, 0]),
                T.address_of(scales[0, 0, 0, 0]),
                T.address_of(y[0, 0]),
                tiles,
                top_k,
                limit,
            )

    return product


def gate_up(
    x: Tensor,
    tiles: ExpertTiles,
    w: ExpertWeights,
    limit: float,
    round_output: bool,
    token_tile: int,
) -> Tensor:
    """Multiplies gathered rows with w1 and w3, and joins them: silu(min(g, limit)) clamp(u) weight.

    Args:
        x: bf16 `[T, D]`.
        tiles: where rows go.
        w: the experts.
        limit: of the SwiGLU clamps.
        round_output: rounds the result to FP8-32 as well.
        token_tile: slots of a tile, one of `SHAPES`; a row's bits do not depend on it.

    Returns:
        bf16 `[P, n]`; padding rows are not written.
    """
    _check(x, tiles, w, w.d, token_tile)
    a = torch.empty(len(tiles.rows), w.n, dtype=torch.bfloat16, device=x.device)
    if len(tiles.expert):
        shape = _shape(token_tile, 2 * w.n, w.d)
        kind = int(round_output)
        kernel = build(_product, kind, token_tile, 2 * w.n, w.d, *shape)
        kernel(x, tiles.rows, tiles.weights, tiles.expert, w.w13, w.s13, a, tiles.top_k, limit)
    return a


def down(a: Tensor, tiles: ExpertTiles, w: ExpertWeights, token_tile: int) -> Tensor:
    """Multiplies sorted rows with w2.

    Args:
        a: bf16 `[P, n]`, of `gate_up`.
        tiles, w, token_tile: as there.

    Returns:
        bf16 `[P, D]`; padding rows are not written.
    """
    _check(a, tiles, w, w.n, token_tile)
    y = torch.empty(len(tiles.rows), w.d, dtype=torch.bfloat16, device=a.device)
    if len(tiles.expert):
        shape = _shape(token_tile, w.d, w.n)
        kernel = build(_product, 2, token_tile, w.d, w.n, *shape)
        kernel(a, tiles.rows, tiles.weights, tiles.expert, w.w2, w.s2, y, tiles.top_k, 0.0)
    return y


def _check(x: Tensor, tiles: ExpertTiles, w: ExpertWeights, width: int, token_tile: int) -> None:
    if token_tile not in SHAPES:
        raise ValueError(f"no kernel for tiles of {token_tile} tokens, only {sorted(SHAPES)}")
    if w.d % 256 or w.n % 64:
        raise ValueError(f"experts of width {w.n} on {w.d}: need multiples of 64 and 256")
    if x.ndim != 2 or x.shape[1] != width or x.dtype != torch.bfloat16:
        raise ValueError(f"rows are {x.dtype} {tuple(x.shape)}, not bf16 [rows, {width}]")
    if len(tiles.rows) != len(tiles.expert) * token_tile:
        raise ValueError(f"{len(tiles.rows)} slots in {len(tiles.expert)} tiles of {token_tile}")


def variants() -> list[Variant]:
    """Kernels of V4.1-Flash: every tile size, experts of the backbone."""
    n, d = 2304, 5120
    made = []
    for tokens in SHAPES:
        up, down = _shape(tokens, 2 * n, d), _shape(tokens, d, n)
        made += [
            Variant(f"gate_up.{tokens}", _product, (0, tokens, 2 * n, d, *up)),
            Variant(f"gate_up_rounded.{tokens}", _product, (1, tokens, 2 * n, d, *up)),
            Variant(f"down.{tokens}", _product, (2, tokens, d, n, *down)),
        ]
    return made
