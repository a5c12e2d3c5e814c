"""Fixtures of the field reports' tests."""

from shared_fixtures import fresh_settings, one_thread, without_triton_decode

__all__ = ["fresh_settings", "one_thread", "without_triton_decode"]
