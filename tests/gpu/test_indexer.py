import pytest
import torch

from flashmesh.kernels.ops import indexer as twin
from flashmesh.kernels.quantize import mxfp4_32
from flashmesh.kernels.tilelang import candidate, index_rows, index_scores, top_rows

pytestmark = pytest.mark.usefixtures("poison")

HEADS, WIDTH = 32, 128


def _inputs(random, visible, sequence, page_rows=64):
    """Random keys on shuffled pages; entries of the table that no row needs point far outside."""
    num_sequences = max(sequence, default=0) + 1
    pages = -(-max([*visible, 1]) // page_rows)
    total = num_sequences * pages
    keys = torch.randn(total * page_rows, WIDTH, device="cuda", generator=random)
    spread = torch.randint(-6, 6, (len(keys), 1), device="cuda", generator=random)
    codes, scales, _ = mxfp4_32(keys * spread.float().exp2())
    ik = torch.cat((codes.view(total, -1), scales.view(total, -1)), 1)
    table = torch.randperm(total, device="cuda", generator=random).view(num_sequences, pages).int()
    for index in range(num_sequences):
        ends = [end for end, of in zip(visible, sequence, strict=True) if of == index]
        table[index, -(-max([*ends, 0]) // page_rows) :] = 1 << 30
    rows = len(visible)
    iq = mxfp4_32(torch.randn(rows, HEADS, WIDTH, device="cuda", generator=random))[2].bfloat16()
    iw = torch.randn(rows, HEADS, device="cuda", generator=random)
    of = torch.tensor(sequence, device="cuda", dtype=torch.int32)
    ends = torch.tensor(visible, device="cuda", dtype=torch.int32)
    return iq, iw, ik, table, of, ends


def _assert_scores(scores, expected, iq, iw):
    assert torch.equal(scores.isfinite(), expected.isfinite())
    # Dots of 128 products in fp32 and a sum over 32 heads: well below 2^-16 of the absolute sum, for which the
    # largest score of a row stands here.
    seen = expected.isfinite()
    peak = expected.where(seen, 0).abs().amax(1, keepdim=True)
    error = (scores - expected).where(seen, 0).abs()
    assert (error <= 2**-14 * peak).all()


@pytest.mark.parametrize("page_rows", [64, 128])
@pytest.mark.parametrize(
    ("visible", "sequence"),
    [
        ([], []),
        ([1], [0]),
        ([0, 0], [0, 1]),
        ([1000, 1001, 63, 64, 65, 0, 4096], [0, 0, 1, 1, 1, 2, 3]),
        (list(range(3000, 3006)) * 3, [0] * 6 + [1] * 6 + [2] * 6),
        (list(range(5000, 5100)), [0] * 100),
    ],
)
def test_index_scores(random, visible, sequence, page_rows):
    args = _inputs(random, visible, sequence, page_rows)
    columns = -(-max([*visible, 1]) // 128) * 128 + 1280
    scores = index_scores.index_scores(*args, columns)
    _assert_scores(scores, twin.index_scores(*args, columns), *args[:2])


def test_a_row_scores_the_same_in_any_batch(random):
    visible = list(range(2000, 3000))
    iq, iw, ik, table, sequence, ends = _inputs(random, visible, [0] * 1000)
    whole = index_scores.index_scores(iq, iw, ik, table, sequence, ends, 4096)
    for first, rows, columns in ((0, 1, 4096), (7, 3, 3072), (64, 17, 3072), (501, 64, 8192)):
        part = slice(first, first + rows)
        scores = index_scores.index_scores(
            iq[part], iw[part], ik, table, sequence[part], ends[part], columns
        )
        assert torch.equal(scores[:, :3072], whole[part, :3072])


@pytest.mark.parametrize("page_rows", [64, 128])
def test_candidates_score_as_all_keys_do(random, page_rows):
    visible = [40000, 40001, 7, 16385, 0]
    args = _inputs(random, visible, [0, 0, 1, 2, 3], page_rows)
    scores = index_scores.index_scores(*args, 40064)
    blocks = twin.top_blocks(scores, args[5])
    found = candidate.candidate_scores(*args, blocks)
    keys = twin.expand_blocks(blocks, 8)
    expected = scores.gather(1, keys.clamp(min=0).long()).masked_fill(keys < 0, -torch.inf)
    assert torch.equal(found, expected)


def _scores(kind, rows, columns, random):
    x = torch.randn(rows, columns, device="cuda", generator=random)
    draw = torch.rand(rows, columns, device="cuda", generator=random)
    return {
        "normal": x,
        "mostly zero": x.where(draw < 0.003, 0.0),
        "zeros of both signs": torch.where(draw < 0.5, 0.0, -0.0),
        "few values": (x * 4).round() / 4,
        "one value": torch.full_like(x, 1.5),
        "rising": torch.arange(columns, device="cuda").float().expand(rows, -1).contiguous(),
        "falling": -torch.arange(columns, device="cuda").float().expand(rows, -1).contiguous(),
        "partly absent": x.where(draw < 0.5, -torch.inf),
        "close": 1 + x * 1e-4,
        "far": x * torch.exp2((draw - 0.5) * 200),
    }[kind]


KINDS = [
    "normal",
    "mostly zero",
    "zeros of both signs",
    "few values",
    "one value",
    "rising",
    "falling",
    "partly absent",
    "close",
    "far",
]


def _visible(rows, columns, random):
    visible = torch.randint(0, columns + 1, (rows,), device="cuda", generator=random).int()
    visible[0], visible[1:2] = columns, 0
    return visible


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("columns", "count"), [(128, 512), (4096, 512), (65536, 512), (1 << 20, 512), (16384, 64)]
)
def test_top_rows(random, kind, columns, count):
    scores = _scores(kind, 7, columns, random)
    visible = _visible(7, columns, random)
    selected = top_rows.top_rows(scores, visible, count)
    assert torch.equal(selected, twin.top_rows(scores, visible, count))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "partly absent"])
@pytest.mark.parametrize(("columns", "count"), [(1024, 16), (16384, 2048), (131072, 2048)])
def test_top_blocks(random, kind, columns, count):
    scores = _scores(kind, 7, columns, random)
    visible = _visible(7, columns, random)
    selected = top_rows.top_blocks(scores, visible, count=count)
    assert torch.equal(selected, twin.top_blocks(scores, visible, count=count))


def test_selection_depends_on_neither_batch_nor_width(random):
    scores = _scores("few values", 1000, 8192, random)
    visible = torch.full((1000,), 3000, dtype=torch.int32, device="cuda")
    whole = top_rows.top_rows(scores, visible, 512)
    for rows, columns in ((1, 8192), (3, 4096), (17, 3072), (64, 3072)):
        part = scores[:rows, :columns].contiguous()
        assert torch.equal(top_rows.top_rows(part, visible[:rows], 512), whole[:rows])


def test_no_rows():
    scores = torch.zeros(0, 8192, device="cuda")
    visible = torch.zeros(0, dtype=torch.int32, device="cuda")
    assert top_rows.top_rows(scores, visible, 512).shape == (0, 512)
    assert top_rows.top_blocks(scores, visible).shape == (0, 2048)


def test_columns_and_rows(random):
    scores = _scores("few values", 5, 16384, random)
    columns = twin.top_rows(scores, _visible(5, 16384, random), 512)
    blocks = torch.randint(0, 5000, (5, 2048), device="cuda", generator=random).int()
    keys = index_rows.gather_columns(columns, blocks)
    assert torch.equal(keys, twin.gather_columns(columns, blocks))
    table = torch.randint(0, 9999, (3, 1250), device="cuda", generator=random).int()
    sequence = torch.tensor([0, 0, 1, 2, 2], device="cuda").int()
    rows = index_rows.physical_rows(keys, table, sequence, 64)
    assert torch.equal(rows, twin.physical_rows(keys, table, sequence, 64))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"iq": (2, 16, 128)}, "32 heads"),
        ({"ik": (4, 4000)}, "64 or 128"),
        ({"visible": (3,)}, "rows"),
    ],
)
def test_other_shapes_are_refused(change, match):
    shapes = {"iq": (2, 32, 128), "ik": (4, 4352), "visible": (2,)} | change
    with pytest.raises(ValueError, match=match):
        index_scores.index_scores(
            torch.zeros(shapes["iq"], dtype=torch.bfloat16, device="cuda"),
            torch.zeros(2, 32, device="cuda"),
            torch.zeros(shapes["ik"], dtype=torch.uint8, device="cuda"),
            torch.zeros(1, 4, dtype=torch.int32, device="cuda"),
            torch.zeros(2, dtype=torch.int32, device="cuda"),
            torch.zeros(shapes["visible"], dtype=torch.int32, device="cuda"),
            256,
        )
