"""An answer as its reader sees it: parts as they come, and what they add up to.

Filled from a router's stream (`flashmesh.client`) or from an engine in this process
(`flashmesh.offline`), so that whatever prints or measures answers need not know which.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@dataclass(slots=True)
class Part:
    """A piece of an answer; the first one has the seed, the last one the reason, its stop string, and the counts."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    seed: int | None = None
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    choice: int = 0
    stop: str = ""


@dataclass(slots=True)
class Answer:
    """What has come so far, and when.

    Attributes:
        whole: all parts as one.
        started: `time.perf_counter` at the request.
        token_times_s: seconds from the request to each token.
    """

    whole: Part = field(default_factory=Part)
    started: float = field(default_factory=time.perf_counter)
    token_times_s: list[float] = field(default_factory=list)

    @property
    def first_token_s(self) -> float | None:
        """Seconds to the first token; None while there is none."""
        return self.token_times_s[0] if self.token_times_s else None

    def watch(self, parts: Iterable[Part]) -> Iterator[Part]:
        """Passes parts on and keeps count."""
        for part in parts:
            self._add(part)
            yield part

    def read(self, parts: Iterable[Part]) -> Answer:
        """Takes all parts and returns itself."""
        for part in parts:
            self._add(part)
        return self

    def _add(self, part: Part) -> None:
        whole = self.whole
        now = time.perf_counter() - self.started
        self.token_times_s += [now] * len(part.token_ids)
        whole.token_ids += part.token_ids
        whole.logprobs += part.logprobs
        whole.text += part.text
        if part.seed is not None:
            whole.seed = part.seed
        if part.finish_reason:
            whole.finish_reason, whole.stop = part.finish_reason, part.stop
            whole.prompt_tokens, whole.cached_tokens = part.prompt_tokens, part.cached_tokens

    def figures(self) -> str:
        """Returns one line for people."""
        whole = self.whole
        if self.token_times_s:
            times = (
                f"first token after {self.token_times_s[0] * 1000:.0f} ms, "
                f"{len(whole.token_ids)} tokens in {self.token_times_s[-1]:.2f} s"
            )
        else:
            times = "no token"
        return (
            f"{times}; prompt {whole.prompt_tokens} tokens, {whole.cached_tokens} of them cached; "
            f"finish: {whole.finish_reason}"
        )

    def as_json(self) -> dict[str, object]:
        """Returns everything, for programs."""
        whole = self.whole
        return {
            "text": whole.text,
            "token_ids": whole.token_ids,
            "logprobs": whole.logprobs,
            "finish_reason": whole.finish_reason,
            "stop": whole.stop,
            "seed": whole.seed,
            "prompt_tokens": whole.prompt_tokens,
            "cached_tokens": whole.cached_tokens,
            "first_token_s": self.first_token_s,
            "total_s": self.token_times_s[-1] if self.token_times_s else None,
        }
