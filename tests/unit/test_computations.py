"""Requests that wait for each other's blocks."""

import asyncio

from flashmesh.computations import Computations


def chain(text):
    """Hashes of a chain: each names all before it, as the real ones do."""
    return [text[: end + 1].encode().ljust(16, b"-") for end in range(len(text))]


async def arrived(computations, hashes, num_stored=0):
    return [count async for count in computations.arrivals(hashes, num_stored)]


async def test_without_a_claim_nobody_waits():
    assert await arrived(Computations(), chain("abc")) == []


async def test_a_follower_gets_the_shared_blocks_as_they_are_stored():
    computations = Computations()
    with computations.claim(chain("abcd")) as leader:
        leader.advance(1)
        waiting = asyncio.ensure_future(arrived(computations, chain("abcx")))
        await asyncio.sleep(0)
        assert not waiting.done()
        leader.advance(4)
        assert await waiting == [1, 3]


async def test_a_follower_that_has_some_waits_for_the_rest():
    computations = Computations()
    with computations.claim(chain("abcd")[1:]) as leader:  # it began with a hit
        waiting = asyncio.ensure_future(arrived(computations, chain("abcd"), 2))
        await asyncio.sleep(0)
        leader.advance(1)  # "b", which the follower has
        leader.advance(2)
        leader.advance(3)
        assert (await waiting)[-1] == 4


async def test_of_many_that_waited_for_a_claim_that_fails_one_claims_the_rest():
    computations, claimed = Computations(), []

    async def follow(name):
        stored = max([0, *(await arrived(computations, chain("abcd")))])
        if stored < 4:
            with computations.claim(chain("abcd")[stored:]) as mine:
                claimed.append((name, stored))
                await asyncio.sleep(0)
                mine.advance(4 - stored)

    with computations.claim(chain("abcd")) as leader:
        followers = [asyncio.ensure_future(follow(name)) for name in range(5)]
        await asyncio.sleep(0)
        leader.advance(2)
        await asyncio.sleep(0)
    await asyncio.gather(*followers)
    assert len(claimed) == 1
    assert claimed[0][1] == 2


async def test_a_chain_may_be_computed_by_several():
    computations = Computations()
    with computations.claim(chain("ab")) as one, computations.claim(chain("abcd")) as two:
        waiting = asyncio.ensure_future(arrived(computations, chain("abcd")))
        await asyncio.sleep(0)
        one.advance(2)
        await asyncio.sleep(0)
        two.advance(4)
        assert (await waiting)[-1] == 4
