"""Long agent sessions: one system prompt, and a history of tool calls that grows with every turn.

Several sessions run at once; each sends its whole history, appends the answer and a tool's result, and
sends again at once. `agent.hit_ratio` is the share of all prompt tokens that the store supplied. The rest
is told apart, all as shares of prompt tokens: `lost_to_new` was never seen before; `lost_to_grain` was,
in a block of 128 that was not full; `lost_to_replay` is what the replay rule runs again at a prompt's end;
`lost_to_lag` was not stored, or not known to be, when the next turn came.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import uvloop

from flashmesh.bench.load import (
    WORK,
    Client,
    Objectives,
    Outcome,
    balance,
    figures,
    prompt_tokens,
)
from flashmesh.bench.registry import Result
from flashmesh.bench.target import REPLAY_TOKENS, Target, Where, opened
from flashmesh.bench.trace_files import draw_tokens
from flashmesh.replay import plan_replay
from flashmesh.types import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WINDOW = 128
"""Of the served model; a router's `replay_tokens` is taken to be `target.REPLAY_TOKENS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the agents do; lengths in tokens, ranges with both ends.

    Attributes:
        seed: equal seeds give equal sessions, as far as the answers are equal.
        num_sessions: at once.
        num_turns: requests of each, one after the other.
        system: of the prompt that all begin with, tool descriptions included.
        task: the user's message, each session's own.
        answer: a tool call, drawn by the mesh.
        tool_result: what the tool returns.
    """

    seed: int = 0
    num_sessions: int = 8
    num_turns: int = 40
    system: int = 6000
    task: tuple[int, int] = (200, 800)
    answer: tuple[int, int] = (30, 100)
    tool_result: tuple[int, int] = (50, 600)


class Agents:
    """The benchmark of one workload.

    Args:
        workload, where, objectives: what they do, on which mesh, and what is good.
    """

    def __init__(self, workload: Workload, where: Where, objectives: Objectives) -> None:
        self._workload = workload
        self._where = where
        self._objectives = objectives
        self.num_steps = workload.num_sessions * workload.num_turns

    def run(self, advance: Callable[[], None]) -> Iterator[Result]:
        """Runs all sessions; after Ctrl-C, reports what has ended until then."""
        with opened(self._where) as target:
            sessions = Sessions(target, self._workload)
            interrupted = False
            try:
                uvloop.run(sessions.run(advance))
            except KeyboardInterrupt:
                interrupted = True
            outcomes = sessions.outcomes
            yield from figures("agent", outcomes, sessions.elapsed_s, self._objectives)
            if total := prompt_tokens(outcomes):
                for reason, lost in sessions.lost.items():
                    yield Result(f"agent.lost_to_{reason}", lost / total, "x", len(outcomes))
            for service in WORK:
                yield from balance(f"agent.balance.{service}", target, service)
        if interrupted:
            raise KeyboardInterrupt


@dataclass(slots=True)
class Sessions:
    """Sessions under way.

    Attributes:
        outcomes: of the turns that have ended.
        lost: prompt tokens that were not cached, by reason.
        elapsed_s: from the first request to the end of the last one that ended.
    """

    target: Target
    workload: Workload
    outcomes: list[Outcome] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    elapsed_s: float = 0.0

    async def run(self, advance: Callable[[], None]) -> None:
        """Runs all sessions to their ends; one whose turn fails ends there."""
        work = self.workload
        start_s = time.perf_counter()
        system = draw_tokens(f"agents/{work.seed}/system", work.system)

        async def session(number: int) -> None:
            draw = random.Random(f"{work.seed}/{number}")
            history = system + self._message(draw, work.task)
            # Whoever comes first computes the system prompt; to the others it is known, or under way.
            known = len(system) if number else 0
            for _ in range(work.num_turns):
                length = draw.randint(*work.answer)
                outcome = await client.ask(history, length, time.perf_counter())
                self._count(outcome, len(history), known)
                self.elapsed_s = time.perf_counter() - start_s
                advance()
                if not outcome.ok:
                    return
                history += outcome.token_ids
                known = len(history)
                history += self._message(draw, work.tool_result)

        async with Client(self.target) as client, asyncio.TaskGroup() as group:
            for number in range(work.num_sessions):
                group.create_task(session(number))

    def _message(self, draw: random.Random, lengths: tuple[int, int]) -> list[int]:
        return draw_tokens(f"agents/{draw.random()}", draw.randint(*lengths))

    def _count(self, outcome: Outcome, length: int, known: int) -> None:
        self.outcomes.append(outcome)
        if outcome.ok:
            self.lost.update(losses(length, known, outcome.num_cached_tokens))


def losses(length: int, known: int, cached: int) -> Counter[str]:
    """Says why tokens of a prompt did not come from the store.

    Args:
        length: of the prompt.
        known: leading tokens that the mesh has seen before.
        cached: leading tokens that it supplied.
    """
    whole = known // BLOCK_TOKENS * BLOCK_TOKENS
    plan = plan_replay(length, window=WINDOW, replay_tokens=REPLAY_TOKENS)
    usable = min(whole, plan.num_stored_blocks * BLOCK_TOKENS)
    return Counter(
        new=length - known, grain=known - whole, replay=whole - usable, lag=usable - cached
    )


num_steps = Workload().num_sessions * Workload().num_turns


def run(advance: Callable[[], None]) -> Iterator[Result]:
    """Runs the default workload on a mesh of its own."""
    yield from Agents(Workload(), Where(), Objectives()).run(advance)
