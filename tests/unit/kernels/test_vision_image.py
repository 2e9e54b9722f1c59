"""Sizes, spans and pixels: against the arithmetic of the released preprocessing, over many image sizes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.vision import RELEASED

from flashmesh.errors import InvalidRequest
from flashmesh.kernels.image import GREY, patches, plan_grid, span_length, span_rows
from flashmesh.kernels.vision_config import VisionConfig

CONFIG = VisionConfig.from_dict({"vision_config": RELEASED})
SMALL = VisionConfig.from_dict(
    {"vision_config": RELEASED | {"patch_size": 4, "min_pixels": 1, "max_image_tokens": 40}}
)
SIDES = st.integers(1, 6000)


def unpatch(flat, grid, config):
    """Patches back to pixels of [0, 255], by loops."""
    size = config.patch_size
    image = np.zeros((grid.patch_rows * size, grid.patch_cols * size, 3))
    for place, patch in enumerate(flat.numpy().reshape(-1, 3, size, size)):
        row, col = divmod(place, grid.patch_cols)
        for channel in range(3):
            window = image[row * size :, col * size :, channel]
            window[:size, :size] = patch[channel]
    return (image * 0.5 + 0.5) * 255


@pytest.mark.parametrize(
    ("width", "height", "patch_rows", "patch_cols", "num_tokens"),
    [
        (544, 544, 39, 39, 13 * 14 + 2),  # exactly min_pixels
        (100, 100, 39, 39, 13 * 14 + 2),  # scaled up to min_pixels
        (1000, 800, 58, 72, 20 * 25 + 2),
        (1302, 1302, 93, 93, 31 * 32 + 2),  # 994; one more row or column would exceed 1024
        (1303, 1303, 93, 93, 31 * 32 + 2),
        (
            4000,
            3000,
            81,
            108,
            27 * 37 + 2,
        ),  # 28 rows leave room for 35 columns only: a smaller image
        (100_000, 1, 1, 3063, 1 * 1022 + 2),
        (1, 100_000, 1533, 1, 511 * 2 + 2),
    ],
)
def test_known_sizes(width, height, patch_rows, patch_cols, num_tokens):
    grid = plan_grid(width, height, CONFIG)
    assert (grid.patch_rows, grid.patch_cols) == (patch_rows, patch_cols)
    assert grid.num_tokens == num_tokens


@given(SIDES, SIDES)
def test_a_span_is_never_too_long_and_counts_its_patches(width, height):
    grid = plan_grid(width, height, CONFIG)
    assert grid.rows == math.ceil(grid.patch_rows / 3)
    assert grid.cols == math.ceil(grid.patch_cols / 3)
    assert grid.num_tokens == grid.rows * (grid.cols + 1) + 2 == span_length(grid.rows, grid.cols)
    assert 4 <= grid.num_tokens <= CONFIG.max_image_tokens


@given(st.integers(544, 1302), st.integers(544, 1302))
def test_an_image_that_fits_keeps_its_size_in_whole_patches(width, height):
    grid = plan_grid(width, height, CONFIG)
    assert (grid.patch_rows, grid.patch_cols) == (-(-height // 14), -(-width // 14))


@given(st.integers(1, 543), st.integers(1, 543))
def test_a_small_image_is_scaled_up_to_the_least_number_of_pixels(width, height):
    grid = plan_grid(width, height, CONFIG)
    shrunk = grid.rows == 1 or grid.cols == 1 or max(width, height) > 40 * min(width, height)
    assert shrunk or grid.patch_rows * grid.patch_cols * 14 * 14 >= CONFIG.min_pixels
    scale = math.sqrt(CONFIG.min_pixels / (width * height))
    assert grid.patch_rows <= math.ceil(height * scale / 14)
    assert grid.patch_cols <= math.ceil(width * scale / 14)


@given(SIDES, SIDES)
def test_the_aspect_is_kept_to_the_patch(width, height):
    """One scale gives both sides: the scales that round up to each of them have some in common."""
    grid = plan_grid(width, height, CONFIG)
    low = max((grid.patch_rows - 1) * 14 / height, (grid.patch_cols - 1) * 14 / width)
    high = min(grid.patch_rows * 14 / height, grid.patch_cols * 14 / width)
    assert low < high * (1 + 1e-9)


@settings(max_examples=30)
@given(st.integers(1600, 6000), st.integers(1600, 6000))
def test_a_shrunk_image_takes_the_largest_scale_that_fits(width, height):
    """Tries every scale at which a side fills whole squares of patches, largest first."""
    scales = sorted({42 * n / side for n in range(1, 1023) for side in (width, height)})
    fitting = [
        scale
        for scale in scales
        if math.ceil(height * scale / 42 - 1e-6) * (math.ceil(width * scale / 42 - 1e-6) + 1)
        <= 1022
    ]
    grid = plan_grid(width, height, CONFIG)
    assert grid.patch_rows == math.ceil(height * fitting[-1] / 14 - 1e-6)
    assert grid.patch_cols == math.ceil(width * fitting[-1] / 14 - 1e-6)


@settings(max_examples=30)
@given(st.integers(1, 60), st.integers(1, 60), st.randoms(use_true_random=False))
def test_every_prepared_image_has_its_planned_patches_within_range(width, height, random):
    pixels = np.array(
        [[[random.randrange(256) for _ in range(3)]] * width] * height, dtype=np.uint8
    )
    flat, grid = patches(pixels, SMALL)
    assert grid == plan_grid(width, height, SMALL)
    assert flat.shape == (grid.patch_rows * grid.patch_cols, 48)
    assert flat.dtype == torch.float32
    assert float(flat.min()) >= -1
    assert float(flat.max()) <= 1


def test_an_image_of_whole_patches_passes_unchanged():
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    flat, grid = patches(pixels, SMALL)
    assert np.abs(unpatch(flat, grid, SMALL) - pixels).max() < 1e-4


@pytest.mark.parametrize("shape", [(9, 21), (21, 9), (3, 40)])
def test_what_the_image_does_not_fill_is_grey_on_both_sides(shape):
    """A white image in a frame of other aspect: a white rectangle of its own aspect, centred."""
    flat, grid = patches(np.full((*shape, 3), 255, dtype=np.uint8), SMALL)
    image = unpatch(flat, grid, SMALL).round()
    assert set(np.unique(image)) <= {GREY, 255.0}
    rows, cols = (np.flatnonzero((image[..., 0] == 255).any(axis)) for axis in (1, 0))
    height, width = len(rows), len(cols)
    assert abs(height * shape[1] - width * shape[0]) <= max(shape) / 2
    for filled, side in ((rows, image.shape[0]), (cols, image.shape[1])):
        assert abs(int(filled[0]) - (side - 1 - int(filled[-1]))) <= 1
    assert height == image.shape[0] or width == image.shape[1]


def cubic_matrix(old, new):
    """Row i holds the weights of output pixel i: Keys' cubic with a = -1/2, widened when reducing."""
    step = old / new
    width = max(step, 1)
    matrix = np.zeros((new, old))
    for i in range(new):
        for j in range(old):
            x = abs((j + 0.5 - (i + 0.5) * step) / width)
            if x < 1:
                matrix[i, j] = 1.5 * x**3 - 2.5 * x**2 + 1
            elif x < 2:
                matrix[i, j] = -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
    return matrix / matrix.sum(1, keepdims=True)


