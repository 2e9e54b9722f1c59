"""Waiting for a condition of another process: bounded against hangs, never a fixed pause."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_S = 60.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Returns as soon as the condition holds; fails after a minute."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"still not so: {what}"
        time.sleep(0.02)
