"""An engine in this process behind the same parts that a router streams: no services, equal tokens.

The one module of this package, beside the command line, that reaches up to kernels and to the
router's tokenizer; it does so when an engine is opened, never at import.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flashmesh import config
from flashmesh.answers import Part
from flashmesh.config import ModelSection
from flashmesh.types import BLOCK_TOKENS, FinishReason, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from flashmesh.kernels.door import Engine
    from flashmesh.services.router.text import TextCodec

NUM_SLOTS = 2


class Offline:
    """A loaded engine, its tokenizer and the mesh's replay rule."""

    def __init__(self, engine: Engine, codec: TextCodec, replay_tokens: int) -> None:
        self.engine = engine
        self.codec = codec
        self._replay_tokens = replay_tokens

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
        from flashmesh.kernels.load import open_engine
        from flashmesh.services.router.config import RouterConfig
        from flashmesh.services.router.text import load_codec

        kinds: dict[str, type] = {"model": ModelSection, "router": RouterConfig}
        sections: dict[str, Any] = config.load(config_path, kinds)
        num_pages = NUM_SLOTS * (max_tokens // BLOCK_TOKENS + 2)
        engine = open_engine(sections["model"], "all", num_pages=num_pages, num_slots=NUM_SLOTS)
        return cls(engine, load_codec(sections["model"]), sections["router"].replay_tokens)

    def parts(
        self, prompt: str | list[int], params: SamplingParams, *, chunk_tokens: int = 1024
    ) -> Generator[Part]:
        """Streams an answer, a part for each token and a last one with the reason."""
        from flashmesh.kernels.generate import generate_offline

        ids = self.codec.encode(prompt) if isinstance(prompt, str) else prompt
        text = self.codec.stream()
        events = generate_offline(
            self.engine,
            ids,
            params,
            replay_tokens=self._replay_tokens,
            chunk_tokens=chunk_tokens,
        )
        for event in events:
            if isinstance(event, FinishReason):
                yield Part(
                    text=text.finish(),
                    seed=params.seed,
                    finish_reason=event.value,
                    prompt_tokens=len(ids),
                )
            else:
                yield Part([event.token], text.push([event.token]), [event.logprob])


def with_seed(params: SamplingParams, seed: int | None) -> SamplingParams:
    """Draws a seed where none is given, as the router does."""
    import secrets

    return replace(params, seed=secrets.randbits(64) if seed is None else seed)
