"""GPU tests need an NVIDIA GPU and FlashInfer; elsewhere each says why it is skipped."""

from importlib.util import find_spec

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_waits_for_a_slow_compilation)
    reason = None
    if not torch.cuda.is_available():
        reason = "no NVIDIA GPU on this machine"
    elif find_spec("flashinfer") is None:
        reason = "flashinfer-python is not installed"
    if reason:
        for item in items:
            if "tests/gpu" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=reason))


def _waits_for_a_slow_compilation(item: pytest.Item) -> bool:
    """Whether a field report needs an fa3 module, which compiles for minutes: test_kernels.py starts them all first.

    Run in their folder's turn, these would hold up one process each until the same two modules are there.
    """
    is_report = "tests/gpu/field_reports" in item.path.as_posix()
    return is_report and any(word in item.name for word in ("fa3", "sinks_reach"))
