import pytest
import torch

from flashmesh.kernels import formats
from flashmesh.kernels.tilelang import expert_layout
from flashmesh.kernels.tilelang.expert_layout import prepare_experts, unpack_experts

EXPERTS, N, D = 3, 64, 192


@pytest.fixture
def stored():
    """w1, s1, w3, s3, w2, s2 with every code and every allowed scale."""
    random = torch.Generator().manual_seed(5)

    def draw(rows, columns, top):
        return torch.randint(0, top, (EXPERTS, rows, columns), dtype=torch.uint8, generator=random)

    made = []
    for rows, columns in ((N, D), (N, D), (D, N)):
        made += [draw(rows, columns // 2, 256), draw(rows, columns // 32, 129)]
    return made


def _expand(weight, scale):
    scale = scale.view(torch.float8_e8m0fnu)
    return torch.stack([formats.expand("F4", w, s) for w, s in zip(weight, scale, strict=True)])


def test_unpacking_gives_back_the_stored_values(stored):
    w1, s1, w3, s3, w2, s2 = stored
    weights = prepare_experts(*stored)
    assert (weights.num_experts, weights.n, weights.d) == (EXPERTS, N, D)
    for got, weight, scale in zip(unpack_experts(weights), (w1, w3, w2), (s1, s3, s2), strict=True):
        assert torch.equal(got, _expand(weight, scale))


def test_takes_the_dtypes_of_the_checkpoint(stored):
    typed = [t.view(torch.float8_e8m0fnu if i % 2 else torch.int8) for i, t in enumerate(stored)]
    for got, want in zip(prepare_experts(*typed)[:4], prepare_experts(*stored)[:4], strict=True):
        assert torch.equal(got, want)


def test_no_byte_is_spent_on_padding(stored):
    weights = prepare_experts(*stored)
    assert weights.w13.numel() == 2 * stored[0].numel()
    assert weights.s13.numel() == 2 * stored[1].numel()
    assert weights.w2.numel() == stored[4].numel()
    assert weights.s2.numel() == stored[5].numel()


def test_a_thread_finds_its_codes_where_the_tensor_core_wants_them(stored):
    """Widens words as a thread does, and compares with the m64k16 fragment of PTX."""
    weights = prepare_experts(*stored)
    w2 = unpack_experts(weights)[2][1]
    scales = weights.s2[1].view(torch.int32).flatten(0, 1)
    words = weights.w2[1].view(torch.int32).flatten(0, 1)
    tile, thread, j = 1, 77, 2
    word = words[tile, thread * 4 + j].item() & 0xFFFFFFFF
    exponents = scales[tile, thread // 4].item() & 0xFFFFFFFF
    pairs = [
        word & 0x81C081C0,
        (word << 3) & 0x81C081C0,
        ((word << 6) & 0x01C001C0) | ((word << 1) & 0x80008000),
        ((word >> 3) & 0x01C001C0) | ((word << 2) & 0x80008000),
    ]
    warp, lane = thread // 32, thread % 32
    for register, pair in enumerate(pairs):
        row = tile * 64 + warp * 16 + lane // 4 + register % 2 * 8
        exponent = (exponents >> (8 * (register % 2 * 2 + j // 2))) & 0xFF
        for high in (0, 1):
            column = j * 16 + lane % 4 * 2 + high + register // 2 * 8
            bits = torch.tensor([(pair >> (16 * high)) & 0xFFFF, exponent << 7])
            value, scale = bits.to(torch.uint16).view(torch.bfloat16).double()
            assert value * scale == w2[row, column].double()


def test_refuses_what_would_not_be_exact_or_does_not_fit(stored):
    large = [t.clone() for t in stored]
    large[3][2, 0, 0] = 129
    with pytest.raises(ValueError, match="exceeds 2"):
        prepare_experts(*large)
    with pytest.raises(ValueError, match="s2 has shape"):
        prepare_experts(*stored[:5], stored[5][:, :-1])
    with pytest.raises(ValueError, match="multiples of 64"):
        prepare_experts(*(t[:, :32] for t in stored[:4]), stored[4][..., :16], stored[5][..., :1])


def test_scale_bytes_fill_the_exponent_of_bf16():
    assert 128 + expert_layout._SCALE_OFFSET == 254
