"""What the documents state, as tests read it: facts, checked tables, links, and the code that they name."""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "ci").rglob("*.md")])
ROOMS = ("kernels", "metadata", "vllm_attn_plugin")
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")
# A link to a source file, and the names in it that stand behind the link: [`x.py`](../x.py) `f`, `Class.g`.
PLACE = re.compile(r"\[[^\]]*\]\(([^)\s]+\.py)\)((?:,? ?`[^`\n]+`)+)")
A_PATH = re.compile(rf"(?:{'|'.join(ROOMS)}|tests|ci|docs)/[\w./-]+\.(?:py|md|json|svg|png|yaml)")


@dataclass(frozen=True)
class Fact:
    """A statement in a document's code: `expression = value`."""

    expression: str
    value: str


def result(path: str) -> dict[str, Any]:
    """A result file below `ci/results`."""
    found: dict[str, Any] = json.loads((ROOT / "ci/results" / path).read_text(encoding="utf-8"))
    return found


def relative(path: Path) -> str:
    """A page as a test's id."""
    return path.relative_to(ROOT).as_posix()


def without_blocks(text: str) -> str:
    """A document without its indented and fenced code."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return "\n".join(line for line in text.splitlines() if not line.startswith("    "))


def facts_in(text: str) -> Iterator[Fact]:
    """Every `expression = value` in code spans; keyword arguments and settings have no spaces around theirs."""
    for span in SPAN.findall(text):
        expression, equals, value = span.partition(" = ")
        if equals:
            yield Fact(expression, value)


def loose_numbers(text: str) -> list[str]:
    """Numerals in prose and tables that stand in no code span and no link, so that no test reads them."""
    bare = re.sub(r"<!--.*?-->", " ", LINK.sub(" ", SPAN.sub(" ", without_blocks(text))), flags=re.DOTALL)
    bare = re.sub(r"^\s*(?:#+ )?\d+\. ", "", bare, flags=re.MULTILINE)  # the numbers of a list's entries and of steps
    return re.findall(r"(?<![\w.])\d[\d,.]*(?!\w)", bare)


def table(text: str, name: str) -> list[list[str]]:
    """The cells of the table that stands behind `<!-- checked: name -->`, its head left out."""
    _, marker, rest = text.partition(f"<!-- checked: {name} -->\n")
    assert marker, f"there is no table marked `checked: {name}`"
    lines = []
    for line in rest.lstrip("\n").splitlines():
        if not line.startswith("|"):
            break
        lines.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))])
    assert len(lines) > 2, f"the table {name} is empty"
    return lines[2:]


def spans_in(cell: str) -> list[str]:
    """The code spans of a table's cell."""
    return SPAN.findall(cell)


def anchors(text: str) -> set[str]:
    """The anchors that a code host gives a document's headings."""
    found: dict[str, int] = {}
    made = set()
    for heading in re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.M):
        words = re.sub(r"[^\w\- ]", "", LINK.sub(r"\1", heading).lower()).strip().replace(" ", "-")
        made.add(words if words not in found else f"{words}-{found[words]}")
        found[words] = found.get(words, 0) + 1
    return made


@cache
def defined_in(path: Path) -> frozenset[str]:
    """Names that a source file defines at its top, and in classes as `Class.name` and `name`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        for name in _named(node):
            names.add(name)
        if isinstance(node, ast.ClassDef):
            inner = {name for part in node.body for name in _named(part)}
            inner |= {
                part.attr
                for part in ast.walk(node)
                if isinstance(part, ast.Attribute)
                and isinstance(part.ctx, ast.Store)
                and isinstance(part.value, ast.Name)
                and part.value.id == "self"
            }
            names |= inner | {f"{node.name}.{name}" for name in inner}
    return frozenset(names)


def _named(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    for target in targets:
        yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))


@cache
def messages() -> tuple[str, ...]:
    """Every string in the package's sources, what is filled in replaced by one mark."""
    found = []
    for path in (path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
                found.append("".join(parts))
    return tuple(found)
