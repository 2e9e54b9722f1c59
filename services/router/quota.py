"""How much a tenant may ask for: token buckets in Redis, one account for all routers.

A bucket is one number, the time at which it would be empty again: what is taken moves it into the future, and a tenant
may be ahead by its burst. (The generic cell rate algorithm, as ATM Forum TM 4.0 calls it.) The clock is Redis's.
What an answer costs is known when it ends, so its tokens are taken then, and may leave the bucket in debt; the next
request waits for that. Without Redis nobody is held back.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import redis.asyncio
import redis.exceptions

from flashmesh.errors import QuotaExceeded
from flashmesh.redis_client import call_limit, key_prefix

log = logging.getLogger(__name__)

LIMIT_S = 1.0
"""A request would rather go on unlimited than wait for a Redis that is silent."""

# KEYS: one bucket each. ARGV: for each its rate a second, its burst, and what to take; last, whether to take it even
# from an empty bucket. Returns the milliseconds to wait, 0 if it was taken.
_TAKE = """
local now = redis.call('TIME')
now = tonumber(now[1]) + tonumber(now[2]) / 1e6
local wait, full = 0, {}
for i = 1, #KEYS do
  local rate, burst, amount = tonumber(ARGV[3*i-2]), tonumber(ARGV[3*i-1]), tonumber(ARGV[3*i])
  local at = math.max(tonumber(redis.call('GET', KEYS[i]) or '0'), now)
  full[i] = at + amount / rate
  wait = math.max(wait, full[i] - now - burst / rate)
end
if wait > 0 and ARGV[#ARGV] == '0' then return math.ceil(wait * 1000) end
for i = 1, #KEYS do
  local rate, burst = tonumber(ARGV[3*i-2]), tonumber(ARGV[3*i-1])
  redis.call('SET', KEYS[i], string.format('%.6f', full[i]), 'EX', math.ceil(full[i] - now) + 1)
end
return 0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What each tenant may take.

    Attributes:
        requests_per_min: 0 for no limit; as many may come at once.
        tokens_per_min: of prompts and answers together; 0 for no limit; as many may be taken at once.
    """

    requests_per_min: int = 0
    tokens_per_min: int = 0


class Quotas:
    """The accounts of all tenants.

    Args:
        client: from `redis_client.connect`.
        mesh: the mesh's name.
        quota: of every tenant.
    """

    def __init__(self, client: redis.asyncio.Redis, mesh: str, quota: Quota) -> None:
        self._client = client
        self._prefix = f"{key_prefix(mesh)}:quota"
        self._quota = quota
        self._charging: set[asyncio.Future[None]] = set()

    async def take(self, tenant: str, num_tokens: int) -> None:
        """Takes a request and the tokens of its prompt.

        Args:
            tenant: whose; an empty name, of a client without a key, has no limit.
            num_tokens: of the prompt; more than a whole bucket is taken as a whole bucket, else it would never pass.

        Raises:
            QuotaExceeded: a bucket is empty; says when it will do.
        """
        num_tokens = min(num_tokens, self._quota.tokens_per_min)
        wait_ms = await self._run(tenant, 1, num_tokens, force=False)
        if wait_ms:
            raise QuotaExceeded(wait_ms / 1000)

    async def charge(self, tenant: str, num_tokens: int) -> None:
        """Takes the tokens of an answer that has ended, and never fails."""
        await self._run(tenant, 0, num_tokens, force=True)

    def charge_later(self, tenant: str, num_tokens: int) -> None:
        """Does so in the background: nobody waits for it, and a client that has left cannot stop it."""
        if not (tenant and self._quota.tokens_per_min):
            return
        task = asyncio.ensure_future(self.charge(tenant, num_tokens))
        self._charging.add(task)
        task.add_done_callback(self._charging.discard)

    async def _run(self, tenant: str, num_requests: int, num_tokens: int, *, force: bool) -> int:
        buckets = [
            (f"{self._prefix}:{tenant}:{kind}", per_min / 60, per_min, amount)
            for kind, per_min, amount in (
                ("requests", self._quota.requests_per_min, num_requests),
                ("tokens", self._quota.tokens_per_min, num_tokens),
            )
            if per_min and amount
        ]
        if not tenant or not buckets:
            return 0
        keys = [bucket[0] for bucket in buckets]
        arguments = [str(value) for bucket in buckets for value in bucket[1:]]
        try:
            async with call_limit(LIMIT_S):
                wait = self._client.eval(_TAKE, len(keys), *keys, *arguments, str(int(force)))
                return int(await wait)
        except (redis.exceptions.RedisError, OSError) as error:
            log.warning("quota not checked", extra={"error": str(error)})
            return 0
