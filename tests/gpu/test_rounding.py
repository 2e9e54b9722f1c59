import pytest
import torch

from flashmesh.kernels.ops import rounding as twin
from flashmesh.kernels.tilelang import rounding


@pytest.mark.parametrize("width", [32, 1280, 5120])
@pytest.mark.parametrize("rows", [0, 1, 7, 300])
def test_bits_equal_the_twins(random, rows, width):
    x = torch.randn(rows, width, device="cuda", generator=random) * 3
    x = torch.where(torch.rand(x.shape, device="cuda", generator=random) < 0.1, 0, x).bfloat16()
    assert torch.equal(rounding.round_rows(x), twin.round_rows(x))
