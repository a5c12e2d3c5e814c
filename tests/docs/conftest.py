"""Fixtures of the documents' tests."""

from shared_fixtures import fresh_settings, one_thread

__all__ = ["fresh_settings", "one_thread"]
