"""What both doors share: admission and validation, without a mesh behind."""

import threading
from types import SimpleNamespace

import pytest
from support.recipe import MODEL, codec

from flashmesh.errors import InvalidRequest, Overloaded, PromptTooLong
from flashmesh.services.router.config import RouterConfig
from flashmesh.services.router.door import INLINE_CHARS, Door, off_loop
from flashmesh.services.router.quota import Quota, Quotas
from flashmesh.types import SamplingParams


@pytest.fixture
def door():
    return Door(
        SimpleNamespace(config=RouterConfig(max_requests=2)), codec(), Quotas(None, "test", Quota())
    )


def test_one_request_too_many_is_refused_and_each_is_counted_once(door):
    with door.admitted() as first, door.admitted():
        assert first.startswith("req-")
        with pytest.raises(Overloaded), door.admitted():
            pass
        assert door.num_requests == 2
    assert door.num_requests == 0


def test_a_request_that_fails_gives_its_place_back(door):
    with pytest.raises(ZeroDivisionError), door.admitted():
        raise ZeroDivisionError
    assert door.num_requests == 0


def test_a_missing_seed_is_drawn_and_a_given_one_kept(door):
    params = SamplingParams()
    drawn = {door.start(MODEL, [5], params, seed=None).call.params.seed for _ in range(4)}
    assert len(drawn) == 4
    assert door.start(MODEL, [5], params, seed=0).call.params.seed == 0


def test_salts_reach_the_call(door):
    call = door.start(MODEL, [5], SamplingParams(), seed=1, cache_salt=b"c", tenant_salt=b"t").call
    assert (call.cache_salt, call.tenant_salt) == (b"c", b"t")


@pytest.mark.parametrize(
    ("prompt", "fields", "error"),
    [
        ([], {}, InvalidRequest),
        ([MODEL.vocab_size], {}, InvalidRequest),
        ([5] * MODEL.max_context_tokens, {}, PromptTooLong),
        ([5], {"priority": 101}, InvalidRequest),
        ([5], {"cache_salt": bytes(257)}, InvalidRequest),
    ],
)
def test_what_cannot_be_served_is_refused(door, prompt, fields, error):
    with pytest.raises(error):
        door.start(MODEL, prompt, SamplingParams(), seed=1, **fields)


async def test_only_long_texts_go_to_a_thread():
    here = threading.get_ident()
    assert await off_loop(INLINE_CHARS, threading.get_ident) == here
    assert await off_loop(INLINE_CHARS + 1, threading.get_ident) != here
