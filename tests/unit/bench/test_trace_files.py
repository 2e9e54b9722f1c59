"""Reading traces, the tokens they stand for, and what a store without bounds would find in them."""

import gzip
import itertools
import json
import lzma

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmesh.bench.trace_files import (
    TRACE_BLOCK_TOKENS,
    TraceRequest,
    bundled,
    cacheable_tokens,
    draw_tokens,
    read_trace,
    trace_name,
)
from flashmesh.errors import InvalidRequest
from flashmesh.hashing import chain
from flashmesh.types import BLOCK_TOKENS

LINES = [
    {"timestamp": 1500, "input_length": 700, "output_length": 3, "hash_ids": [0, 5]},
    {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [0]},
]
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,513,10
2023-11-16 18:17:04.0319600,20,8"""


def mooncake(lines):
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [("jsonl", bytes), ("jsonl.gz", gzip.compress), ("jsonl.xz", lzma.compress)],
)
def test_mooncake_lines_come_in_order_of_arrival(tmp_path, suffix, pack):
    path = tmp_path / f"t.{suffix}"
    path.write_bytes(pack(mooncake(LINES).encode()))
    first, second = read_trace(path)
    assert (first.at_s, second.at_s) == (0.0, 1.5)
    assert (second.num_prompt_tokens, second.num_output_tokens) == (700, 3)
    assert list(second.block_ids) == [0, 5]


def test_azure_lines_share_nothing(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    first, second = read_trace(path)
    assert second.at_s == pytest.approx(0.052)
    assert [list(request.block_ids) for request in (first, second)] == [[0, 1], [2]]
    assert cacheable_tokens([first, second]) == 0


def changed(**fields):
    return mooncake([LINES[0], LINES[1] | fields])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected Mooncake's JSON lines or Azure's CSV, found ''"),
        ("a,b\n1,2\n", "found 'a,b'"),
        (changed(input_length=0), r"line 2: .*0 tokens in and 1 out"),
        (changed(output_length=0), r"line 2: .*512 tokens in and 0 out"),
        (changed(hash_ids=[0, 1]), r"line 2: .*512 tokens have 1 blocks of 512, not 2"),
        (changed(timestamp=None), "line 2: TypeError"),
        (mooncake(LINES[:1]) + "{}\n", "line 2: KeyError"),
        (mooncake(LINES[:1]) + "{\n", "line 2: JSONDecodeError"),
        (AZURE + "\nyesterday,1,1", "line 4: ValueError"),
    ],
)
def test_a_bad_line_is_named(tmp_path, text, problem):
    path = tmp_path / "t.trace"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=problem):
        read_trace(path)


@pytest.mark.parametrize("name", ["t.gz", "t.xz", "t.jsonl"])
def test_what_cannot_be_unpacked_is_refused(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="not a readable trace"):
        read_trace(path)


def test_tokens_follow_from_names_and_are_ordinary_ones():
    assert draw_tokens("block/7", 64) == draw_tokens("block/7", 512)[:64]
    assert draw_tokens("block/7", 64) != draw_tokens("block/8", 64)
    assert set(draw_tokens("block/7", 4096)) <= set(range(2048, 4096))


def test_the_traces_that_come_along_are_read():
    counts = {name: len(read_trace(source)) for name, source in bundled().items()}
    assert counts == {"azure2023_code": 8819, "conversation": 12031, "synthetic": 3993}


def test_a_trace_is_named_by_its_file():
    assert trace_name("mooncake_conversation.jsonl.xz") == "conversation"
    assert trace_name("mine.csv") == "mine"


@st.composite
def request_lists(draw):
    """Requests over few block ids, numbered as the traces do: one id for a block and all before it."""
    ids = {}
    requests = []
    for path in draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), max_size=6)):
        block_ids = [ids.setdefault(tuple(path[: end + 1]), len(ids)) for end in range(len(path))]
        missing = draw(st.integers(0, TRACE_BLOCK_TOKENS - 1))
        requests.append(
            TraceRequest(
                at_s=0.0,
                num_prompt_tokens=len(path) * TRACE_BLOCK_TOKENS - missing,
                num_output_tokens=1,
                block_ids=block_ids,
            )
        )
    return requests


@given(requests=request_lists())
def test_cacheable_tokens_are_those_that_a_set_of_block_hashes_finds(requests):
    stored, total = set(), 0
    for request in requests:
        hashes = list(chain(bytes(32), request.prompt()))
        total += len(list(itertools.takewhile(stored.__contains__, hashes)))
        stored.update(hashes)
    assert cacheable_tokens(requests) == total * BLOCK_TOKENS
