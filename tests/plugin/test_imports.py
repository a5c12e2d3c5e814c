"""What importing the package costs and pulls in, each measured in an interpreter of its own."""

import subprocess
import sys

import pytest

HEAVY = ("vllm", "flashinfer", "triton", "torch", "numpy")
# The editable install's finder and `import` itself are Python's; 0.2 s is what the package may add.
LIMIT_S, RUNS = 0.2, 5


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    # -P: the installed package, not what lies in the working directory.
    return subprocess.run([sys.executable, "-P", *arguments], capture_output=True, text=True, check=True, timeout=120)


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in an interpreter that ran one statement."""
    code = f"import sys; {statement}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    return set(run("-c", code).stdout.split())


def test_package_loads_nothing_heavy() -> None:
    assert loaded_by("import vllm_attn_plugin").isdisjoint(HEAVY)
    assert loaded_by("from vllm_attn_plugin import register, cpu_platform").isdisjoint(HEAVY)


def test_settings_load_nothing_heavy() -> None:
    assert loaded_by("import vllm_attn_plugin.settings").isdisjoint(HEAVY)


def test_help_loads_nothing_heavy_and_serving_no_command_line() -> None:
    loaded = loaded_by("import vllm_attn_plugin.cli.app")
    assert "typer" in loaded
    assert loaded.isdisjoint(HEAVY)
    assert "typer" not in loaded_by("import vllm_attn_plugin, vllm_attn_plugin.settings")


@pytest.mark.parametrize("package", ["metadata", "kernels"])
def test_rooms_below_load_no_engine_and_no_kernel_library(package: str) -> None:
    loaded = loaded_by(f"import vllm_attn_plugin.{package}")
    assert "torch" in loaded, "the test would see a module that is loaded"
    assert loaded.isdisjoint({"vllm", "flashinfer"})


def import_time_s() -> float:
    """Time that Python's own clock gives to the package and all it imports."""
    report = run("-X", "importtime", "-c", "import vllm_attn_plugin").stderr
    (line,) = (line for line in report.splitlines() if line.rpartition("|")[2].strip() == "vllm_attn_plugin")
    return int(line.split("|")[1]) / 1e6


def test_import_takes_no_time() -> None:
    assert min(import_time_s() for _ in range(RUNS)) < LIMIT_S
