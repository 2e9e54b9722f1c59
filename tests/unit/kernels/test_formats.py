"""Weight formats: exact expansion, exact quantising."""

import torch

from flashmesh.kernels.formats import expand, quantise, stored
from flashmesh.kernels.quantize import e2m1_codes

KINDS = ("F8", "F4", "F8row")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def round_trip(kind, values):
    return expand(kind, *quantise(kind, values))


def test_a_tie_between_e2m1_values_goes_to_the_even_code():
    midpoints = (E2M1[1:] + E2M1[:-1]) / 2
    assert e2m1_codes(midpoints).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert e2m1_codes(-midpoints).tolist() == [8, 10, 10, 12, 12, 14, 14]


def test_values_beside_a_tie_go_to_the_nearer_code():
    midpoints = (E2M1[1:] + E2M1[:-1]) / 2
    infinity = torch.tensor(torch.inf)
    assert e2m1_codes(midpoints.nextafter(infinity)).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert e2m1_codes(midpoints.nextafter(-infinity)).tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_e2m1_keeps_the_sign_of_zero():
    assert e2m1_codes(torch.tensor([0.0, -0.0, -0.1])).tolist() == [0, 8, 8]


def test_every_e2m1_code_expands_with_the_even_column_in_the_low_nibble():
    weight = torch.tensor([[low | high << 4 for high in range(16) for low in range(16)]])
    scale = torch.full((1, 16), 128, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    got = expand("F4", weight.to(torch.uint8).view(torch.int8), scale)
    both = torch.cat((E2M1, -E2M1)) * 2
    assert torch.equal(got[0, 0::2], both.repeat(16))
    assert torch.equal(got[0, 1::2], both.repeat_interleave(16))


def test_an_f8_scale_covers_its_tile_even_at_ragged_edges():
    weight = torch.ones(40, 70).to(torch.float8_e4m3fn)
    scale = torch.tensor([[127, 128, 129], [130, 131, 132]], dtype=torch.uint8)
    got = expand("F8", weight, scale.view(torch.float8_e8m0fnu))
    for row, column, value in ((31, 31, 1), (0, 32, 2), (31, 69, 4), (32, 0, 8), (39, 69, 32)):
        assert got[row, column] == value
    assert got.shape == (40, 70)


def test_an_f8row_scale_covers_32_columns_of_one_row():
    weight = torch.ones(2, 64).to(torch.float8_e4m3fn)
    scale = torch.tensor([[127, 128], [129, 126]], dtype=torch.uint8)
    got = expand("F8row", weight, scale.view(torch.float8_e8m0fnu))
    assert got[:, ::32].tolist() == [[1, 2], [4, 0.5]]


def test_scale_byte_255_expands_to_nan():
    for kind in KINDS:
        weight, scale = quantise(kind, normal(32, 32))
        scale.view(torch.uint8)[0, 0] = 255
        assert expand(kind, weight, scale)[0].isnan().all()


def test_the_smallest_and_largest_scale_bytes_expand_exactly():
    weight = torch.ones(2, 32).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0], [254]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert expand("F8row", weight, scale)[:, 0].tolist() == [2.0**-127, 2.0**127]


def test_quantising_what_was_expanded_changes_nothing():
    for kind in KINDS:
        once = round_trip(kind, normal(64, 96))
        assert torch.equal(round_trip(kind, once), once)


def test_stored_values_are_exact_in_bf16():
    for kind in KINDS:
        once = round_trip(kind, normal(64, 96))
        assert torch.equal(once.bfloat16().float(), once)


def test_rounding_stays_within_half_a_step_of_the_largest_value():
    values = normal(64, 64)
    for kind, step in (("F8", 2**-4), ("F8row", 2**-4), ("F4", 2**-2)):
        # Relative to the tile's maximum, at worst half the gap below the largest code: 32 of 448 in
        # e4m3, 2 of 6 in e2m1, and the scale may sit just under twice as high as needed.
        error = (round_trip(kind, values) - values).abs().max()
        assert error <= step * values.abs().max()


def test_the_scale_is_the_smallest_that_clips_nothing():
    for kind, limit in (("F8", 448.0), ("F8row", 448.0), ("F4", 6.0)):
        for value, byte in ((limit, 127), (limit * (1 + 2**-22), 128), (limit / 2, 126)):
            _, scale = quantise(kind, torch.full((1, 32), value))
            assert scale.view(torch.uint8).item() == byte


def test_zeros_stay_zeros():
    for kind in KINDS:
        assert torch.equal(round_trip(kind, torch.zeros(33, 64)), torch.zeros(33, 64))


def test_stored_shapes_are_those_that_quantising_makes():
    for kind in (*KINDS, "BF16", "F32"):
        weight, scale = quantise(kind, normal(40, 96))
        expected = stored(kind, (40, 96))
        assert tuple(weight.shape) == expected.shape
        assert (None if scale is None else tuple(scale.shape)) == expected.scale_shape
