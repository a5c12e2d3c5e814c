"""Fixtures of the engine tests: a child process that runs engines, and the models."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Behind everything installed: the root holds folders called `kernels` and `metadata`, names that others use too.
for folder in (HERE, HERE.parents[1]):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

from engine_harness.child import EngineChild  # noqa: E402
from engine_harness.small_models import keep_first_layers  # noqa: E402

from ci.models import prepare  # noqa: E402


@pytest.fixture(scope="session")
def child() -> Iterator[EngineChild]:
    """The process that runs engines."""
    started = EngineChild()
    yield started
    started.close()


@pytest.fixture(scope="session", params=["smollm2", "gemma"])
def model(request: pytest.FixtureRequest) -> Path:
    """Folder of a real model; pytest runs the tests of one before those of the other."""
    return prepare(request.param)


@pytest.fixture(scope="session")
def short_smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of SmolLM2's first four layers, for what does not depend on how many there are."""
    return keep_first_layers(prepare("smollm2"), tmp_path_factory.mktemp("short") / "smollm2", 4)


@pytest.fixture(scope="session")
def short_gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of Gemma 3's first twelve layers: ten have a window and two none, so every KV-cache group has two."""
    return keep_first_layers(prepare("gemma"), tmp_path_factory.mktemp("short") / "gemma", 12)


@pytest.fixture(scope="session", params=["smollm2", "gemma"])
def short_model(request: pytest.FixtureRequest) -> Path:
    """Folder of a real model's first layers."""
    folder: Path = request.getfixturevalue(f"short_{request.param}")
    return folder
