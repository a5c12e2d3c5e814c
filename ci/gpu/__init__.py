"""Checks and measurements that need an NVIDIA GPU."""
