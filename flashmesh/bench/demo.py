"""How well the demo checkpoint answers, and how fast, on its held-out conversations.

* `demo.loss`, `demo.code_loss`: nats a token of held-out answers and of source code. `demo.ngram_loss` and
  `demo.code_ngram_loss` are those of an n-gram model with as many parameters; the `export_loss_ratio`s compare with the
  weights before they were rounded to the released formats. Both were recorded at the training (docs/demo.md).
* `demo.stop`, `demo.exact`: share of greedy answers that end by themselves; that are right to the letter, where only
  one answer is.
* `demo.tool_call_valid`, `demo.tool_call_exact`, `demo.tool_call_valid_grammar`: calls of a declared tool with fitting
  arguments; the expected call; the first again, under the grammar of strict tools.
* `demo.accepted_per_round`: drafts accepted of at most five, at temperature 1, over all rounds.
  `demo.confidence_error`: distance of mean confidence and acceptance in ten bins of confidence, weighted by their size.
* `demo.decode_tokens_per_s`: greedy tokens after the first, by the time that their steps took, with every draft
  verified; `..without_drafts` likewise. `demo.same_without_drafts`: share of answers that are the same in both.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flashmesh.bench.registry import Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flashmesh.bench.demo_chats import Conversations, HeldOut
    from flashmesh.kernels.door import Engine
    from flashmesh.types import SamplingParams

MAX_TOKENS = 200
SAMPLED_EVERY = 2
"""One conversation of so many is answered at temperature 1 as well."""
PLAIN_EVERY = 5
"""And one of so many without drafts."""
THREADS = 1
"""As a worker has by default; a second one helps on a quiet machine only."""
NUM_PAGES = 32
BINS = 10
REPLAY_TOKENS = 140
CHUNK_TOKENS = 1024

num_steps = 6


@dataclass(slots=True)
class Answer:
    """One generated answer.

    Attributes:
        ids: its tokens, without the end token.
        stopped: it ended by itself.
        decode_s: time of the steps after the one that gave the first token.
        rounds: for each step that verified drafts, their confidences and how many were accepted.
    """

    ids: list[int] = field(default_factory=list)
    stopped: bool = False
    decode_s: float = 0.0
    rounds: list[tuple[list[float], int]] = field(default_factory=list)


def run(advance: Callable[[], None]) -> Iterator[Result]:
    """Measures in this process."""
    from flashmesh.bench.demo_chats import Conversations
    from flashmesh.data import demo_folder
    from flashmesh.kernels.engine import load_engine

    folder = demo_folder()
    engine = load_engine(
        folder, role="all", name="demo", num_pages=NUM_PAGES, num_slots=1, threads=THREADS
    )
    found = Conversations(folder)
    yield from losses(engine, found)
    advance()
    answers = [answer(engine, chat, greedy()) for chat in found.chats]
    yield from quality(found, answers)
    advance()
    yield from under_grammar(engine, found)
    advance()
    some = found.chats[::SAMPLED_EVERY]
    yield from speculation(answer(engine, chat, sampled(seed)) for seed, chat in enumerate(some))
    advance()
    yield speed("demo.decode_tokens_per_s", answers)
    some = found.chats[::PLAIN_EVERY]
    plain = [answer(engine, chat, greedy(), num_drafts=0) for chat in some]
    yield speed("demo.decode_tokens_per_s_without_drafts", plain)
    advance()
    same = [a.ids == b.ids for a, b in zip(plain, answers[::PLAIN_EVERY], strict=True)]
    yield Result("demo.same_without_drafts", sum(same) / len(same), "share", len(same))
    advance()


def greedy() -> SamplingParams:
    """Temperature 0."""
    from flashmesh.types import SamplingParams

    return SamplingParams(max_tokens=MAX_TOKENS)


def sampled(seed: int) -> SamplingParams:
    """Temperature 1."""
    from flashmesh.types import SamplingParams

    return SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=seed)


def losses(engine: Engine, found: Conversations) -> Iterator[Result]:
    """Compares the checkpoint's losses with those recorded at its training."""
    from flashmesh.bench.demo_chats import mean, token_losses

    answers = [
        loss
        for chat in found.chats
        for loss in token_losses(engine, [*chat.prompt, *chat.answer_ids])[len(chat.prompt) - 1 :]
    ]
    code = [loss for piece in found.code for loss in token_losses(engine, piece)]
    for name, each, kind in (("", answers, "chats"), ("code_", code, "code")):
        recorded = found.recorded
        yield Result(f"demo.{name}loss", mean(each), "nats", len(each))
        yield Result(f"demo.{name}ngram_loss", recorded["ngram"][kind], "nats", len(each))
        ratio = mean(each) / recorded["trained"][kind]
        yield Result(f"demo.{name}export_loss_ratio", ratio, "x", len(each))


