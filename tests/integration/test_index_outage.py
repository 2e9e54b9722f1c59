"""Redis goes away under load and comes back: afterwards the index is what the nodes have."""

import asyncio
import contextlib
import itertools
import threading

import pytest
from support.kv import Chain, running_node
from support.prompts import mesh_answer, random_prompt
from support.redis import claimed, claims_of, running_server
from support.waiting import wait_until

from flashmesh.client import RouterClient
from flashmesh.kv_client import KvClient
from flashmesh.launcher import MeshPlan, running_mesh
from flashmesh.lifecycle import background
from flashmesh.redis_client import connect
from flashmesh.registry import Registry
from flashmesh.rpc import Channels
from flashmesh.services.router.prefix import Call, Prefix
from flashmesh.types import SamplingParams

OBJECT_BYTES = 1120
GRACE_S = 10.0
PARAMS = SamplingParams(max_tokens=2)
PROMPT_TOKENS, NUM_BLOCKS = 700, 4
OUTAGES = [("kill", "start"), ("suspend", "resume")]


@pytest.fixture
def server():
    with running_server() as server:
        yield server


class Load:
    """Chains put one after the other, most of which another one evicts."""

    def __init__(self, node):
        self._node = node
        self._seeds = itertools.count()
        self._done = asyncio.Condition()
        self.num_chains = 0

    async def run(self):
        while True:
            await self._node.put(Chain(20, seed=next(self._seeds)).objects)
            async with self._done:
                self.num_chains += 1
                self._done.notify_all()

    async def more(self, count):
        """Waits for so many further chains."""
        wanted = self.num_chains + count
        async with self._done:
            await self._done.wait_for(lambda: self.num_chains >= wanted)


@pytest.mark.parametrize(("leave", "return_"), OUTAGES)
async def test_after_an_outage_the_index_equals_the_inventories(server, leave, return_):
    async with (
        contextlib.aclosing(connect(server.url)) as client,
        running_node(client, memory_bytes=200 * OBJECT_BYTES) as one,
        running_node(client, memory_bytes=50 * OBJECT_BYTES) as other,
    ):
        loads = [Load(one), Load(other)]
        async with background(*[load.run() for load in loads]):
            for step in (None, getattr(server, leave), getattr(server, return_)):
                if step:
                    await asyncio.to_thread(step)
                for load in loads:
                    await load.more(20)
        assert len(one.store.inventory()) == 200
        async with asyncio.timeout(60):
            for node in (one, other):
                while await claimed(client, "test", node.epoch) != claims_of(
                    node.store.inventory()
                ):
                    await asyncio.sleep(0.05)


class Requests:
    """Clients that ask all the time, each in a thread of its own; an error ends the test."""

    def __init__(self, address, num_clients):
        self.prompts = []
        self.num_answers = 0
        self.errors = []
        self._address = address
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(number,)) for number in range(num_clients)
        ]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc):
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        assert self.errors == []

    def _ask(self, number):
        try:
            with RouterClient(self._address) as client:
                for turn in itertools.count():
                    if self._stopping.is_set():
                        return
                    prompt = random_prompt(PROMPT_TOKENS, seed=1000 * number + turn)
                    mesh_answer(client, prompt, PARAMS)
                    self.prompts.append(prompt)
                    self.num_answers += 1
        except Exception as error:
            self.errors.append(error)

    def more(self, count):
        """Waits for so many further answers."""
        wanted = self.num_answers + count
        wait_until(lambda: self.num_answers >= wanted or self.errors, f"{wanted} answers")


@pytest.mark.slow
@pytest.mark.parametrize(("leave", "return_"), OUTAGES)
def test_an_outage_under_load_fails_no_request(tmp_path, server, leave, return_):
    settings = {"model": {"engine": "simulated"}, "decode": {"store_generated": False}}
    plan = MeshPlan(redis_url=server.url, num_kvstore=2, settings=settings)
    with running_mesh(plan, tmp_path, grace_s=GRACE_S) as mesh:
        with Requests(mesh.router_address, num_clients=2) as requests:
            for step in (None, getattr(server, leave), getattr(server, return_)):
                if step:
                    step()
                requests.more(10)
        asyncio.run(compare(server.url, requests.prompts))


async def compare(url, prompts):
    """Waits until every node claims exactly those of the prompts' blocks that it has."""
    async with (
        contextlib.aclosing(connect(url)) as client,
        contextlib.aclosing(Channels()) as channels,
        asyncio.timeout(60),
    ):
        while True:
            records = await Registry(client, "local").list()
            nodes = [record for record in records if record.role == "kvstore"]
            models = [record.model for record in records if record.role == "decode"]
            if len(nodes) == 2 and models and await agree(client, channels, nodes, models, prompts):
                return
            await asyncio.sleep(0.05)


async def agree(client, channels, nodes, models, prompts):
    calls = [Call(request_id="", model=models[0], prompt=p, params=PARAMS) for p in prompts]
    hashes = [hash for call in calls for hash in Prefix(call, NUM_BLOCKS, nodes).hashes]
    for node in nodes:
        flags = await KvClient(channels).have(node.address, hashes)
        present = list(itertools.compress(hashes, flags))
        assert present
        if await claimed(client, "local", bytes.fromhex(node.epoch)) != claims_of(present):
            return False
    return True
