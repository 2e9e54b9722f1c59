"""Drawing of tokens and their likeliest alternatives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flashmesh.bench.gpu.case import Case

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashmesh.kernels.ops.sampler import SampleParams

VOCAB = 129_280
SETS_BYTES = 256 << 20
"""Together, sets of inputs in turn exceed the L2 cache several times."""


def cases() -> Iterator[Case]:
    """Yields one row, a decode batch, and the rows of a batch that verifies drafts."""
    from flashmesh.kernels.tilelang.sampler import sample, top_logprobs

    for rows in (1, 64, 384):
        count = max(2, min(64, SETS_BYTES // (rows * VOCAB * 4)))
        # Spread like a model's logits: the likeliest of N tokens stand out.
        sets = torch.randn(count, rows, VOCAB, device="cuda") * 3
        num_bytes = sets[0].nbytes + 12 * rows
        plain, nucleus, largest = _params(rows), _params(rows, top_p=0.95), _params(rows, top_k=50)

        def sort(call: int, sets: torch.Tensor = sets) -> object:
            return torch.softmax(sets[call % len(sets)], 1).sort(1, descending=True)

        def race(call: int, sets: torch.Tensor = sets) -> object:
            # As `multinomial` does, which cannot be captured in a graph.
            chances = torch.softmax(sets[call % len(sets)], 1)
            return chances.div_(torch.empty_like(chances).exponential_()).argmax(1)

        def topk(call: int, sets: torch.Tensor = sets, k: int = 50) -> object:
            return sets[call % len(sets)].topk(k, 1)

        for name, params, peer, peer_name in (
            ("sample", plain, race, "softmax, exponential_, argmax"),
            ("sample.top_p", nucleus, sort, "softmax, sort"),
            ("sample.top_k", largest, topk, "topk"),
        ):
            yield Case(
                f"{name}.{rows}",
                lambda call, sets=sets, params=params: sample(sets[call % len(sets)], params),
                num_bytes=num_bytes,
                peer=peer,
                peer_name=peer_name,
            )
        yield Case(
            f"top_logprobs.{rows}",
            lambda call, sets=sets: top_logprobs(sets[call % len(sets)], 20),
            num_bytes=sets[0].nbytes + 160 * rows,
            peer=lambda call, topk=topk: topk(call, k=20),
            peer_name="topk",
        )


def _params(rows: int, **changes: float) -> SampleParams:
    from flashmesh.kernels.ops.sampler import SampleParams

    types = {"seed": torch.int64} | dict.fromkeys(("top_k", "choice", "position"), torch.int32)
    ones = ("temperature", "top_p", "repetition_penalty")
    columns: list[Any] = [
        torch.full(
            (rows,),
            changes.get(name, name in ones),
            dtype=types.get(name, torch.float32),
            device="cuda",
        )
        for name in SampleParams._fields[:10]
    ]
    return SampleParams(*columns)
