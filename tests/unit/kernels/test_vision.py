"""The tower against a second computation, written from the description with loops and plain numpy."""

import math

import numpy as np
import pytest
import torch
from support.vision import RELEASED

from flashmesh.kernels.image import plan_grid
from flashmesh.kernels.tensor_names import vision_tensors
from flashmesh.kernels.vision import VisionTower, rope_angles, rotate
from flashmesh.kernels.vision_config import VisionConfig

SIZES = {
    "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 12,
    "patch_size": 4, "max_image_tokens": 40, "min_pixels": 1,
}  # fmt: skip
CONFIG = VisionConfig.from_dict({"vision_config": RELEASED | SIZES})
TEXT_WIDTH = 10


def random_weights(seed=0):
    """fp32 by name; norms near one, and matrices that neither vanish nor explode."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape, _ in vision_tensors(CONFIG, TEXT_WIDTH):
        noise = torch.randn(shape, generator=generator)
        is_norm = "norm" in name
        weights[name] = 1 + 0.3 * noise if is_norm else noise * shape[-1] ** -0.5
    return weights


WEIGHTS = random_weights()
TOWER = VisionTower(CONFIG, WEIGHTS)
PLAIN = {name: value.double().numpy() for name, value in WEIGHTS.items()}


def norm(vector, name):
    return vector / math.sqrt(np.mean(vector**2) + 1e-6) * PLAIN[name + ".weight"]


def affine(vector, name):
    return PLAIN[name + ".weight"] @ vector + PLAIN[name + ".bias"]


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(vector):
    return np.array([x * 0.5 * (1 + math.erf(x / math.sqrt(2))) for x in vector])


def rotation(row, col, width):
    """The whole rotation of a patch as one matrix."""
    quarter, half = width // 4, width // 2
    matrix = np.zeros((width, width))
    for i in range(half):
        place, k = (row, i) if i < quarter else (col, i - quarter)
        angle = place * 10000 ** (-2 * k / half)
        matrix[i, i] = matrix[half + i, half + i] = math.cos(angle)
        matrix[i, half + i], matrix[half + i, i] = -math.sin(angle), math.sin(angle)
    return matrix


def attend(states, cols, prefix):
    """One attention over all patches: `[n, 16]` -> `[n, 16]`, a head and a query at a time."""
    heads, width = 2, 8
    qkv = [affine(norm(x, prefix + "norm1"), prefix + "attn.wqkv") for x in states]
    out = np.zeros_like(states)
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        turned = [rotation(*divmod(i, cols), width) for i in range(len(states))]
        q = [turn @ row[0:16][part] for turn, row in zip(turned, qkv, strict=True)]
        k = [turn @ row[16:32][part] for turn, row in zip(turned, qkv, strict=True)]
        v = [row[32:48][part] for row in qkv]
        for i, query in enumerate(q):
            scores = np.exp([query @ key / math.sqrt(width) for key in k])
            out[i, part] = sum(s * value for s, value in zip(scores / scores.sum(), v, strict=True))
    return np.array([affine(row, prefix + "attn.wo") for row in out])


def encode(pixels, rows, cols):
    """Everything up to the last norm, one patch after the other."""
    states = []
    for row in range(rows):
        for col in range(cols):
            patch = pixels[row * 4 : row * 4 + 4, col * 4 : col * 4 + 4].astype(float)
            values = [patch[y, x, c] for c in range(3) for y in range(4) for x in range(4)]
            flat = np.array([(value / 255 - 0.5) / 0.5 for value in values])
            states.append(affine(flat, "vision.patch_embed.proj"))
    states = np.array(states)
    for block in range(2):
        prefix = f"vision.blocks.{block}."
        states = states + attend(states, cols, prefix)
        for i, x in enumerate(states):
            both = PLAIN[prefix + "mlp.w1.weight"] @ norm(x, prefix + "norm2")
            states[i] = x + PLAIN[prefix + "mlp.w2.weight"] @ (silu(both[:12]) * both[12:])
    return np.array([norm(x, "vision.norm") for x in states])


def span(states, rows, cols):
    """Aligner and marks: every square gathered channel by channel, zeros beyond the grid."""
    out = [PLAIN["image_start"]]
    for top in range(0, rows, 3):
        for left in range(0, cols, 3):
            gathered = [
                states[(top + y) * cols + left + x][channel]
                if top + y < rows and left + x < cols
                else 0.0
                for channel in range(16)
                for y in range(3)
                for x in range(3)
            ]
            out.append(affine(gelu(affine(np.array(gathered), "aligner.w1")), "aligner.w2"))
        out.append(PLAIN["image_newline"])
    return np.array([*out, PLAIN["image_end"]])


def image(rows, cols, seed=0):
    """Random pixels that fill whole patches."""
    return np.random.default_rng(seed).integers(0, 256, (rows * 4, cols * 4, 3), dtype=np.uint8)


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 3), (4, 5), (5, 2), (1, 7), (6, 7)])
def test_an_image_agrees_with_a_second_computation(rows, cols):
    pixels = image(rows, cols)
    got = TOWER.embed(pixels).double().numpy()
    expected = span(encode(pixels, rows, cols), rows, cols)
    assert got.shape == expected.shape == (TOWER.num_tokens(pixels), TEXT_WIDTH)
    assert np.abs(got - expected).max() < 1e-4


def test_an_image_gives_the_same_bits_every_time():
    pixels = image(6, 7)
    before = TOWER.embed(pixels)
    TOWER.embed(image(2, 9, seed=1))
    assert torch.equal(TOWER.embed(pixels), before)


def test_every_patch_sees_every_other():
    pixels = image(3, 4)
    grid = plan_grid(16, 12, CONFIG)
    flat = torch.randn(12, 48, generator=torch.Generator().manual_seed(1))
    base = TOWER.encode(flat, grid)
    for place in range(12):
        moved = flat.clone()
        moved[place] += 1
        assert (TOWER.encode(moved, grid) != base).any(1).all()
    assert TOWER.num_tokens(pixels) == len(TOWER.embed(pixels))


def test_an_image_may_be_read_only_and_of_any_strides():
    pixels = image(3, 4)
    turned = np.ascontiguousarray(pixels[:, ::-1])[:, ::-1]
    turned.flags.writeable = False
    assert torch.equal(TOWER.embed(turned), TOWER.embed(pixels))


def test_released_angles_are_sixteen_of_the_row_then_sixteen_of_the_column():
    angles = rope_angles(5, 7, 64, 10000.0).view(5, 7, 32)
    for row, col, k in [(0, 0, 0), (4, 6, 0), (3, 2, 5), (4, 1, 15)]:
        frequency = 10000 ** (-2 * k / 32)
        assert math.isclose(angles[row, col, k], row * frequency, rel_tol=1e-5)
        assert math.isclose(angles[row, col, 16 + k], col * frequency, rel_tol=1e-5)


def turned(x, angles):
    return rotate(x, angles.cos(), angles.sin())


def test_a_rotation_keeps_lengths_and_leaves_the_first_patch():
    x = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(2))
    y = turned(x, rope_angles(3, 4, 8, 10000.0))
    assert torch.allclose(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-5)
    assert torch.equal(y[:, 0], x[:, 0])


def test_scores_depend_on_the_distance_in_rows_and_columns_only():
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(1, 1, 8, generator=generator).expand(1, 30, 8) for _ in range(2))
    angles = rope_angles(5, 6, 8, 10000.0)
    scores = (turned(q, angles) @ turned(k, angles).mT)[0].view(5, 6, 5, 6)
    for down, right in [(0, 0), (1, 0), (0, 1), (2, 3)]:
        values = torch.stack(
            [scores[r, c, r + down, c + right] for r in range(5 - down) for c in range(6 - right)]
        )
        assert float(values.max() - values.min()) < 1e-5
    assert abs(float(scores[0, 0, 1, 0] - scores[0, 0, 0, 1])) > 1e-3
    assert abs(float(scores[0, 0, 1, 0] - scores[1, 0, 0, 0])) > 1e-3
