"""Fixtures that several test folders share; a folder's conftest.py imports those that it wants."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from vllm_attn_plugin.kernels import dispatch
from vllm_attn_plugin.kernels.split_decode import SplitDecodeKernel
from vllm_attn_plugin.settings import PREFIX, settings


@pytest.fixture(autouse=True)
def fresh_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No settings from the outside, and none that a test leaves behind: they are read once a process."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    settings.cache_clear()
    yield
    settings.cache_clear()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The tensors here are small: threads would spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def without_triton_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper's rule without the kernel that needs nothing of FlashInfer's or FlashAttention's, to see the others'."""
    rule = dispatch.RULES[9]
    decode = tuple(candidate for candidate in rule.decode if candidate.kernel is not SplitDecodeKernel)
    monkeypatch.setitem(dispatch.RULES, 9, replace(rule, decode=decode))
