"""The engine on the reference backend: sessions, steps cut into passes, tokens drawn.

Arithmetic is fp32 on the CPU. A step's rows go through the layers together; runs longer than a pass are cut, and rows
are padded to whole tiles, neither of which changes a bit of any result.
"""

from __future__ import annotations

import platform
import time
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from flashmesh.errors import Incompatible, InvalidRequest
from flashmesh.kernels.config import ModelConfig
from flashmesh.kernels.door import EngineStats, RowRun, RunResult, SessionPlan
from flashmesh.kernels.draft import Anchor, Drafter
from flashmesh.kernels.engram import BLOCKED, LOOK_BACK, EngramHash, grams_of, load_token_map
from flashmesh.kernels.layout import BlockLayout
from flashmesh.kernels.model import Model, Rows, Span
from flashmesh.kernels.pages import RUN_ROWS, Pages, Slots
from flashmesh.kernels.reference.basics import linear, quantized_linear
from flashmesh.kernels.sampling import sample
from flashmesh.kernels.session import ReferenceSession
from flashmesh.kernels.shapes import TILE
from flashmesh.kernels.vision_weights import load_tower
from flashmesh.kernels.weights import EXPAND_BELOW_BYTES, load_weights
from flashmesh.types import BLOCK_TOKENS, ModelInfo

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from flashmesh.kernels.vision import VisionTower

NUMERICS_REVISION = 1
"""Counts changes of this package that change a bit of a result."""

NEVER = 1 << 62
"""A position that no row reaches."""


