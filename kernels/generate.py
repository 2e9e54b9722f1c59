"""Generation in one process, without services: the same rows that the mesh runs, so the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashmesh.kernels.sequence import DecodeSequence, PrefillSequence, Progress
from flashmesh.replay import plan_replay

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from flashmesh.kernels.door import Engine
    from flashmesh.kernels.sampler import GrammarState
    from flashmesh.kernels.sampling import Drawn
    from flashmesh.types import FinishReason, SamplingParams


def generate_offline(
    engine: Engine,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    replay_tokens: int = 140,
    chunk_tokens: int = 1024,
    num_drafts: int = 0,
    grammar: GrammarState | None = None,
) -> Generator[Drawn | FinishReason]:
    """Yields tokens as they are drawn, then the reason why they ended.

    Args:
        engine: loaded with both halves of the model.
        prompt: token ids, at least one.
        params: how to draw and when to stop.
        replay_tokens: the replay rule's parameter; the mesh must use the same for equal tokens.
        chunk_tokens: most rows in a step.
        num_drafts: tokens proposed and verified in each step.
        grammar: fresh state of the grammar that the output must obey.

    Raises:
        InvalidRequest: the prompt is empty, too long, or has ids that the model does not know.
    """
    plan = plan_replay(len(prompt), window=engine.info.window, replay_tokens=replay_tokens)
    stored = prompt[: plan.start] if plan.num_stored_blocks else ()
    payloads = prefill_offline(engine, stored, chunk_tokens=chunk_tokens)
    sequence = DecodeSequence(
        engine, prompt, params, plan, payloads=payloads, num_drafts=num_drafts, grammar=grammar
    )
    for progress in _advance(sequence, engine, chunk_tokens):
        yield from progress.drawn
        if progress.finish_reason is not None:
            yield progress.finish_reason


def prefill_offline(engine: Engine, tokens: Sequence[int], *, chunk_tokens: int) -> list[bytes]:
    """Computes the payloads of a prompt's whole blocks, as a prefill worker would; none of an empty one."""
    if not tokens:
        return []
    sequence = PrefillSequence(engine, tokens, hit=0, payloads=())
    steps = _advance(sequence, engine, chunk_tokens)
    return [payload for progress in steps for _, payload in progress.blocks]


def _advance(
    sequence: PrefillSequence | DecodeSequence, engine: Engine, chunk_tokens: int
) -> Iterator[Progress]:
    sequence.open()
    try:
        done = False
        while not done:
            rows = sequence.rows(chunk_tokens, len(sequence.confidences))
            progress = sequence.commit(engine.step([rows])[0])
            done = progress.done
            yield progress
    finally:
        sequence.close()
