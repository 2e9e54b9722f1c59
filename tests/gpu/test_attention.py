"""Sparse attention against its twin and its formula in double precision, and against itself in other batches."""

import pytest
import torch

from flashmesh.kernels.ops import attention as twin
from flashmesh.kernels.quantize import nvfp4_16
from flashmesh.kernels.tilelang import attention

pytestmark = pytest.mark.usefixtures("poison")

SCALE = 512**-0.5


def inputs(random, rows, window_keys=128, selected=512, absent=0.1):
    """Arguments by name; logits have a spread of about 4, as those of trained heads have."""

    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=random)

    def index(stored, keys):
        index = torch.randint(0, stored, (rows, keys), device="cuda", generator=random)
        index[torch.rand(rows, keys, device="cuda", generator=random) < absent] = -1
        return index.int()

    angle = torch.rand(rows, 32, device="cuda", generator=random) * 6
    codes = normal(900, 512).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    exponents = torch.randint(119, 122, (900, 16), device="cuda", generator=random).byte()
    pairs, scales, _ = nvfp4_16(normal(2000, 512) * 1.5)
    return {
        "q": (normal(rows, 64, 512) * 2).bfloat16(),
        "cos": angle.cos(),
        "sin": angle.sin(),
        "window": torch.cat((codes, exponents), 1),
        "window_index": index(900, window_keys),
        "kv": torch.cat((pairs, scales), 1),
        "kv_index": index(2000, selected),
        "sink": normal(64) * 2,
        "scale": SCALE,
    }


def exact(q, cos, sin, window, window_index, kv, kv_index, sink, scale):
    """The formula in fp64 on the rotated, bf16 queries."""
    gathered = [
        twin.unpack_window(window[window_index.clamp(min=0).long()]),
        twin.unpack_kv(kv[kv_index.clamp(min=0).long()]),
    ]
    keys = torch.cat(gathered, 1).double()
    absent = torch.cat((window_index, kv_index), 1) < 0
    turn = torch.complex(cos, sin).unsqueeze(1)

    def turned(x, turn):
        pairs = torch.view_as_complex(x[..., 448:].unflatten(-1, (-1, 2)).contiguous()) * turn
        return torch.cat((x[..., :448], torch.view_as_real(pairs).flatten(-2)), -1)

    logits = torch.einsum("the,tne->thn", turned(q.float(), turn).bfloat16().double(), keys) * scale
    logits.masked_fill_(absent.unsqueeze(1), -torch.inf)
    sinks = sink.double().view(1, -1, 1).expand(len(q), -1, 1)
    weights = torch.cat((logits, sinks), -1).softmax(-1)[..., :-1]
    return turned(torch.einsum("thn,tne->the", weights, keys), turn.conj().to(torch.complex128))


def rows_of(arguments, rows):
    per_row = ("q", "cos", "sin", "window_index", "kv_index")
    return {
        name: value[rows].contiguous() if name in per_row else value
        for name, value in arguments.items()
    }


def assert_right(arguments):
    out = attention.sparse_attention(**arguments)
    want = exact(**arguments)
    error = (out.double() - want).norm(dim=-1)
    # The result and the weights are rounded to bf16, each by 2^-9 of itself at most: together 2^-8 of a head where one
    # key dominates, and less where errors of many weights even out. Where a head's values cancel and those errors do
    # not, they are measured by an ordinary head, with a factor of 8 for the worst of them.
    assert (error <= 2**-8 * want.norm(dim=-1) + 2**-9 * want.norm(dim=-1).mean() * 8).all()
    assert error.norm() <= 2**-8 * want.norm()
    # The twin rounds only the result.
    assert (twin.sparse_attention(**arguments).double() - want).norm() <= 2**-8 * want.norm()


@pytest.mark.parametrize(
    ("window_keys", "selected"), [(128, 512), (128, 0), (192, 0), (128, 64), (192, 512)]
)
@pytest.mark.parametrize("rows", [1, 7, 150])
def test_heads_equal_the_formula(random, rows, window_keys, selected):
    assert_right(inputs(random, rows, window_keys, selected))


@pytest.mark.parametrize("selected", [0, 512])
def test_no_rows(random, selected):
    out = attention.sparse_attention(**inputs(random, 0, selected=selected))
    assert out.shape == (0, 64, 512)


