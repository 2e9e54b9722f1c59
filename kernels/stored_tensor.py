"""One weight as its file holds it, in memory, expanded whenever it is used.

A quantised weight takes a quarter to an eighth of its fp32 values, so a model that would not fit
expanded still runs. Expanding is exact: both forms give the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from flashmesh.errors import CheckpointError
from flashmesh.kernels.formats import Kind, expand

if TYPE_CHECKING:
    from torch import Tensor

    from flashmesh.kernels.checkpoint import Place

_E4M3_NAN = 0x7F
_BF16_EXPONENT = 0x7F80
_SAFE_SCALE = 127 + 118
"""Largest scale byte with which no code can overflow: 448 < 2^9, and 2^127 is finite."""


class StoredTensor(NamedTuple):
    """A weight and its scales.

    Attributes:
        kind: of the weight; F8, F4 or F8row.
        weight: as stored.
        scale: float8_e8m0fnu.
    """

    kind: Kind
    weight: Tensor
    scale: Tensor

    def expand(self) -> Tensor:
        """Returns the values, fp32, in new memory."""
        return expand(self.kind, self.weight, self.scale)

    def is_finite(self) -> bool:
        """Whether all values are finite; reads codes and scales and expands only suspects."""
        # numpy: torch's byte reductions take eight times as long.
        if int(self.scale.view(torch.uint8).numpy().max()) > _SAFE_SCALE:
            return bool(torch.isfinite(self.expand()).all())
        if self.kind == "F4":
            return True  # no e2m1 code is NaN
        return int((self.weight.view(torch.uint8).numpy() & _E4M3_NAN).max()) < _E4M3_NAN


def check_finite(value: Tensor | StoredTensor, place: Place) -> None:
    """Refuses NaN and infinities.

    Raises:
        CheckpointError: names the tensor and counts them.
    """
    if isinstance(value, StoredTensor):
        if value.is_finite():
            return
        value = value.expand()
    elif value.dtype == torch.bfloat16 and value.numel():
        # numpy again: torch's isfinite is several times slower here.
        exponents = value.contiguous().view(torch.uint16).numpy() & _BF16_EXPONENT
        if int(exponents.max()) < _BF16_EXPONENT:
            return
    elif value.dtype == torch.float32 and np.isfinite(value.numpy()).all():
        return
    finite = torch.isfinite(value)
    if not finite.all():
        raise CheckpointError(
            f"{place}: expected finite values, "
            f"found {int((~finite).sum())} NaN or infinite of {value.numel()}"
        )
