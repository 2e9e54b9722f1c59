"""From raw pixels to patches, and from an image's size to its span of tokens.

The size of the patch grid follows from width and height alone, so a prompt can be laid out before any pixel is looked
at. Nothing here knows weights; `vision` turns patches into rows. All of it is done for one image at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from flashmesh.errors import InvalidRequest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from flashmesh.kernels.vision_config import VisionConfig

GREY = 127.0
"""What stands beside an image that does not fill its patches, in each of the three colours."""

_SLACK = 1e-9
"""In patches: a side that rounding put so little above a whole number of patches has that number."""


@dataclass(frozen=True, slots=True)
class Grid:
    """An image as the model sees it.

    Attributes:
        patch_rows, patch_cols: patches from top to bottom and from left to right.
        rows, cols: the same in aligner rows, each a square of patches, the last of a side maybe not full.
    """

    patch_rows: int
    patch_cols: int
    rows: int
    cols: int

    @property
    def num_tokens(self) -> int:
        """Length of the span: start, `rows` times (`cols` aligner rows and a newline), end."""
        return span_length(self.rows, self.cols)


def span_length(rows: int, cols: int) -> int:
    """Returns the number of tokens of an image of `rows` times `cols` aligner rows."""
    return rows * (cols + 1) + 2


def plan_grid(width: int, height: int, config: VisionConfig) -> Grid:
    """Chooses an image's patch grid.

    Too small an image is scaled up, both sides alike; sides are rounded up to whole patches; if the span is then too
    long, the image takes the largest scale at which it fits.

    Args:
        width, height: in pixels.
        config: of the tower.

    Raises:
        InvalidRequest: the image has no pixels.
    """
    if width < 1 or height < 1:
        raise InvalidRequest(f"an image of {width} x {height} pixels is empty")
    scale = max(1.0, math.sqrt(config.min_pixels / (width * height)))
    grid = _grid(width * scale, height * scale, config)
    if grid.num_tokens > config.max_image_tokens:
        scale = _largest_scale(width, height, config)
        grid = _grid(width * scale, height * scale, config)
    return grid


def _grid(width: float, height: float, config: VisionConfig) -> Grid:
    patch_rows, patch_cols = (
        max(1, math.ceil(side / config.patch_size - _SLACK)) for side in (height, width)
    )
    square = config.downsample_ratio
    return Grid(patch_rows, patch_cols, -(-patch_rows // square), -(-patch_cols // square))


def _largest_scale(width: int, height: int, config: VisionConfig) -> float:
    """Finds the largest scale whose span is short enough.

    The span only grows with the scale, and grows where a side passes a whole number of aligner rows. So the largest
    scale fills either all `rows` or all the columns that so many rows leave room for, for some number of rows.
    """
    square = config.patch_size * config.downsample_ratio
    best, rows = 0.0, 1
    while (cols := (config.max_image_tokens - 2) // rows - 1) >= 1:
        best = max(best, min(square * rows / height, square * cols / width))
        rows += 1
    return best


def patches(pixels: NDArray[np.uint8], config: VisionConfig) -> tuple[Tensor, Grid]:
    """Prepares an image for the tower.

    Args:
        pixels: uint8 `[height, width, 3]`, RGB.
        config: of the tower.

    Returns:
        fp32 `[patch_rows * patch_cols, 3 * patch_size**2]` in [-1, 1], rows of patches from the top, each patch
        channel by channel; and the grid.

    Raises:
        InvalidRequest: another shape or dtype, or no pixels.
    """
    grid = plan_grid(*image_size(pixels), config)
    size = config.patch_size
    image = _place(pixels, grid.patch_rows * size, grid.patch_cols * size)
    image = (image / 255 - 0.5) / 0.5
    cut = image.view(3, grid.patch_rows, size, grid.patch_cols, size)
    return cut.permute(1, 3, 0, 2, 4).reshape(-1, config.patch_values), grid


def image_size(pixels: NDArray[np.uint8]) -> tuple[int, int]:
    """Returns width and height.

    Raises:
        InvalidRequest: this is no uint8 array `[height, width, 3]`.
    """
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8:
        found = getattr(pixels, "dtype", type(pixels).__name__)
        raise InvalidRequest(f"an image must be an array of uint8, found {found}")
    if pixels.ndim != 3 or pixels.shape[2] != 3:
        raise InvalidRequest(f"an image must be [height, width, 3], found {list(pixels.shape)}")
    return pixels.shape[1], pixels.shape[0]


def _place(pixels: NDArray[np.uint8], height: int, width: int) -> Tensor:
    """Resizes an image into a frame, its aspect kept, and centres it on grey: fp32 `[3, height, width]`."""
    image = torch.from_numpy(np.array(pixels)).permute(2, 0, 1).float()
    inner = _contained(image.shape[1], image.shape[2], height, width)
    if inner != image.shape[1:]:
        # Without antialiasing a reduced image would show every n-th pixel only.
        image = torch.nn.functional.interpolate(
            image.unsqueeze(0), inner, mode="bicubic", align_corners=False, antialias=True
        )[0]
        image = image.round_().clamp_(0, 255)  # the model was trained on whole numbers
    top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
    frame = torch.full((3, height, width), GREY)
    frame[:, top : top + inner[0], left : left + inner[1]] = image
    return frame


def _contained(height: int, width: int, frame_height: int, frame_width: int) -> tuple[int, int]:
    """Returns the largest height and width of this aspect inside the frame."""
    if width * frame_height > frame_width * height:
        return max(1, round(height * frame_width / width)), frame_width
    return frame_height, max(1, round(width * frame_height / height))


def span_rows(aligned: Tensor, start: Tensor, newline: Tensor, end: Tensor) -> Tensor:
    """Lays an image's rows out as its span of tokens.

    Args:
        aligned: `[rows, cols, D]`.
        start, newline, end: `[D]`, the embeddings of the marks.

    Returns:
        `[rows * (cols + 1) + 2, D]`: start, then each row followed by a newline, then end.
    """
    rows, _, hidden = aligned.shape
    lines = torch.cat((aligned, newline.expand(rows, 1, hidden)), 1)
    return torch.cat((start.unsqueeze(0), lines.flatten(0, 1), end.unsqueeze(0)))
