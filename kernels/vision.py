"""The vision tower: one image's patches to the embedding rows of its span.

A transformer over the patches of one image, every patch seeing every other, and an aligner that joins squares of
patches into rows as wide as the text model's. Arithmetic is fp32. An image is computed alone, once, before any row of
its session runs: neither chunks nor neighbours in a step can change a bit of its rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from flashmesh.kernels.image import image_size, patches, plan_grid, span_rows
from flashmesh.kernels.reference.basics import rms_norm

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from flashmesh.kernels.image import Grid
    from flashmesh.kernels.vision_config import VisionConfig

EPS = 1e-6
"""Of all norms here; the text model's is another."""


class VisionTower:
    """The tower's weights and what is computed with them; immutable.

    Args:
        config: its sizes.
        weights: from `weights.load_vision`, fp32 by released name.
    """

    def __init__(self, config: VisionConfig, weights: Mapping[str, Tensor]) -> None:
        self.config = config
        self._w = weights

    def num_tokens(self, pixels: NDArray[np.uint8]) -> int:
        """Returns the length of an image's span without computing it.

        Raises:
            InvalidRequest: this is no image; see `image.image_size`.
        """
        return plan_grid(*image_size(pixels), self.config).num_tokens

    @torch.inference_mode()
    def embed(self, pixels: NDArray[np.uint8]) -> Tensor:
        """Computes the embedding rows of an image's span.

        Args:
            pixels: uint8 `[height, width, 3]`, RGB.

        Returns:
            fp32 `[num_tokens, D]`, D the text model's width.

        Raises:
            InvalidRequest: this is no image; see `image.image_size`.
        """
        flat, grid = patches(pixels, self.config)
        aligned = self.align(self.encode(flat, grid), grid)
        w = self._w
        return span_rows(aligned, w["image_start"], w["image_newline"], w["image_end"])

    def encode(self, flat: Tensor, grid: Grid) -> Tensor:
        """Runs the transformer.

        Args:
            flat: patches fp32 `[num_patches, 3 * patch_size**2]`.
            grid: where they lie.

        Returns:
            fp32 `[num_patches, hidden_size]`, after the last norm.
        """
        c = self.config
        angles = rope_angles(grid.patch_rows, grid.patch_cols, c.head_dim, c.rope_theta)
        turn = angles.cos(), angles.sin()
        x = self._linear(flat, "vision.patch_embed.proj")
        for block in range(c.num_hidden_layers):
            prefix = f"vision.blocks.{block}."
            x = x + self._attention(prefix + "attn.", self._norm(x, prefix + "norm1"), turn)
            x = x + self._mlp(prefix + "mlp.", self._norm(x, prefix + "norm2"))
        return self._norm(x, "vision.norm")

    def align(self, x: Tensor, grid: Grid) -> Tensor:
        """Joins squares of patches `[num_patches, hidden_size]` into `[rows, cols, D]`.

        The grid is filled up with zeros at the right and the bottom. A square is read channel by channel, its patches
        within.
        """
        square = self.config.downsample_ratio
        plane = x.T.reshape(1, -1, grid.patch_rows, grid.patch_cols)
        plane = F.pad(plane, (0, -grid.patch_cols % square, 0, -grid.patch_rows % square))
        squares = F.unfold(plane, square, stride=square)[0].T
        hidden = F.gelu(self._linear(squares, "aligner.w1"))
        return self._linear(hidden, "aligner.w2").view(grid.rows, grid.cols, -1)

    def _attention(self, prefix: str, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        c, num_patches = self.config, len(x)
        qkv = self._linear(x, prefix + "wqkv").view(num_patches, 3, c.num_attention_heads, -1)
        q, k, v = qkv.permute(1, 2, 0, 3).unbind(0)
        # Not written out: the scores of the largest image would take gigabytes.
        q, k = rotate(q, *turn), rotate(k, *turn)
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], scale=c.head_dim**-0.5)
        return self._linear(y[0].transpose(0, 1).reshape(num_patches, -1), prefix + "wo")

    def _mlp(self, prefix: str, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self._w[prefix + "w1.weight"]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self._w[prefix + "w2.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self._w[name + ".weight"], EPS)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._w[name + ".weight"], self._w[name + ".bias"])


def rope_angles(patch_rows: int, patch_cols: int, head_dim: int, theta: float) -> Tensor:
    """Returns the rotation angles of every patch: those of its row, then those of its column.

    Args:
        patch_rows, patch_cols: of the grid; patches go row by row.
        head_dim: a multiple of 4.
        theta: base of the frequencies `theta ** (-4 k / head_dim)`, k from 0 below `head_dim / 4`.

    Returns:
        fp32 `[patch_rows * patch_cols, head_dim / 2]`.
    """
    exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2)
    frequency = 1.0 / theta**exponents
    row = torch.arange(patch_rows).repeat_interleave(patch_cols)
    col = torch.arange(patch_cols).repeat(patch_rows)
    return torch.cat([place.unsqueeze(1).float() * frequency for place in (row, col)], 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates value i of every row together with value `i + n/2`, by the i-th angle.

    Args:
        x: `[heads, num_patches, n]`.
        cos, sin: `[num_patches, n/2]`, of `rope_angles`.
    """
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
