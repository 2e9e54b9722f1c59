import pytest
import torch

from flashmesh.kernels import quantize
from flashmesh.kernels.ops import indexer
from flashmesh.kernels.reference import select

HEADS, WIDTH, ROWS = 4, 64, 16


@pytest.fixture
def random():
    return torch.Generator().manual_seed(torch.seed() % 2**31)


def _inputs(random, visible, sequence, spare_pages=3):
    """Queries, weights and pages whose unused table entries point nowhere; and the keys of every sequence."""
    num_rows, num_sequences = len(visible), max(sequence) + 1
    pages = -(-max([*visible, 1]) // ROWS)
    keys = torch.randn(num_sequences * pages * ROWS, WIDTH, generator=random)
    codes, scales, values = quantize.mxfp4_32(keys)
    table = torch.randperm(num_sequences * pages, generator=random)
    ik = torch.empty(len(table), ROWS * (WIDTH // 2 + WIDTH // 32), dtype=torch.uint8)
    ik[table] = torch.cat((codes.view(len(table), -1), scales.view(len(table), -1)), 1)
    table = torch.nn.functional.pad(
        table.view(num_sequences, pages), (0, spare_pages), value=1 << 30
    )
    iq = quantize.mxfp4_32(torch.randn(num_rows, HEADS, WIDTH, generator=random))[2].bfloat16()
    iw = torch.randn(num_rows, HEADS, generator=random)
    args = iq, iw, ik, table.int(), torch.tensor(sequence).int(), torch.tensor(visible).int()
    return args, values.view(num_sequences, pages * ROWS, WIDTH)


def test_scores_sum_weighted_relu_of_every_head(random):
    args, keys = _inputs(random, visible=[40, 41, 100, 0, 7], sequence=[0, 0, 1, 2, 2])
    scores = indexer.index_scores(*args, 128)
    iq, iw, _, _, sequence, visible = args
    for row in range(5):
        end = visible[row]
        dots = torch.einsum("hf,jf->hj", iq[row].double(), keys[sequence[row], :end].double())
        expected = (dots.clamp(min=0) * iw[row, :, None].double()).sum(0)
        torch.testing.assert_close(scores[row, :end].double(), expected, rtol=1e-5, atol=1e-4)
        assert scores[row, end:].eq(-torch.inf).all()


def test_a_row_scores_the_same_in_any_batch(random):
    args, _ = _inputs(random, visible=[40, 41, 100, 99, 7], sequence=[0, 0, 1, 1, 1])
    iq, iw, ik, table, sequence, visible = args
    scores = indexer.index_scores(*args, 128)
    for row in range(5):
        part = slice(row, row + 1)
        alone = indexer.index_scores(
            iq[part], iw[part], ik, table, sequence[part], visible[part], 256
        )
        assert torch.equal(alone[:, :128], scores[part])


def test_candidates_score_as_all_keys_do(random):
    args, _ = _inputs(random, visible=[100, 93, 3, 0], sequence=[0, 0, 1, 1])
    blocks = torch.tensor([[0, 3, 12, -1], [2, 5, 11, -1], [0, -1, -1, -1], [-1, -1, -1, -1]])
    scores = indexer.index_scores(*args, 128)
    found = indexer.candidate_scores(*args, blocks.int())
    for row in range(4):
        for column in range(32):
            block = blocks[row, column // 8]
            key = block * 8 + column % 8
            expected = scores[row, key] if block >= 0 else -torch.inf
            assert found[row, column] == expected


def test_top_rows_prefers_high_then_left():
    scores = torch.tensor([[0.0, 2, -0.0, 1, 2, 0], [-3, -torch.inf, 5, 1, 9, 9]])
    visible = torch.tensor([6, 4]).int()
    assert indexer.top_rows(scores, visible, 3).tolist() == [[1, 3, 4], [0, 2, 3]]
    assert indexer.top_rows(scores, visible, 4).tolist() == [[0, 1, 3, 4], [0, 2, 3, -1]]
    assert indexer.top_rows(scores, visible * 0, 2).tolist() == [[-1, -1], [-1, -1]]


def test_top_blocks_is_the_candidate_mask(random):
    scores = torch.randn(6, 512, generator=random).mul(4).round()
    visible = torch.tensor([512, 511, 100, 33, 8, 0]).int()
    blocks = indexer.top_blocks(scores, visible, block=8, count=16)
    seen = torch.arange(512) < visible[:, None]
    mask = select.candidate_mask(scores, seen, block=8, count=16)
    for row in range(6):
        kept = mask[row].view(-1, 8).any(1).nonzero().squeeze(1).tolist()
        assert blocks[row].tolist() == kept + [-1] * (16 - len(kept))
        if visible[row]:
            assert (int(visible[row]) - 1) // 8 in kept


def test_two_levels_select_what_the_mask_allows(random):
    args, _ = _inputs(random, visible=[100, 93, 40], sequence=[0, 0, 1])
    visible = args[5]
    scores = indexer.index_scores(*args, 128)
    blocks = indexer.top_blocks(scores, visible, count=4)
    pool = indexer.candidate_scores(*args, blocks)
    whole = torch.full((3,), pool.shape[1]).int()
    selected = indexer.gather_columns(indexer.top_rows(pool, whole, 16), blocks)
    seen = torch.arange(128) < visible[:, None]
    mask = select.candidate_mask(scores, seen, block=8, count=4)
    assert torch.equal(selected, select.top_rows(scores, mask, 16).int())


def test_physical_rows_follow_the_page_table():
    table = torch.tensor([[5, 2, 1 << 30], [7, 1 << 30, 1 << 30]]).int()
    selected = torch.tensor([[0, 15, 16, 31], [3, 9, -1, -1]]).int()
    rows = indexer.physical_rows(selected, table, torch.tensor([0, 1]).int(), 16)
    assert rows.tolist() == [[80, 95, 32, 47], [115, 121, -1, -1]]


def test_no_rows_is_no_work(random):
    args, _ = _inputs(random, visible=[5], sequence=[0])
    none = [x[:0] for x in args[:2]] + list(args[2:4]) + [x[:0] for x in args[4:]]
    assert indexer.index_scores(*none, 128).shape == (0, 128)
    assert indexer.top_rows(torch.empty(0, 128), args[5][:0], 16).shape == (0, 16)
