"""An engine in this process behind the same parts that a router streams: no services, equal tokens.

The one module of this package, beside the command line, that reaches up to kernels and to the
router's tokenizer; it does so when an engine is opened, never at import.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flashmesh import config
from flashmesh.answers import Part
from flashmesh.config import ModelSection
from flashmesh.stops import StoppedText, check_stops
from flashmesh.types import BLOCK_TOKENS, FinishReason, GrammarSpec, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path

    from flashmesh.kernels.door import Engine
    from flashmesh.kernels.grammar import Matcher, Vocabulary
    from flashmesh.services.router.text import TextCodec

NUM_SLOTS = 2


class Offline:
    """A loaded engine, its tokenizer and the mesh's replay rule."""

    def __init__(
        self,
        engine: Engine,
        codec: TextCodec,
        replay_tokens: int,
        load_vocabulary: Callable[[], Vocabulary],
    ) -> None:
        self.engine = engine
        self.codec = codec
        self._replay_tokens = replay_tokens
        self._load_vocabulary = functools.cache(load_vocabulary)

    @classmethod
    def open(cls, config_path: Path | None, *, max_tokens: int) -> Offline:
        """Loads the configured model.

        Args:
            config_path: its [model] names the model, its [router] the replay rule.
            max_tokens: longest prompt and answer together; memory for more is not held.

        Raises:
            CheckpointError: names the file and tensor at fault.
            ConfigError: lists every problem.
        """
        from flashmesh.kernels.load import load_vocabulary, open_engine
        from flashmesh.services.router.config import RouterConfig
        from flashmesh.services.router.text import load_codec

        kinds: dict[str, type] = {"model": ModelSection, "router": RouterConfig}
        sections: dict[str, Any] = config.load(config_path, kinds)
        num_pages = NUM_SLOTS * (max_tokens // BLOCK_TOKENS + 2)
        engine = open_engine(sections["model"], "all", num_pages=num_pages, num_slots=NUM_SLOTS)
        return cls(
            engine,
            load_codec(sections["model"]),
            sections["router"].replay_tokens,
            lambda: load_vocabulary(sections["model"], engine.info),
        )

    def parts(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        stops: Sequence[str] = (),
        chunk_tokens: int = 1024,
    ) -> Generator[Part]:
        """Streams an answer, a part for each token and a last one with the reason.

        Args:
            prompt: text, or token ids.
            params: how to draw; a grammar is compiled here, without the limits that a service sets.
            stops: the text ends before the first of these strings.
            chunk_tokens: most rows in a step.

        Raises:
            InvalidRequest: prompt, stop strings or grammar are not usable.
        """
        from flashmesh.kernels.generate import generate_offline

        check_stops(stops)
        ids = self.codec.encode(prompt) if isinstance(prompt, str) else prompt
        text = StoppedText(self.codec.stream(), stops)
        reason = FinishReason.STOP
        events = generate_offline(
            self.engine,
            ids,
            params,
            replay_tokens=self._replay_tokens,
            chunk_tokens=chunk_tokens,
            grammar=self._matcher(params.grammar) if params.grammar else None,
        )
        with contextlib.closing(events):
            for event in events:
                if isinstance(event, FinishReason):
                    reason = event
                    break
                shown, _ = text.push([event.token])
                yield Part([event.token], shown, [event.logprob])
                if text.matched is not None:
                    break
        rest = text.finish()
        if text.matched is not None:
            reason = FinishReason.STOP
        yield Part(
            text=rest,
            seed=params.seed,
            finish_reason=reason.value,
            prompt_tokens=len(ids),
            stop=text.matched or "",
        )

    def _matcher(self, spec: GrammarSpec) -> Matcher:
        vocabulary = self._load_vocabulary()
        from flashmesh.kernels.grammar import compile_grammar  # after what says that it is missing

        return compile_grammar(spec, vocabulary).start(spec.start_after)


def with_seed(params: SamplingParams, seed: int | None) -> SamplingParams:
    """Draws a seed where none is given, as the router does."""
    import secrets

    return replace(params, seed=secrets.randbits(64) if seed is None else seed)
