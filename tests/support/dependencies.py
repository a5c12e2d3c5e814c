"""What the package's sources use of vLLM and FlashInfer, read off their syntax trees."""

import ast
from collections import defaultdict
from collections.abc import Iterator

from documents import ROOMS, ROOT

# Our logger is a child of vLLM's and no name of theirs.
OWN_NAMES = {"vllm.attn_plugin"}
# Local names for parts of vLLM's configuration.
ALIASES = {"compilation": "compilation_config", "model": "model_config"}


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Each source file of the package by its path in the repository, and its tree."""
    for path in (path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))):
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def imported(package: str) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """What is imported of a package: names by module, and files by module."""
    names: dict[str, set[str]] = defaultdict(set)
    files: dict[str, set[str]] = defaultdict(set)
    for file, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == package:
                names[str(node.module)] |= {alias.name for alias in node.names}
                files[str(node.module)].add(file)
            elif isinstance(node, ast.Import):
                assert not [one for one in node.names if one.name.partition(".")[0] == package], f"{file} imports whole"
    return dict(names), dict(files)


def by_name() -> set[str]:
    """Modules, classes and operators of vLLM that are named in a string or reached through torch's registry."""
    found = set()
    for _, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("vllm."):
                found |= {node.value} if node.value.replace(".", "").isidentifier() else set()
            elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.ops."):
                found |= {ast.unparse(node)} if ast.unparse(node).count(".") > 2 else set()
    return found - OWN_NAMES


def reads(file: str, roots: set[str]) -> set[str]:
    """Attributes that a file reads of some local names: `common.seq_lens.data_ptr` gives `seq_lens.data_ptr`."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    inner = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node not in inner:
            root, _, rest = ast.unparse(node).partition(".")
            if root in roots and rest.replace(".", "").isidentifier():
                found.add(f"{ALIASES[root]}.{rest}" if root in ALIASES else rest)
    return found


def of_common_metadata() -> set[str]:
    """Fields of vLLM's common metadata that are read."""
    files = ("builder", "checked", "recent_steps")
    chains = set().union(*(reads(f"vllm_attn_plugin/{file}.py", {"common", "common_attn_metadata"}) for file in files))
    return {chain.partition(".")[0] for chain in chains}


def of_configuration() -> set[str]:
    """Fields of vLLM's configuration that are read, each with its part."""
    builder = reads("vllm_attn_plugin/builder.py", {"vllm_config", "compilation"})
    backend = reads("vllm_attn_plugin/backend.py", {"config", "model"})
    return {".".join(chain.split(".")[:2]) for chain in builder | backend if "." in chain}


def of_layer() -> set[str]:
    """Attributes of vLLM's attention layer that are read."""
    files = ("impl", "checked")
    return set().union(*({c.partition(".")[0] for c in reads(f"vllm_attn_plugin/{f}.py", {"layer"})} for f in files))
