"""The rule of the rooms, read from the sources: who may import whom; and no library's private parts are read."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Third-party packages that a room may import at the top of a file, and those it may import inside a function.
AT_THE_TOP = {"metadata": {"torch", "numpy"}, "kernels": {"torch", "numpy"}}
# Device code needs its language when it is read; such a file is itself imported inside functions alone.
DEVICE_FILES = {
    "metadata/page_kernel.py": "vllm_attn_plugin.metadata.page_kernel",
    "kernels/kv_write_kernel.py": "vllm_attn_plugin.kernels.kv_write_kernel",
    "kernels/page_tail_kernel.py": "vllm_attn_plugin.kernels.page_tail_kernel",
    "kernels/quantize_kernel.py": "vllm_attn_plugin.kernels.quantize_kernel",
    "kernels/split_decode_blocks.py": "vllm_attn_plugin.kernels.split_decode_blocks",
    "kernels/split_decode_kernel.py": "vllm_attn_plugin.kernels.split_decode_kernel",
    "kernels/split_decode_launch.py": "vllm_attn_plugin.kernels.split_decode_launch",
    "kernels/split_decode_merge.py": "vllm_attn_plugin.kernels.split_decode_merge",
    "kernels/split_decode_rows.py": "vllm_attn_plugin.kernels.split_decode_rows",
}
# FlashAttention 3 comes with vLLM: a library of kernels, which knows nothing of its engine.
KERNEL_LIBRARIES = {"vllm.vllm_flash_attn"}
INSIDE = {"metadata": {"triton"}, "kernels": {"triton", "flashinfer", *KERNEL_LIBRARIES}}
OWN = {
    "metadata": ("vllm_attn_plugin.metadata",),
    "kernels": ("vllm_attn_plugin.metadata", "vllm_attn_plugin.kernels"),
}


def sources(*rooms: str) -> list[Path]:
    return sorted(path for room in rooms for path in (ROOT / room).rglob("*.py"))


def imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Every module imported, by full name, and whether that happens at the top of the file."""

    def visit(node: ast.AST, is_top: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, is_top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert not child.level, "a relative import hides which room it reaches into"
                base = child.module or ""
                # `from vllm_attn_plugin import x`: x may be a room.
                names = [f"{base}.{alias.name}" for alias in child.names] if base == "vllm_attn_plugin" else [base]
                yield from ((name, is_top) for name in names)
            yield from visit(child, is_top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    return visit(tree, is_top=True)


def violations(room: str, source: str) -> list[str]:
    """Imports of one file that its room does not allow."""
    bad = []
    for name, is_top in imports(ast.parse(source)):
        package = name if name in KERNEL_LIBRARIES else name.partition(".")[0]
        allowed = AT_THE_TOP[room] | (set() if is_top else INSIDE[room])
        is_own = any(name == own or name.startswith(f"{own}.") for own in OWN[room])
        if not (is_own or package in allowed or package in sys.stdlib_module_names):
            bad.append(name)
    return bad


@pytest.mark.parametrize("path", sources("metadata", "kernels"), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_import_upwards_nor_of_an_engine(path: Path) -> None:
    relative = path.relative_to(ROOT)
    allowed = {"triton", "triton.language"} if relative.as_posix() in DEVICE_FILES else set()
    assert set(violations(relative.parts[0], path.read_text(encoding="utf-8"))) <= allowed


def test_device_files_are_imported_inside_functions_alone() -> None:
    for path in sources("metadata", "kernels", "vllm_attn_plugin"):
        if path.relative_to(ROOT).as_posix() in DEVICE_FILES:  # one kernel may be written in several
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert not [name for name, is_top in imports(tree) if is_top and name in DEVICE_FILES.values()]


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("metadata", "import vllm"),
        ("metadata", "def f():\n    from vllm.v1 import attention"),
        ("metadata", "from vllm_attn_plugin.kernels import choose"),
        ("metadata", "from vllm_attn_plugin import kernels"),
        ("metadata", "import triton"),
        ("metadata", "def f():\n    import flashinfer"),
        ("kernels", "import flashinfer.decode"),
        ("kernels", "import vllm.vllm_flash_attn"),
        ("metadata", "def f():\n    import vllm.vllm_flash_attn"),
        ("kernels", "class A:\n    import flashinfer"),
        ("kernels", "from vllm_attn_plugin.settings import settings"),
        ("kernels", "from vllm_attn_plugin import settings"),
        ("kernels", "import vllm_attn_plugin"),
        ("kernels", "if True:\n    def f():\n        import vllm.platforms"),
    ],
)
def test_rule_sees_what_it_forbids(room: str, source: str) -> None:
    assert len(violations(room, source)) == 1


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("metadata", "import torch, numpy as np\nfrom dataclasses import dataclass"),
        ("metadata", "def f():\n    import triton.language"),
        ("kernels", "from vllm_attn_plugin.metadata import PagedBatch\nimport vllm_attn_plugin.kernels.interface"),
        ("kernels", "def f():\n    from flashinfer.decode import x"),
        ("kernels", "def f():\n    from vllm.vllm_flash_attn import x"),
    ],
)
def test_rule_allows_what_it_should(room: str, source: str) -> None:
    assert violations(room, source) == []


def is_private(name: object) -> bool:
    return str(name).startswith("_") and not str(name).startswith("__")


def private_reads(source: str) -> list[str]:
    """Private names of others that a file which uses FlashInfer reads, by attribute, by getattr or by import."""
    tree = ast.parse(source)
    if not any(name.partition(".")[0] == "flashinfer" for name, _ in imports(tree)):
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                found.append(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr"):
            names = [arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)]
            found += [str(name) for name in names if is_private(name)]
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "flashinfer":
            path = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            found += [name for name in path if is_private(name)]
    return found


@pytest.mark.parametrize(
    "path", sources("metadata", "kernels", "vllm_attn_plugin"), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_no_private_part_of_flashinfer_is_read(path: Path) -> None:
    assert private_reads(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "statement",
    [
        "self._wrapper._plan_info",
        "wrapper._qo_indptr_buf = 3",
        "getattr(wrapper, '_plan_info')",
        "from flashinfer._build import x",
    ],
)
def test_private_read_is_seen(statement: str) -> None:
    source = f"def f(self, wrapper):\n    import flashinfer\n    {statement}"
    assert len(private_reads(source)) == 1


def test_own_private_parts_may_be_read() -> None:
    source = "def f(self):\n    import flashinfer\n    self._wrapper.plan()\n    self._n = wrapper.__doc__"
    assert private_reads(source) == []
