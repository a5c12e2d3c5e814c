"""Fixtures of the kernel tests."""

from shared_fixtures import one_thread

__all__ = ["one_thread"]
