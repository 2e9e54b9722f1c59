"""Who is alive: worker records in Redis, renewed every second, gone after ten.

Absence stops new work only. A restarted worker has a new epoch, and whatever carries the old one is
dead. While Redis is away readers keep what they knew; when it comes back, perhaps empty, they wait
a little before they believe that everybody left.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import redis.exceptions

from flashmesh import hashing
from flashmesh.errors import Incompatible
from flashmesh.redis_client import call_limit, key_prefix
from flashmesh.types import ModelInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
TRUST_EMPTY_AFTER_S = 5.0

# Who starts takes the name. Who renews must still hold it: else a process that was suspended, and replaced
# meanwhile, would take the place of its successor again and again.
_BEAT = """
local held = redis.call('GET', KEYS[1])
if held and ARGV[1] == 'renewal' then
  local readable, record = pcall(cjson.decode, held)
  if readable and record['epoch'] and record['epoch'] ~= ARGV[2] then return 0 end
end
redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
redis.call('SADD', KEYS[2], ARGV[5])
redis.call('SET', KEYS[3], ARGV[6], 'NX')
return 1
"""

# Only the owner may remove its record: a successor with the same name has another epoch.
_REMOVE = """
local record = redis.call('GET', KEYS[1])
if record and cjson.decode(record)['epoch'] == ARGV[1] then
  redis.call('DEL', KEYS[1])
  redis.call('SREM', KEYS[2], ARGV[2])
end
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """What a replica says about itself.

    Attributes:
        id: its name; a restart keeps it.
        epoch: 32 hex digits drawn at start.
        role: router, prefill, decode or kvstore.
        address: host:port of its gRPC server.
        model: what it serves; None for router and kvstore.
        capacity, load: numbers by name, load as of the last renewal.
        scheme: by which it names blocks.
    """

    id: str
    epoch: str
    role: str
    address: str
    model: ModelInfo | None = None
    capacity: Mapping[str, float] = field(default_factory=dict)
    load: Mapping[str, float] = field(default_factory=dict)
    scheme: str = hashing.SCHEME.decode()

    def to_json(self) -> str:
        """Packs the record."""
        fields = dataclasses.asdict(self)
        if self.model is not None:
            fields["model"] |= {
                "fingerprint": self.model.fingerprint.hex(),
                "layout_id": self.model.layout_id.hex(),
            }
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str | bytes) -> WorkerRecord:
        """Unpacks a record; ValueError, KeyError or TypeError where it is not one.

        Unknown fields are left out: workers of the next version register beside us in an upgrade.
        """
        fields = json.loads(text)
        if model := fields["model"]:
            model["fingerprint"] = bytes.fromhex(model["fingerprint"])
            model["layout_id"] = bytes.fromhex(model["layout_id"])
            fields["model"] = ModelInfo(**_known(ModelInfo, model))
        return cls(**_known(cls, fields))


