"""GPU tests need an NVIDIA GPU and FlashInfer; elsewhere each says why it is skipped."""

from importlib.util import find_spec

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None
    if not torch.cuda.is_available():
        reason = "no NVIDIA GPU on this machine"
    elif find_spec("flashinfer") is None:
        reason = "flashinfer-python is not installed"
    if reason:
        for item in items:
            if "tests/gpu" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=reason))
