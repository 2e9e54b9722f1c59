"""The hash chain: golden values, and the same keys in every process."""

import itertools
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmesh import hashing
from flashmesh.errors import Incompatible
from flashmesh.types import BLOCK_TOKENS

# The worked example of docs/hashing.md; computed there with hashlib and struct alone.
FINGERPRINT, LAYOUT = bytes(range(32)), bytes(range(16))
ROOT = "7c840f86e3dcb925d8840477abb96f6ff8cefe5c9c6ebb360353c82bb251380a"
ROOT_QUANTIZED = "d9cc7d3fa5426aeff9f7afc023d023dee2c94172e3faa249304b633c7c8ebc95"
ROOT_SALTED = "783ad449552dd8cab9e6be832f5f98ed4a19877cf3e8eb59ed08df8ccc22f841"
CHAIN = ["fe4f280a84242dbab78323f24bd0a9bc", "d19c887fa72403ad77f82d30318062df"]
SALTED_BLOCK = "615e3d275f503ca22a3265ab2e710acd"
TOKENS_OF_BLOCK_0 = "1abb49eec50723c018c1197161b8cc46"

tokens_of_a_prompt = st.lists(st.integers(0, 2**32 - 1), max_size=4 * BLOCK_TOKENS)


def root(**changes):
    fields = {
        "fingerprint": FINGERPRINT,
        "layout_id": LAYOUT,
        "gemm_quantized": False,
        "tenant_salt": b"",
    }
    return hashing.root_hash(**fields | changes)


def test_the_golden_hashes_have_not_changed():
    assert root().hex() == ROOT
    assert root(gemm_quantized=True).hex() == ROOT_QUANTIZED
    assert root(tenant_salt=b"tenant").hex() == ROOT_SALTED
    assert [block.hex() for block in hashing.chain(root(), range(300))] == CHAIN
    extras = hashing.encode_extras([(hashing.EXTRA_CACHE_SALT, b"salt")])
    assert hashing.next_hash(root(), range(128), extras).hex() == SALTED_BLOCK
    assert hashing.token_fingerprint(range(128)).hex() == TOKENS_OF_BLOCK_0


@pytest.mark.parametrize("seed", ["0", "1", "2", "random"])
def test_every_process_computes_the_same_keys(seed):
    program = (
        "from flashmesh.hashing import *\n"
        f"root = root_hash(fingerprint={FINGERPRINT!r}, layout_id={LAYOUT!r},"
        " gemm_quantized=False, tenant_salt=b'')\n"
        "print(root.hex(), *[block.hex() for block in chain(root, range(300))])"
    )
    env = {**os.environ, "PYTHONHASHSEED": seed}
    out = subprocess.run(
        [sys.executable, "-P", "-c", program], env=env, capture_output=True, text=True, check=True
    )
    assert out.stdout.split() == [ROOT, *CHAIN]


def test_fields_of_the_root_cannot_be_shifted_into_each_other():
    assert root(layout_id=LAYOUT + b"x") != root(tenant_salt=b"x")
    assert root(fingerprint=FINGERPRINT + LAYOUT, layout_id=b"") != root()


def test_extras_do_not_depend_on_their_order():
    one, two = (1, b"salt"), (3, b"image")
    assert hashing.encode_extras([one, two]) == hashing.encode_extras([two, one])


def test_a_build_that_computes_other_keys_is_refused(monkeypatch):
    hashing.check_scheme()
    monkeypatch.setattr(hashing, "SCHEME", b"flashmesh-blocks-0")
    with pytest.raises(Incompatible, match=CHAIN[1]):
        hashing.check_scheme()


def blocks_of(*, extras=(), **root_fields):
    packed = hashing.encode_extras(extras)
    return set(hashing.chain(root(**root_fields), range(5 * BLOCK_TOKENS), packed))


WAYS_TO_DIFFER = {
    "none": {},
    "tenant salt": {"tenant_salt": b"X"},
    "model fingerprint": {"fingerprint": bytes(32)},
    "layout id": {"layout_id": bytes(16)},
    "quantised": {"gemm_quantized": True},
    "cache salt": {"extras": [(hashing.EXTRA_CACHE_SALT, b"X")]},
    "adapter": {"extras": [(hashing.EXTRA_ADAPTER, b"X")]},
    "image digest": {"extras": [(hashing.EXTRA_IMAGE, bytes(32))]},
    "another image digest": {"extras": [(hashing.EXTRA_IMAGE, bytes(31) + b"X")]},
    "salt and adapter": {"extras": [(1, b"X"), (2, b"X")]},
    "salt of both": {"extras": [(1, b"X\2\1\0\0\0X")]},
}


def test_equal_requests_share_every_block():
    for fields in WAYS_TO_DIFFER.values():
        assert len(blocks_of(**fields) & blocks_of(**fields)) == 5


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(WAYS_TO_DIFFER, 2)])
def test_requests_that_differ_in_one_thing_share_no_block(one, other):
    assert not blocks_of(**WAYS_TO_DIFFER[one]) & blocks_of(**WAYS_TO_DIFFER[other])


@given(
    tokens=st.lists(st.integers(1, 2**32 - 32), min_size=BLOCK_TOKENS, max_size=BLOCK_TOKENS),
    place=st.integers(0, BLOCK_TOKENS - 2),
)
def test_neighbours_that_a_polynomial_hash_confuses_have_different_keys(tokens, place):
    """31 x + y is the same for (x + 1, y - 31) and, the other way round, for (x - 1, y + 31)."""
    for change in ((31, -1), (-1, 31)):
        other = [*tokens]
        for offset, difference in enumerate(change):
            other[place + offset] = (other[place + offset] + difference) % 2**32
        assert hashing.next_hash(root(), tokens) != hashing.next_hash(root(), other)
        assert hashing.token_fingerprint(tokens) != hashing.token_fingerprint(other)


@given(tokens=tokens_of_a_prompt)
def test_only_whole_blocks_have_a_hash(tokens):
    assert len(list(hashing.chain(root(), tokens))) == len(tokens) // BLOCK_TOKENS


@given(tokens=tokens_of_a_prompt, cut=st.integers(0, 3))
def test_a_chain_can_be_continued_at_any_block(tokens, cut):
    whole = list(hashing.chain(root(), tokens))
    cut = min(cut, len(whole))
    parent = whole[cut - 1] if cut else root()
    assert [*whole[:cut], *hashing.chain(parent, tokens[cut * BLOCK_TOKENS :])] == whole


@settings(max_examples=20)
@given(tokens=st.lists(st.integers(0, 9), min_size=256, max_size=256), at=st.integers(0, 255))
def test_a_changed_token_changes_its_block_and_all_after_it(tokens, at):
    changed = [*tokens]
    changed[at] += 1
    same = [
        a == b
        for a, b in zip(hashing.chain(root(), tokens), hashing.chain(root(), changed), strict=True)
    ]
    assert same == [index < at // BLOCK_TOKENS for index in range(2)]