def quality(found: Conversations, answers: list[Answer]) -> Iterator[Result]:
    """Counts right answers."""
    from flashmesh.bench.demo_chats import is_valid_call

    stopped = [answer.stopped for answer in answers]
    yield Result("demo.stop", share(stopped), "share", len(stopped))
    exact, valid, expected = [], [], []
    for chat, answer in zip(found.chats, answers, strict=True):
        message = found.message(chat, answer.ids)
        if chat.family == "tool_call":
            valid.append(answer.stopped and is_valid_call(message, chat.body["tools"]))
            expected.append(calls(message) == calls(chat.answer))
        elif chat.exact:
            exact.append(answer.stopped and message["content"] == chat.answer["content"])
    yield Result("demo.exact", share(exact), "share", len(exact))
    yield Result("demo.tool_call_valid", share(valid), "share", len(valid))
    yield Result("demo.tool_call_exact", share(expected), "share", len(expected))


def under_grammar(engine: Engine, found: Conversations) -> Iterator[Result]:
    """Generates the tool calls again, with the grammar that the router makes for strict tools."""
    try:
        from flashmesh.kernels.grammar import Vocabulary, compile_grammar
    except ImportError as error:
        print(f"demo.tool_call_valid_grammar skipped: {error}", file=sys.stderr)
        return
    from flashmesh.bench.demo_chats import is_valid_call
    from flashmesh.data import demo_folder
    from flashmesh.services.router.http.tool_grammar import tool_grammar

    text = (demo_folder() / "tokenizer.json").read_text(encoding="utf-8")
    vocabulary = Vocabulary(text, engine.info.vocab_size, engine.info.eos_token_id)
    valid = []
    for chat in found.chats:
        if chat.family != "tool_call":
            continue
        tools = [
            {**tool, "function": {**tool["function"], "strict": True}}
            for tool in chat.body["tools"]
        ]
        after = found.think_end if chat.thinking else None
        spec = tool_grammar(tools, required=False, start_after=after)
        assert spec is not None
        grammar = compile_grammar(spec, vocabulary).start(after)
        given = answer(engine, chat, greedy(), grammar=grammar)
        valid.append(given.stopped and is_valid_call(found.message(chat, given.ids), tools))
    yield Result("demo.tool_call_valid_grammar", share(valid), "share", len(valid))


def speculation(answers: Iterator[Answer]) -> Iterator[Result]:
    """Counts accepted drafts, and compares with the confidences that went before."""
    from flashmesh.bench.demo_chats import mean

    rounds = [item for answer in answers for item in answer.rounds]
    accepted = [float(count) for _, count in rounds]
    yield Result("demo.accepted_per_round", mean(accepted), "drafts", len(accepted))
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(BINS)]
    for confidences, count in rounds:
        # A draft after a refused one was never put to the test.
        for place, confidence in enumerate(confidences[: count + 1]):
            bins[min(int(confidence * BINS), BINS - 1)].append((confidence, place < count))
    total = sum(map(len, bins))
    error = sum(abs(sum(c for c, _ in part) - sum(right for _, right in part)) for part in bins)
    yield Result("demo.confidence_error", error / max(total, 1), "share", total)


def speed(metric: str, answers: list[Answer]) -> Result:
    """Tokens after the first, and the end token, by the time of their steps."""
    tokens = sum(len(answer.ids) - 1 + answer.stopped for answer in answers)
    return Result(metric, tokens / sum(answer.decode_s for answer in answers), "tokens/s", tokens)


def answer(
    engine: Engine,
    chat: HeldOut,
    params: SamplingParams,
    *,
    num_drafts: int | None = None,
    grammar: Any = None,
) -> Answer:
    """Generates an answer as one sequence alone; every draft is verified."""
    from flashmesh.kernels.generate import prefill_offline
    from flashmesh.kernels.sequence import DecodeSequence
    from flashmesh.replay import plan_replay

    count = engine.max_drafts if num_drafts is None else num_drafts
    plan = plan_replay(len(chat.prompt), window=engine.info.window, replay_tokens=REPLAY_TOKENS)
    stored = chat.prompt[: plan.start] if plan.num_stored_blocks else ()
    sequence = DecodeSequence(
        engine,
        chat.prompt,
        params,
        plan,
        payloads=prefill_offline(engine, stored, chunk_tokens=CHUNK_TOKENS),
        num_drafts=count,
        grammar=grammar,
    )
    given = Answer()
    drafts: list[int] = []
    sequence.open()
    try:
        done = False
        while not done:
            confidences = sequence.confidences
            offered = drafts[: len(confidences)]
            began = time.perf_counter()
            result = engine.step([sequence.rows(CHUNK_TOKENS, len(offered))])[0]
            if given.ids:
                given.decode_s += time.perf_counter() - began
            progress = sequence.commit(result)
            given.ids += [drawn.token for drawn in progress.drawn]
            accepted = [a == b for a, b in zip(offered, result.tokens, strict=False)]
            if offered:
                right = accepted.index(False) if False in accepted else len(accepted)
                given.rounds.append((confidences, right))
            drafts, done = result.drafts, progress.done
            given.stopped = (
                done
                and progress.finish_reason is not None
                and (progress.finish_reason.value == "stop")
            )
    finally:
        sequence.close()
    return given


def calls(message: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns names and arguments of a message's calls."""
    return [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or []
    ]


def share(values: list[bool]) -> float:
    """How much of a list is true."""
    return sum(values) / max(len(values), 1)
