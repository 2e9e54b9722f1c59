"""A decode worker called without a router: the yardstick for what a router adds."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashmesh.bench.load import Outcome
from flashmesh.bench.target import REPLAY_TOKENS
from flashmesh.errors import WorkerLost
from flashmesh.redis_client import connect
from flashmesh.registry import Registry
from flashmesh.replay import plan_replay
from flashmesh.types import BLOCK_TOKENS, SamplingParams
from flashmesh.v1 import decode_pb2, decode_pb2_grpc
from flashmesh.wire import sampling_to_proto

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashmesh.registry import WorkerRecord
    from flashmesh.rpc import Channels
    from flashmesh.types import ModelInfo


@dataclass(frozen=True, slots=True)
class DecodeWorker:
    """A worker and what a call to it must name.

    Attributes:
        address: host:port.
        model: what it serves.
        nodes: the mesh's kvstore nodes.
        channels: the way there.
    """

    address: str
    model: ModelInfo
    nodes: Sequence[WorkerRecord]
    channels: Channels

    @classmethod
    async def find(cls, redis_url: str, mesh: str, channels: Channels) -> DecodeWorker:
        """Looks a mesh's first one up.

        Raises:
            WorkerLost: none is registered, or no kvstore node.
        """
        async with contextlib.aclosing(connect(redis_url)) as client:
            records = await Registry(client, mesh).list()
        nodes = [record for record in records if record.role == "kvstore"]
        for record in records:
            if record.role == "decode" and record.model and nodes:
                return cls(record.address, record.model, nodes, channels)
        raise WorkerLost(f"no decode worker, or no kvstore node, is registered in mesh {mesh!r}")

    async def ask(
        self, prompt: Sequence[int], num_tokens: int, *, is_stored: bool = True
    ) -> Outcome:
        """Has a prompt continued by exactly so many tokens.

        Args:
            prompt: token ids.
            num_tokens: to draw greedily, whatever they are.
            is_stored: the blocks before the replay are in the store; else the worker computes and puts
                them.

        Raises:
            grpc.aio.AioRpcError: the worker refused or broke off.
        """
        from flashmesh.services.router.prefix import Call, Prefix

        plan = plan_replay(len(prompt), window=self.model.window, replay_tokens=REPLAY_TOKENS)
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        call = Call(request_id="direct", model=self.model, prompt=prompt, params=params)
        chain = Prefix(call, plan.num_stored_blocks, self.nodes).chain
        outcome = Outcome(due_s=time.perf_counter())
        request = decode_pb2.DecodeRequest(
            request_id=call.request_id,
            prompt_token_ids=prompt,
            choices=[decode_pb2.Choice()],
            sampling=sampling_to_proto(params),
            chain=chain,
            hit_tokens=plan.num_stored_blocks * BLOCK_TOKENS if is_stored else 0,
            replay_tokens=REPLAY_TOKENS,
        )
        stub = decode_pb2_grpc.DecodeStub(self.channels.get(self.address))
        async for chunk in stub.Decode(request):
            outcome.add(chunk.token_ids)
        return outcome
