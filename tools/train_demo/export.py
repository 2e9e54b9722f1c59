"""From trained masters to a checkpoint folder in the released format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashmesh.kernels.maker import write_values
from tools.train_demo.parameters import stacked_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from flashmesh.kernels.tensor_names import TensorSpec


def export(
    folder: Path, raw: Mapping[str, Any], tokenizer: str, masters: Mapping[str, Tensor]
) -> None:
    """Writes a checkpoint.

    Args:
        folder: must not exist yet.
        raw: config.json's contents.
        tokenizer: tokenizer.json's text.
        masters: fp32 by trained name, drafts included.
    """

    def value(spec: TensorSpec) -> Tensor:
        name, place = stacked_name(spec.name)
        # Images are not trained: their tokens are routed as text is.
        master = masters[name.replace("gate.bias_vl", "gate.bias")]
        return (master if place is None else master[place]).detach().float().cpu().clone()

    write_values(folder, raw, tokenizer, value)