def _known(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    names = {item.name for item in dataclasses.fields(kind)}
    return {key: value for key, value in values.items() if key in names}


class Registry:
    """The records of one mesh.

    Args:
        client: from `redis_client.connect`.
        mesh: the mesh's name.

    Attributes:
        generation: drawn when Redis is first written to, so another one means that it was wiped;
            as of the last `list`.
    """

    def __init__(self, client: redis.asyncio.Redis, mesh: str) -> None:
        self._client = client
        self._prefix = key_prefix(mesh)
        self._ids = f"{self._prefix}:workers"
        self._generation_key = f"{self._prefix}:generation"
        self.generation: bytes | None = None

    async def heartbeat(
        self, record: WorkerRecord, ttl_s: float, *, is_renewal: bool = False
    ) -> bool:
        """Writes a record that lives for `ttl_s`; says whether it did.

        Args:
            record: what to write.
            ttl_s: how long it outlives this call.
            is_renewal: not where another epoch holds the name by now.
        """
        async with call_limit():
            written = await self._client.eval(
                _BEAT,
                3,
                self._key(record.id),
                self._ids,
                self._generation_key,
                "renewal" if is_renewal else "first",
                record.epoch,
                record.to_json(),
                int(ttl_s * 1000),
                record.id,
                secrets.token_hex(8),
            )
        return bool(written)

    async def check_scheme(self, record: WorkerRecord) -> None:
        """Compares how a process names blocks with how those do that are here already.

        Raises:
            Incompatible: another one names them otherwise, so no block would ever be found.
        """
        for other in await self.list():
            if other.scheme != record.scheme:
                raise Incompatible(
                    f"{other.id} names blocks by {other.scheme!r}, this process by "
                    f"{record.scheme!r}; stop the others, or give this mesh another name"
                )

    async def remove(self, record: WorkerRecord) -> None:
        """Takes a record out, unless a successor has replaced it."""
        async with call_limit():
            await self._client.eval(
                _REMOVE, 2, self._key(record.id), self._ids, record.epoch, record.id
            )

    async def list(self) -> list[WorkerRecord]:
        """Returns the records that live, ordered by id; two round trips."""
        async with call_limit():
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.smembers(self._ids)
                pipe.get(self._generation_key)
                found, self.generation = await pipe.execute()
            ids = sorted(found)
            if not ids:
                return []
            values = await self._client.mget([self._key(item.decode()) for item in ids])
            expired = [item for item, value in zip(ids, values, strict=True) if value is None]
            if expired:
                await self._client.srem(self._ids, *expired)
        return [record for value in values if value and (record := _parse(value))]

    def _key(self, worker_id: str) -> str:
        return f"{self._prefix}:worker:{worker_id}"


def _parse(value: str | bytes) -> WorkerRecord | None:
    """Reads a record; one that cannot be read must not hide the others."""
    try:
        return WorkerRecord.from_json(value)
    except (ValueError, KeyError, TypeError) as error:
        log.warning("unreadable worker record", extra={"error": repr(error)})
        return None


class Heartbeat:
    """Keeps one record alive.

    Args:
        registry: where.
        record: without load.
        load: called before every renewal.
        interval_s, ttl_s: how often, and how long a record outlives its last renewal.
        announced: set when the record has been written for the first time, or could not be.
    """

    def __init__(
        self,
        registry: Registry,
        record: WorkerRecord,
        load: Callable[[], Mapping[str, float]],
        *,
        interval_s: float,
        ttl_s: float,
        announced: asyncio.Event | None = None,
    ) -> None:
        self.record = record
        self._announced = announced or asyncio.Event()
        self._registry = registry
        self._load = load
        self._interval_s = interval_s
        self._ttl_s = ttl_s
        self._left = False

    async def run(self) -> None:
        """Renews until cancelled, left or replaced; an outage of Redis is logged once and outlived."""
        down = is_renewal = False
        while not self._left:
            record = dataclasses.replace(self.record, load=dict(self._load()))
            try:
                if not await self._registry.heartbeat(record, self._ttl_s, is_renewal=is_renewal):
                    log.error("another process has taken this name", extra={"id": record.id})
                    return
                down, is_renewal = False, True
            except (redis.exceptions.RedisError, OSError) as error:
                if not down:
                    log.warning("registry unreachable", extra={"error": str(error)})
                down = True
            self._announced.set()
            if self._left:  # while that renewal was under way
                await self.leave()
                return
            await asyncio.sleep(self._interval_s)

    async def leave(self) -> None:
        """Stops renewing and takes the record out."""
        self._left = True
        try:
            await self._registry.remove(self.record)
        except (redis.exceptions.RedisError, OSError) as error:
            log.warning("left without telling the registry", extra={"error": str(error)})


class RegistryView:
    """The registry as a router or node last saw it.

    Args:
        registry: what is polled.
        clock: seconds, for tests.

    Attributes:
        polled: set when the registry has been read for the first time, or could not be.
    """

    def __init__(self, registry: Registry, clock: Callable[[], float] = time.monotonic) -> None:
        self.polled = asyncio.Event()
        self._registry = registry
        self._clock = clock
        self._workers: list[WorkerRecord] = []
        self._trusted_from: float | None = None
        self._generation: bytes | None = None
        self._down = False
        self._changed = asyncio.Condition()

    def workers(self, role: str) -> list[WorkerRecord]:
        """Returns the workers of a role, ordered by id."""
        return [worker for worker in self._workers if worker.role == role]

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until a poll makes the condition true."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def run(self) -> None:
        """Polls until cancelled."""
        while True:
            await self.poll()
            self.polled.set()
            await asyncio.sleep(POLL_INTERVAL_S)

    async def poll(self) -> None:
        """Reads once."""
        try:
            workers = await self._registry.list()
        except (redis.exceptions.RedisError, OSError) as error:
            if not self._down:
                log.warning("registry unreachable", extra={"error": str(error)})
            self._down = True
            return
        now = self._clock()
        if self._down or self._registry.generation != self._generation:
            # It was away, or restarted between two polls: everybody is about to register again.
            self._down = False
            self._generation = self._registry.generation
            self._trusted_from = now + TRUST_EMPTY_AFTER_S
        if self._trusted_from is not None and now < self._trusted_from:
            seen = {worker.id for worker in workers}
            workers += [worker for worker in self._workers if worker.id not in seen]
            workers.sort(key=lambda worker: worker.id)
        async with self._changed:
            self._workers = workers
            self._changed.notify_all()
