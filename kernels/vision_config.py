"""The vision tower's configuration: `vision_config` of `config.json` as a frozen, checked dataclass.

Field names are those of the released file. A checkpoint may have no tower (no such table, or one of no layers); that is
`None` here and no error, since text needs none of it. Sizes of images follow from this in `image`.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from flashmesh.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MIN_SPAN_TOKENS = 4
"""Span of the smallest image: start, one aligner row, newline, end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Sizes of the vision tower and limits on its input; fields are named as in the released `config.json`.

    Attributes:
        patch_size: side of a patch, in pixels.
        downsample_ratio: side of the square of patches that becomes one aligner row.
        max_image_tokens: most tokens of one image's span, its marks included.
        min_pixels: images of fewer pixels are scaled up to this many.
    """

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise CheckpointError("config.json: vision_config: " + "; ".join(problems))

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Reads `config.json` of a checkpoint folder.

        Returns:
            None where the checkpoint has no vision tower.

        Raises:
            CheckpointError: the file is missing, is not JSON, or describes no usable tower.
        """
        path = folder / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: {error}") from error
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self | None:
        """Builds the configuration from the contents of `config.json`; unknown keys are ignored.

        Returns:
            None where there is no `vision_config`, or one of no layers.

        Raises:
            CheckpointError: with every missing, mistyped or inconsistent key.
        """
        table = raw.get("vision_config")
        if table is None:
            return None
        if not isinstance(table, dict):
            raise CheckpointError(f"config.json: vision_config is {table!r}, expected a table")
        if table.get("num_hidden_layers") == 0:
            return None
        problems = []
        if table.get("max_wh_ratio") is not None:
            problems.append(f"max_wh_ratio is {table['max_wh_ratio']!r}, only null is supported")
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            try:
                values[field.name] = _number(table[field.name], whole=str(field.type) == "int")
            except KeyError:
                problems.append(f"{field.name} is missing")
            except (TypeError, ValueError) as error:
                problems.append(f"{field.name}: {error}")
        if problems:
            raise CheckpointError("config.json: vision_config: " + "; ".join(problems))
        return cls(**values)

    @property
    def head_dim(self) -> int:
        """Width of an attention head: a quarter turns with the row, a quarter with the column, twice."""
        return self.hidden_size // self.num_attention_heads

    @property
    def patch_values(self) -> int:
        """Numbers in a flattened RGB patch."""
        return 3 * self.patch_size**2


def _number(value: Any, *, whole: bool) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    if whole and int(value) != value:
        raise ValueError(f"{value!r} is not a whole number")
    return int(value) if whole else float(value)


def _problems(c: VisionConfig) -> list[str]:
    """Problems of single fields; how they fit together is checked only when there are none."""
    names = [field.name for field in dataclasses.fields(c)]
    problems = [f"{name} must be > 0" for name in names if not getattr(c, name) > 0]
    if problems:
        return problems
    if c.hidden_size % c.num_attention_heads:
        problems.append("num_attention_heads must divide hidden_size")
    elif c.head_dim % 4:
        problems.append(f"a head is {c.head_dim} wide, which must be a multiple of 4")
    if c.max_image_tokens < MIN_SPAN_TOKENS:
        problems.append(f"max_image_tokens must be >= {MIN_SPAN_TOKENS}")
    return problems
