"""Every test here gets a cache folder of its own and none of the user's settings."""

import os

import pytest
from shared_fixtures import without_triton_decode

__all__ = ["without_triton_decode"]

CACHE_VARIABLE = "VLLM_ATTN_PLUGIN_CACHE"
USERS_CACHE = os.environ.get(CACHE_VARIABLE)


@pytest.fixture
def users_cache(cache, monkeypatch):
    """Go back to the cache folder with the real models."""
    if USERS_CACHE is None:
        monkeypatch.delenv(CACHE_VARIABLE)
    else:
        monkeypatch.setenv(CACHE_VARIABLE, USERS_CACHE)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The cache folder of this test; it does not exist yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    # Those of the make that runs the tests are none of the make that a test runs.
    for name in ("ARGS", "DEVICE", "MAKEFLAGS", "MAKELEVEL", "VENV", "VLLM_PLUGINS", "VLLM_TARGET_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def offline_pip(tmp_path, monkeypatch):
    """Make pip look for packages in one (empty) folder only, and return the folder."""
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    return links