class ReferenceEngine:
    """A loaded model; see `door.Engine`. Build it with `load_engine`."""

    def __init__(
        self,
        info: ModelInfo,
        config: ModelConfig,
        model: Model,
        pages: Pages,
        slots: Slots,
        *,
        has_decoder: bool,
        vision: VisionTower | None = None,
    ) -> None:
        self.info = info
        self.config = config
        self.model = model
        self.pages = pages
        self.slots = slots
        self.vision = vision
        self.masked_replay = False
        """Runs the decoder half of every row and narrows only what rows see: the numerical reference of leaving
        rows out, which must give the same bits (tests)."""
        self.sample_s = 0.0
        """Seconds spent drawing tokens, since the engine was loaded."""
        self._has_decoder = has_decoder

    def open(self, plan: SessionPlan, prefix_tokens: Sequence[int]) -> ReferenceSession:
        """Opens a session; see `door.Engine.open`."""
        if plan.decoder_start is not None and not self._has_decoder:
            raise Incompatible("this engine holds the encoder half only")
        _check_plan(plan, self.info.max_context_tokens)
        if len(prefix_tokens) != plan.first_pos:
            raise InvalidRequest(
                f"{len(prefix_tokens)} prefix tokens for first_pos {plan.first_pos}"
            )
        if plan.global_start % self._grain():
            raise InvalidRequest(f"global_start {plan.global_start} cuts a compressed row in two")
        return ReferenceSession(self, plan, prefix_tokens)

    @torch.inference_mode()
    def step(self, batch: Sequence[RowRun]) -> list[RunResult]:
        """Runs a batch; see `door.Engine.step`."""
        for run in batch:
            self._check(run)
        if len({id(run.session) for run in batch}) < len(batch):
            raise InvalidRequest("a session has two runs in one step")
        results = [RunResult() for _ in batch]
        logits: list[list[Tensor]] = [[] for _ in batch]
        for begin in range(0, max((len(run.tokens) for run in batch), default=0), RUN_ROWS):
            cut = [
                (place, run, run.tokens[begin : begin + RUN_ROWS])
                for place, run in enumerate(batch)
                if begin < len(run.tokens)
            ]
            counts = [
                max(0, min(len(tokens), begin + len(tokens) - (len(run.tokens) - run.num_logits)))
                for _, run, tokens in cut
            ]
            parts = self._pass([(_ours(run), tokens) for _, run, tokens in cut], counts)
            for (place, _, _), part in zip(cut, parts, strict=True):
                logits[place].append(part)
        started = time.perf_counter()
        for run, result, parts in zip(batch, results, logits, strict=True):
            _draw(run, result, parts)
        self.sample_s += time.perf_counter() - started
        self._draft(
            [
                (run, result)
                for run, result in zip(batch, results, strict=True)
                if run.num_drafts and result.drawn
            ]
        )
        return results

    def _draft(self, chosen: Sequence[tuple[RowRun, RunResult]]) -> None:
        """Proposes tokens after the last drawn one of every chosen run."""
        if not chosen:
            return
        assert self.model.drafter is not None
        anchors = [_anchor(_ours(run), run, result) for run, result in chosen]
        for (run, result), draft in zip(chosen, self.model.drafter.draft(anchors), strict=True):
            result.drafts = draft.tokens[: run.num_drafts]
            result.confidences = draft.confidences[: run.num_drafts]

    def copy_rows(self, source: ReferenceSession, target: ReferenceSession) -> None:
        """Copies everything that a session's rows have written, into one with as many pages."""
        self.pages.copy(source.page_table, target.page_table)
        self.slots.copy(source.slot, target.slot)
        if self.model.drafter:
            self.model.drafter.copy(source.slot, target.slot)

    @property
    def max_drafts(self) -> int:
        """Most tokens proposed after a drawn one; 0 without a draft module."""
        return self.config.dspark_block_size if self.model.drafter else 0

    def stats(self) -> EngineStats:
        """Counts pages and slots."""
        pages, slots = self.pages.free, self.slots.free
        return EngineStats(pages.count, len(pages), slots.count, len(slots))

    def _grain(self) -> int:
        return max(self.config.ratio(layer) for layer in self.config.kv_source_layer_ids)

    def _check(self, run: RowRun) -> None:
        session, vocab = run.session, self.info.vocab_size
        assert isinstance(session, ReferenceSession)
        end = session.num_tokens + len(run.tokens)
        if session.closed:
            raise InvalidRequest("the session is closed")
        if end > session.plan.max_tokens:
            raise InvalidRequest(f"rows up to {end} exceed max_tokens {session.plan.max_tokens}")
        if not 0 <= run.num_logits <= len(run.tokens):
            raise InvalidRequest(f"{run.num_logits} logits of {len(run.tokens)} rows")
        start = session.plan.decoder_start
        if run.num_logits and (start is None or end - run.num_logits < start):
            raise InvalidRequest("logits are asked of rows that run the encoder half only")
        if run.num_drafts and self.model.drafter is None:
            raise Incompatible("this checkpoint has no draft module")
        if run.num_drafts and not (run.num_logits and run.sampler):
            raise InvalidRequest("drafts follow a drawn token, and none is drawn")
        if not 0 <= run.num_drafts <= self.max_drafts:
            raise InvalidRequest(
                f"{run.num_drafts} drafts asked, at most {self.max_drafts} are made"
            )
        for token in run.tokens:
            if not 0 <= token < vocab:
                raise InvalidRequest(f"token id {token} is not in [0, {vocab})")
        session.check_imports()
        if session.images:
            for position, token in enumerate(run.tokens, session.num_tokens):
                if position in session.images:
                    self.check_image_token(position, token)

    def check_image_token(self, position: int, token: int) -> None:
        """Refuses another token than the image token at a position that an image covers.

        Raises:
            InvalidRequest: names both.
        """
        expected = self.config.image_token_id
        if token != expected:
            raise InvalidRequest(
                f"token id {token} at position {position} lies in an image, whose id is {expected}"
            )

    def _pass(
        self, runs: Sequence[tuple[ReferenceSession, Sequence[int]]], num_logits: Sequence[int]
    ) -> list[Tensor]:
        rows = self._rows(runs)
        keep, ends, decoder = self._decoder_rows(rows, runs)
        wanted = [
            place
            for end, count in zip(ends, num_logits, strict=True)
            for place in range(end - count, end)
        ]
        logits = self.model.forward(rows, decoder, keep, torch.tensor(wanted, dtype=torch.int64))
        for session, tokens in runs:
            session.advance(tokens)
        return list(logits.split(list(num_logits)))

    def _rows(self, runs: Sequence[tuple[ReferenceSession, Sequence[int]]]) -> Rows:
        """Lays the runs out one after the other and pads them with rows that belong to nobody."""
        total = sum(len(tokens) for _, tokens in runs)
        size = total + -total % TILE
        rows = Rows(
            ids=torch.zeros(size, dtype=torch.int64),
            grams=torch.full((size, LOOK_BACK + 1), BLOCKED),
            pos=torch.zeros(size, dtype=torch.int64),
            slot=torch.full((size,), self.slots.nobody),
            encoder_low=torch.zeros(size, dtype=torch.int64),
            decoder_low=torch.zeros(size, dtype=torch.int64),
            page=torch.full((size,), self.pages.nobody),
            text=torch.ones(size, dtype=torch.bool),
            spans=[],
        )
        begin = 0
        for session, tokens in runs:
            plan, first = session.plan, session.num_tokens
            end = begin + len(tokens)
            part = slice(begin, end)
            pos = torch.arange(first, first + len(tokens))
            rows.ids[part] = torch.tensor(tokens, dtype=torch.int64)
            rows.grams[part] = grams_of(session.tail, session.seen(tokens))
            rows.pos[part] = pos
            rows.slot[part] = session.slot
            rows.encoder_low[part] = plan.first_pos
            rows.decoder_low[part] = NEVER if plan.decoder_start is None else plan.decoder_start
            pages = session.page_table[pos // BLOCK_TOKENS]
            rows.page[part] = torch.where(pos >= plan.global_start, pages, self.pages.nobody)
            # By position, not by image row: a prompt may hold thousands of those, a decode step one position.
            for place, position in enumerate(pos.tolist() if session.images else (), begin):
                if position in session.images:
                    rows.text[place] = False
                    rows.embeds[place] = session.images[position]
            rows.spans.append(Span(begin, end, session.page_table))
            begin = end
        return rows

    def _decoder_rows(
        self, rows: Rows, runs: Sequence[tuple[ReferenceSession, Sequence[int]]]
    ) -> tuple[Tensor, list[int], Rows | None]:
        """Returns the places of rows that run the decoder half, where each run's end among them, and the rows."""
        keep: list[int] = []
        ends: list[int] = []
        spans: list[Span] = []
        for span, (session, _) in zip(rows.spans, runs, strict=True):
            start = session.plan.decoder_start
            first = span.end if start is None else span.begin + start - session.num_tokens
            if self.masked_replay and start is not None:
                first = span.begin
            begin = len(keep)
            keep += range(max(span.begin, first), span.end)
            ends.append(len(keep))
            if len(keep) > begin:
                spans.append(Span(begin, len(keep), span.pages))
        index = torch.tensor(keep, dtype=torch.int64)
        return index, ends, rows.select(index, spans, self.slots.nobody) if keep else None


def _ours(run: RowRun) -> ReferenceSession:
    assert isinstance(run.session, ReferenceSession)
    return run.session


def _anchor(session: ReferenceSession, run: RowRun, result: RunResult) -> Anchor:
    low = session.plan.decoder_start
    assert low is not None
    assert run.sampler is not None
    token = result.drawn[-1].token
    return Anchor(token, session.num_tokens, session.slot, low, run.sampler.params)


def _check_plan(plan: SessionPlan, limit: int) -> None:
    """Refuses numbers that would leave rows unwritten or address pages that are not held."""
    start = plan.first_pos if plan.decoder_start is None else plan.decoder_start
    if not 0 <= plan.first_pos <= plan.global_start <= plan.max_tokens <= limit:
        raise InvalidRequest(
            f"0 <= first_pos <= global_start <= max_tokens <= {limit} does not hold in {plan}"
        )
    if start < plan.first_pos:
        raise InvalidRequest(f"decoder_start lies before first_pos in {plan}")


def _draw(run: RowRun, result: RunResult, parts: list[Tensor]) -> None:
    if not run.num_logits:
        return
    logits = torch.cat(parts)
    if run.keep_logits:
        result.logits = logits.clone()
    if run.sampler is not None:
        drafts = run.tokens[len(run.tokens) - run.num_logits + 1 :]
        contexts = run.sampler.rows(run.session.num_tokens - len(drafts), drafts)
        run.session.rollback(result.take(sample(logits[: len(contexts)], contexts), drafts))


def load_engine(
    folder: Path,
    *,
    role: Literal["prefill", "decode", "all"],
    name: str,
    num_pages: int,
    num_slots: int,
    threads: int = 1,
    gemm_quantized: bool = False,
    expand_below_mb: int = EXPAND_BELOW_BYTES >> 20,
    vision: bool = False,
) -> ReferenceEngine:
    """Loads a checkpoint.

    Args:
        folder: config.json, tokenizer.json and the shards.
        role: "prefill" loads the encoder half only.
        name: of the served model.
        num_pages: pages of one block each.
        num_slots: most sessions at once.
        threads: of torch, for the whole process. Part of the numerics id: long reductions are split by thread.
        gemm_quantized: round inputs of products with F8 and F4 weights to FP8, as the released kernels do.
        expand_below_mb: weights are expanded once if their fp32 values take less; no bit depends on it.
        vision: load the vision tower too, so that sessions take images; both halves of the model need it.

    Raises:
        CheckpointError: names the file and tensor at fault.
    """
    if threads not in (1, 2, 4, 8):
        raise InvalidRequest(f"threads must be 1, 2, 4 or 8, not {threads}")
    torch.set_num_threads(threads)
    config = ModelConfig.load(folder)
    weights = load_weights(folder, config, role, expand_below_bytes=expand_below_mb << 20)
    hashes = EngramHash(config, load_token_map(folder, config))
    layout = BlockLayout.of(config)
    has_decoder = role != "prefill"
    num_layers = config.num_hidden_layers if has_decoder else config.num_encoder_layers
    pages = Pages(config, layout, num_pages)
    slots = Slots(config, num_layers, num_slots)
    info = ModelInfo(
        name=name,
        fingerprint=weights.fingerprint,
        layout_id=layout.layout_id,
        numerics_id=(
            f"reference/cpu-{platform.machine()}/torch-{torch.__version__}/threads-{threads}/"
            f"gemmq-{'on' if gemm_quantized else 'off'}/rev-{NUMERICS_REVISION}"
        ),
        block_bytes=layout.block_bytes,
        window=config.sliding_window,
        vocab_size=config.vocab_size,
        max_context_tokens=config.max_position_embeddings,
        eos_token_id=config.eos_token_id,
        gemm_quantized=gemm_quantized,
    )
    gemm = quantized_linear if gemm_quantized else linear
    model = Model(config, weights, hashes, pages, slots, num_layers, gemm)
    if has_decoder and config.num_nextn_predict_layers:
        experts = [
            weights.experts(f"mtp.{block}.") for block in range(config.num_nextn_predict_layers)
        ]
        model.drafter = Drafter(config, weights, model, experts, num_slots, slots.ring)
    tower = load_tower(folder, config) if vision else None
    engine = ReferenceEngine(
        info, config, model, pages, slots, has_decoder=has_decoder, vision=tower
    )
    _warm_up(engine, decoder_start=0 if has_decoder else None)
    return engine


def _warm_up(engine: ReferenceEngine, decoder_start: int | None) -> None:
    """Runs one row, so that what libraries set up on first use is not on the first request's bill."""
    plan = SessionPlan(first_pos=0, global_start=0, decoder_start=decoder_start, max_tokens=1)
    with engine.open(plan, []) as session:
        engine.step([RowRun(session=session, tokens=[0])])
