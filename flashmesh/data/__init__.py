"""Files shipped with the package: the demo checkpoint, the built-in tokenizer, the local configuration."""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def demo_folder() -> Path:
    """Returns the folder of the trained demo checkpoint; its README.md is the model card."""
    return _folder() / "demo"


def shipped_tokenizer(model_path: str) -> Path | None:
    """Returns the tokenizer.json of a built-in model, "demo" or "demo-random"; None for any other."""
    shipped = {
        "demo": demo_folder() / "tokenizer.json",
        "demo-random": _folder() / "tokenizer.json",
    }
    return shipped.get(model_path)


def _folder() -> Path:
    return Path(str(resources.files(__name__)))
