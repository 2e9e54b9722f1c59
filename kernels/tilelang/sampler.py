"""Drawing of tokens; see `kernels.ops.sampler`.

Here are the checks and the launch; the kernels are in `sampler_draw` and `sampler_top`.
"""

import torch
from torch import Tensor

from flashmesh.kernels.ops.sampler import Lists, Sampled, SampleParams
from flashmesh.kernels.tilelang.build import Variant, build
from flashmesh.kernels.tilelang.sampler_device import check_logits
from flashmesh.kernels.tilelang.sampler_draw import draw_rows
from flashmesh.kernels.tilelang.sampler_top import top_logprobs, top_variants

__all__ = ["sample", "top_logprobs", "variants"]


def sample(logits: Tensor, params: SampleParams) -> Sampled:
    """Draws one token a row; contract of `kernels.ops.sampler.sample`, with fp32 where that has float64.

    Raises:
        ValueError: logits are not contiguous fp32, or the vocabulary is no multiple of 32 or above 131,072; a tensor of
            parameters has another shape or type than its contract says.
    """
    rows, vocab = check_logits(logits)
    _check(params, rows, vocab)
    token = torch.empty(rows, dtype=torch.int32, device=logits.device)
    logprob, processed = (torch.empty(rows, device=logits.device) for _ in range(2))
    if not rows:
        return Sampled(token, logprob, processed)
    lists = (params.counts, params.bias, params.excluded)
    edits = any(part is not None for part in lists)
    # Row r of a list that no row has is empty; without any list, the kernel has no code that would look.
    zeros = torch.zeros(rows + 1, dtype=torch.int32, device=logits.device) if edits else token
    ids, amounts = token[:1], logprob[:1]
    counts, bias, excluded = (
        part if part is not None and len(part.ids) else Lists(zeros, ids) for part in lists
    )
    build(draw_rows, vocab, edits, params.allowed is not None)(
        logits,
        *params[:10],
        counts.ends,
        counts.ids,
        ids if counts.values is None else counts.values,
        bias.ends,
        bias.ids,
        amounts if bias.values is None else bias.values,
        excluded.ends,
        excluded.ids,
        torch.empty(len(excluded.ids), device=logits.device),
        token.new_empty(1, vocab // 32) if params.allowed is None else params.allowed,
        token,
        logprob,
        processed,
    )
    return Sampled(token, logprob, processed)


def _check(params: SampleParams, rows: int, vocab: int) -> None:
    for name, values in zip(params._fields[:10], params[:10], strict=True):
        dtype = {"top_k": torch.int32, "seed": torch.int64, "choice": torch.int32}.get(
            name, torch.int32 if name == "position" else torch.float32
        )
        _check_tensor(name, values, (rows,), dtype)
    kinds: dict[str, torch.dtype | None] = {
        "counts": torch.int32,
        "bias": torch.float32,
        "excluded": None,
    }
    for name, kind in kinds.items():
        part = getattr(params, name)
        if part is not None:
            _check_tensor(f"{name}.ends", part.ends, (rows + 1,), torch.int32)
            _check_tensor(f"{name}.ids", part.ids, (len(part.ids),), torch.int32)
            if kind is not None:
                _check_tensor(f"{name}.values", part.values, (len(part.ids),), kind)
    if params.allowed is not None:
        _check_tensor("allowed", params.allowed, (rows, vocab // 32), torch.int32)


def _check_tensor(
    name: str, values: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    if values is None:
        raise ValueError(f"{name} is missing: {dtype} {list(shape)}")
    if values.shape != shape or values.dtype != dtype or not values.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous {dtype} {list(shape)},"
            f" not {values.dtype} {list(values.shape)}"
        )


def variants() -> list[Variant]:
    """Kernels of V4.1-Flash: rows plain, with penalties, bias or exclusions, under a grammar, with both; top tokens."""
    return [
        Variant("sample", draw_rows, (129280, False, False)),
        Variant("sample.edits", draw_rows, (129280, True, False)),
        Variant("sample.masked", draw_rows, (129280, False, True)),
        Variant("sample.edits.masked", draw_rows, (129280, True, True)),
        *top_variants(),
    ]