@pytest.mark.parametrize(("old", "new"), [((40, 80), (24, 48)), ((5, 10), (8, 16))])
def test_resizing_is_bicubic_and_antialiased(old, new):
    pixels = np.random.default_rng(1).integers(0, 256, (*old, 3), dtype=np.uint8)
    limit = span_length(-(-new[0] // 12), -(-new[1] // 12))
    changes = {"patch_size": 4, "max_image_tokens": limit, "min_pixels": 1}
    if new > old:
        changes["min_pixels"] = new[0] * new[1]
    config = VisionConfig.from_dict({"vision_config": RELEASED | changes})
    flat, grid = patches(pixels, config)
    assert (grid.patch_rows * 4, grid.patch_cols * 4) == new
    rows, cols = cubic_matrix(old[0], new[0]), cubic_matrix(old[1], new[1])
    expected = np.einsum("ij,jkc,lk->ilc", rows, pixels.astype(float), cols)
    assert np.abs(unpatch(flat, grid, config) - expected.clip(0, 255)).max() <= 0.51


@pytest.mark.parametrize(
    ("pixels", "expected"),
    [
        (np.zeros((4, 4, 3)), "uint8, found float64"),
        ([[[0, 0, 0]]], "uint8, found list"),
        (np.zeros((4, 4), dtype=np.uint8), r"found \[4, 4\]"),
        (np.zeros((3, 4, 4), dtype=np.uint8), r"found \[3, 4, 4\]"),
        (np.zeros((0, 4, 3), dtype=np.uint8), "4 x 0 pixels is empty"),
    ],
)
def test_what_is_no_image_is_refused(pixels, expected):
    with pytest.raises(InvalidRequest, match=expected):
        patches(pixels, SMALL)


def test_a_span_is_start_then_rows_each_with_a_newline_then_end():
    aligned = torch.arange(6.0).view(2, 3, 1)
    start, newline, end = (torch.tensor([value]) for value in (-1.0, -2.0, -3.0))
    got = span_rows(aligned, start, newline, end).flatten().tolist()
    assert got == [-1, 0, 1, 2, -2, 3, 4, 5, -2, -3]
    assert len(got) == span_length(2, 3)
