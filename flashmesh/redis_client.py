"""The Redis client of all services: one factory, a bound on every call, and how keys begin."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import redis.asyncio
import redis.asyncio.retry
import redis.backoff
import redis.exceptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CALL_LIMIT_S = 5.0
CONNECT_LIMIT_S = 2.0


def connect(url: str) -> redis.asyncio.Redis:
    """Opens a client; no connection is made yet. Wrap its calls in `call_limit`.

    Args:
        url: redis://, rediss:// or unix://.
    """
    retry = redis.asyncio.retry.Retry(redis.backoff.ExponentialBackoff(cap=0.2, base=0.02), 2)
    # No socket_timeout: redis-py would write through asyncio.wait_for, which on Python 3.11 can
    # swallow a cancellation, and then a request or a service never ends.
    return redis.asyncio.Redis.from_url(
        url, socket_timeout=None, socket_connect_timeout=CONNECT_LIMIT_S, retry=retry
    )


def key_prefix(mesh: str) -> str:
    """Returns what every key of a mesh begins with.

    It is a hash tag: a mesh lives in one slot of a cluster, as its transactions and scripts need. A
    terabyte of blocks is 9.4 million claims and 100 MB of index, so one slot is enough.
    """
    return f"{{flashmesh:{mesh}}}"


@contextlib.asynccontextmanager
async def call_limit(limit_s: float = CALL_LIMIT_S) -> AsyncIterator[None]:
    """Bounds the calls of the body.

    Raises:
        redis.exceptions.TimeoutError: Redis did not answer in time.
    """
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        raise redis.exceptions.TimeoutError(f"no answer within {limit_s:g} s") from error
