"""Token buckets in a real Redis."""

import pytest

from flashmesh.errors import QuotaExceeded
from flashmesh.redis_client import connect
from flashmesh.services.router.quota import Quota, Quotas


def quotas(client, **limits):
    return Quotas(client, "test", Quota(**limits))


async def test_as_many_requests_as_the_minute_has_may_come_at_once_and_one_more_is_told_when(
    client,
):
    accounts = quotas(client, requests_per_min=5)
    for _ in range(5):
        await accounts.take("a", 10)
    with pytest.raises(QuotaExceeded, match="the key's quota is used up; try again in") as caught:
        await accounts.take("a", 10)
    assert 11 < caught.value.retry_after_s <= 12
    await accounts.take("b", 10)  # has an account of its own


async def test_tokens_of_answers_may_leave_a_debt_that_the_next_request_waits_for(client):
    accounts = quotas(client, tokens_per_min=600)
    await accounts.take("a", 100)
    await accounts.charge("a", 1100)
    with pytest.raises(QuotaExceeded) as caught:
        await accounts.take("a", 100)
    assert 68 < caught.value.retry_after_s <= 70


async def test_a_refused_request_takes_nothing_from_any_bucket(client):
    accounts = quotas(client, requests_per_min=2, tokens_per_min=100)
    await accounts.take("a", 100)
    for _ in range(3):
        with pytest.raises(QuotaExceeded):
            await accounts.take("a", 50)
    await quotas(client, requests_per_min=2).take("a", 0)


async def test_a_prompt_larger_than_the_bucket_takes_all_of_it_and_passes(client):
    accounts = quotas(client, tokens_per_min=100)
    await accounts.take("a", 5000)
    with pytest.raises(QuotaExceeded):
        await accounts.take("a", 1)


async def test_accounts_are_shared_by_routers_and_forgotten_when_full_again(client, redis_url):
    accounts = quotas(client, requests_per_min=1)
    await accounts.take("a", 1)
    other = connect(redis_url)
    with pytest.raises(QuotaExceeded):
        await quotas(other, requests_per_min=1).take("a", 1)
    await other.aclose()
    (key,) = await client.keys("*quota*")
    assert 0 < await client.ttl(key) <= 61


async def test_without_limits_without_a_key_and_without_redis_nobody_is_held_back(client):
    await quotas(client).take("a", 10**9)
    await quotas(client, requests_per_min=1).take("", 1)
    await quotas(client, requests_per_min=1).take("", 1)
    assert not await client.keys("*")
    gone = connect("redis://127.0.0.1:1")
    for _ in range(3):
        await quotas(gone, requests_per_min=1).take("a", 1)
    await gone.aclose()