def test_absent_keys_in_any_place(random):
    arguments = inputs(random, 12, absent=0.5)
    window, selected = arguments["window_index"], arguments["kv_index"]
    window[0] = selected[1] = -1  # one kind only
    window[2] = selected[2, :192] = -1  # nothing for the first block of threads
    selected[3, 192:] = -1  # nothing for the second
    window[4] = selected[4] = -1
    window[4, 77] = 5  # a single key
    selected[5, 1:] = window[5] = -1
    assert_right(arguments)


def test_a_row_without_keys_is_zero(random):
    arguments = inputs(random, 3)
    arguments["window_index"][1] = arguments["kv_index"][1] = -1
    out = attention.sparse_attention(**arguments)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert out[::2].isfinite().all()


def test_no_compressed_rows_stored(random):
    arguments = inputs(random, 3)
    arguments["kv"] = arguments["kv"][:0]
    arguments["kv_index"][:] = -1
    out = attention.sparse_attention(**arguments)
    want = twin.sparse_attention(**arguments)
    assert (out.double() - want.double()).norm() <= 2**-7 * want.double().norm()


def test_codes_scales_and_bytes_of_every_value(random):
    """A row with one key is that key: all codes under all scales come out exactly."""
    arguments = inputs(random, 256)
    arguments["window_index"][:] = arguments["kv_index"][:] = -1
    arguments["kv_index"][:, 100] = torch.arange(256, device="cuda")
    arguments["sink"][:] = -1e30
    arguments["cos"][:] = 1
    arguments["sin"][:] = 0
    arguments["q"][:] = 0
    byte = torch.arange(256, device="cuda").byte()
    arguments["kv"] = torch.cat(
        (byte.expand(256, 256), byte.clamp(max=126).unsqueeze(1).expand(-1, 32)), 1
    ).contiguous()
    out = attention.sparse_attention(**arguments)
    want = twin.unpack_kv(arguments["kv"]).bfloat16().unsqueeze(1).expand_as(out)
    assert torch.equal(out, want)

    arguments["kv_index"][:] = -1
    arguments["window_index"][:, 3] = torch.arange(256, device="cuda")
    number = torch.where(byte & 127 == 127, 0, byte)  # the others are not numbers
    exponents = torch.randint(100, 140, (256, 16), device="cuda", generator=random).byte()
    arguments["window"] = torch.cat((number.repeat(256, 2), exponents), 1).contiguous()
    out = attention.sparse_attention(**arguments)
    want = twin.unpack_window(arguments["window"]).bfloat16().unsqueeze(1).expand_as(out)
    assert torch.equal(out, want)


def test_extreme_logits(random):
    arguments = inputs(random, 5)
    arguments["q"] *= 30
    assert_right(arguments)
    arguments["sink"][::2] = 200
    arguments["sink"][1::2] = -torch.inf
    assert_right(arguments)


@pytest.mark.parametrize("selected", [0, 512])
def test_bits_of_a_row_do_not_depend_on_the_batch(random, selected):
    arguments = inputs(random, 1000, selected=selected, absent=0.2)
    out = attention.sparse_attention(**arguments)
    for rows in (1, 3, 17, 64, 385):
        picked = torch.randint(0, 1000, (rows,), device="cuda", generator=random)
        assert torch.equal(attention.sparse_attention(**rows_of(arguments, picked)), out[picked])


def test_bits_do_not_change_between_runs(random):
    arguments = inputs(random, 400)
    first = attention.sparse_attention(**arguments)
    for _ in range(20):
        assert torch.equal(attention.sparse_attention(**arguments), first)


def test_replays_in_a_graph(random):
    arguments = inputs(random, 9)
    want = attention.sparse_attention(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.sparse_attention(**arguments)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, want)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", lambda x: x[:, :32].contiguous()),
        ("q", lambda x: x.float()),
        ("cos", lambda x: x[:, :16].contiguous()),
        ("window", lambda x: x[:, :288].contiguous()),
        ("window_index", lambda x: x[:, :100].contiguous()),
        ("kv", lambda x: x[:, 1:]),
        ("kv_index", lambda x: x.long()),
        ("kv_index", lambda x: x[:, ::2]),
        ("sink", lambda x: x[:8]),
        ("scale", lambda x: -x),
    ],
)
def test_refuses_other_shapes(random, name, change):
    arguments = inputs(random, 2)
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=name if name != "window_index" else "window"):
        attention.sparse_attention(**arguments)
