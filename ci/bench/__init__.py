"""Benchmarks, each beside vLLM's own backends."""
