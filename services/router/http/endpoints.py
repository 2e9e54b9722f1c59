"""What each route does: read, admit, turn into a prompt, answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from flashmesh.errors import DeadlineExceeded, InvalidRequest, UnknownModel, WorkerLost
from flashmesh.rpc import start_deadline
from flashmesh.services.router.door import counted, off_loop
from flashmesh.services.router.http import completions, recipe
from flashmesh.services.router.http.conversations import Conversations
from flashmesh.services.router.http.errors import describe, dump
from flashmesh.services.router.http.fields import parse_object, take
from flashmesh.services.router.http.receiving import PRIORITY_HEADER, deadline_s, whole_number
from flashmesh.telemetry import request_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from flashmesh.services.router.door import Door
    from flashmesh.services.router.generate import Generation
    from flashmesh.services.router.http.exchange import Exchange, Reply
    from flashmesh.services.router.http.keys import Tenant
    from flashmesh.services.router.http.sending import Response
    from flashmesh.types import ModelInfo

    Read = Callable[[dict[str, Any], ModelInfo, str], Exchange]


@dataclass(frozen=True, slots=True)
class Arrived:
    """One request, read and let in.

    Attributes:
        name: the last part of a path that names something.
        tenant: None where no key is asked for.
    """

    headers: Mapping[str, str]
    body: bytes
    name: str
    tenant: Tenant | None
    response: Response

    @property
    def tenant_name(self) -> str:
        """Whose quota it counts against; empty for nobody's."""
        return self.tenant.name if self.tenant else ""


class Endpoints:
    """The routes' work.

    Args:
        door: the way to the mesh.
    """

    def __init__(self, door: Door) -> None:
        self._door = door
        self._conversations = Conversations(door.codec)
        self._started = time.time()

    async def chat(self, arrived: Arrived) -> None:
        """OpenAI's Chat Completions."""
        await self._converse(arrived, recipe.CHAT)

    async def responses(self, arrived: Arrived) -> None:
        """OpenAI's Responses."""
        await self._converse(arrived, recipe.RESPONSES)

    async def messages(self, arrived: Arrived) -> None:
        """Anthropic's Messages."""
        await self._converse(arrived, recipe.MESSAGES)

    async def completion(self, arrived: Arrived) -> None:
        """OpenAI's Completions: raw text."""
        codec = self._door.codec
        await self._generate(
            arrived, lambda body, model, name: completions.read(codec, body, model, name)
        )

    async def count_tokens(self, arrived: Arrived) -> None:
        """Anthropic's token counting."""
        with self._door.admitted():
            body, model = await self._parse(arrived)
            count = await off_loop(
                len(arrived.body),
                lambda: len(self._conversations.prompt(recipe.MESSAGES, body, model)),
            )
        await arrived.response.whole(200, dump({"input_tokens": count}))

    async def models(self, arrived: Arrived) -> None:
        """Lists what is served, in a form that both providers' clients read."""
        cards = [self._card(model) for model in self._door.mesh.replicas.models()]
        ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]} if cards else {}
        listing = {"object": "list", "data": cards, "has_more": False} | ends
        await arrived.response.whole(200, dump(listing))

    async def model(self, arrived: Arrived) -> None:
        """Shows one of them."""
        for model in self._door.mesh.replicas.models():
            if model.name == arrived.name:
                await arrived.response.whole(200, dump(self._card(model)))
                return
        raise UnknownModel(f"model {arrived.name!r} is not served here")

    async def health(self, arrived: Arrived) -> None:
        """Says whether a request could be answered."""
        if not self._door.mesh.replicas.models():
            raise WorkerLost("no decode worker is registered")
        await arrived.response.whole(200, dump({"status": "ok"}))

    async def _converse(self, arrived: Arrived, api: recipe.Api) -> None:
        await self._generate(
            arrived, lambda body, model, name: self._conversations.read(api, body, model, name)
        )

    async def _generate(self, arrived: Arrived, read: Read) -> None:
        limit_s = deadline_s(arrived.headers)
        start_deadline(limit_s)  # for the calls that are made
        until = None if limit_s is None else asyncio.get_running_loop().time() + limit_s
        with self._door.admitted():
            async with _until(until):
                generation, reply = await self._begin(arrived, read)
            try:
                if reply.stream:
                    await self._stream(generation, reply, arrived.response, until)
                else:
                    async with _until(until):
                        await _run(generation, reply, arrived.response)
                    await arrived.response.whole(200, reply.body())
            finally:
                self._door.quotas.charge_later(arrived.tenant_name, generation.num_emitted)

    async def _begin(self, arrived: Arrived, read: Read) -> tuple[Generation, Reply]:
        priority = whole_number(arrived.headers, PRIORITY_HEADER) or 0
        body, model = await self._parse(arrived)
        answer_id = request_id.get().removeprefix("req-")
        exchange = await off_loop(len(arrived.body), lambda: read(body, model, answer_id))
        generation = self._door.start(
            model,
            exchange.prompt,
            exchange.params,
            seed=exchange.seed,
            cache_salt=exchange.cache_salt,
            tenant_salt=arrived.tenant.salt if arrived.tenant else b"",
            priority=priority,
        )
        await self._door.quotas.take(arrived.tenant_name, len(exchange.prompt))
        return generation, exchange.reply

    async def _stream(
        self, generation: Generation, reply: Reply, response: Response, until: float | None
    ) -> None:
        interval_s = self._door.mesh.config.http_keep_alive_s
        keeping_alive = asyncio.ensure_future(response.keep_alive(interval_s))
        try:
            async with _until(until):
                await _run(generation, reply, response)
        except Exception as error:
            if response.status is not None:  # too late for a status of its own
                await response.events(reply.failure(describe(error)), last=True)
            raise
        finally:
            keeping_alive.cancel()
            await asyncio.gather(keeping_alive, return_exceptions=True)

    async def _parse(self, arrived: Arrived) -> tuple[dict[str, Any], ModelInfo]:
        body = await off_loop(len(arrived.body), lambda: parse_object(arrived.body))
        name = take(body, "model", str)
        if not name:
            raise InvalidRequest("model is required")
        return body, await self._door.mesh.replicas.wait_model(name)

    def _card(self, model: ModelInfo) -> dict[str, Any]:
        created = datetime.fromtimestamp(self._started, UTC)
        return {
            "id": model.name,
            "object": "model",
            "created": int(self._started),
            "owned_by": "flashmesh",
            "type": "model",
            "display_name": model.name,
            "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }


async def _run(generation: Generation, reply: Reply, response: Response) -> None:
    """Takes every token, and sends the events that they make, if any are wanted."""
    begun = False
    async with contextlib.aclosing(counted(generation)) as stream:
        async for tokens in stream:
            events = [] if begun else [reply.start(generation.cached_tokens)]
            begun = True
            more, num_overrun = reply.push(tokens)
            events.append(more)
            if num_overrun is not None:
                generation.end(tokens.choice, num_overrun)
            last = not generation.unfinished
            if last:  # not after the loop: the client need not wait until everything is released
                events.append(reply.finish())
            await response.events(b"".join(events), last=last)


@contextlib.asynccontextmanager
async def _until(when: float | None) -> AsyncIterator[None]:
    """Bounds the body by a time of the event loop's clock.

    Raises:
        DeadlineExceeded: the time is up.
    """
    try:
        async with asyncio.timeout_at(when) as bound:
            yield
    except TimeoutError as error:
        if bound.expired():
            raise DeadlineExceeded("the deadline has passed") from error
        raise
