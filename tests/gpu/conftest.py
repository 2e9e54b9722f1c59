"""Kernels against their twins, on a Hopper GPU; everything here is skipped, saying why, where there is none."""

import pytest
import torch


def _missing() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"{torch.cuda.get_device_name()} is no Hopper GPU"
    return None


def pytest_collection_modifyitems(items):
    reason = _missing()
    if reason:
        for item in items:
            if "tests/gpu/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def random():
    """A generator on the device, with a printed seed."""
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    return torch.Generator(device="cuda").manual_seed(seed)


@pytest.fixture
def poison(monkeypatch):
    """Makes fresh tensors hold what no test accepts, so that an element which nothing wrote shows."""
    empty, empty_like = torch.empty, torch.empty_like

    def fill(tensor):
        if tensor.is_floating_point():
            return tensor.fill_(torch.nan)
        return tensor.fill_(-7 if tensor.dtype.is_signed else 77)

    monkeypatch.setattr(torch, "empty", lambda *args, **named: fill(empty(*args, **named)))
    monkeypatch.setattr(
        torch, "empty_like", lambda *args, **named: fill(empty_like(*args, **named))
    )
