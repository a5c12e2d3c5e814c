"""Fixtures of the kernel tests."""

from shared_fixtures import one_thread, without_triton_decode

__all__ = ["one_thread", "without_triton_decode"]
