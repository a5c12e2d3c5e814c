"""Docstrings of what other files may call: tensors have shapes, errors are announced."""

import ast
import re
from collections.abc import Iterator

import pytest
from dependencies import sources

TENSORS = re.compile(r"\b(?:Tensor|IntArray|KVPages)\b")
# A shape, a word about it, or another docstring that has it.
SHAPES = re.compile(r"`(?:\w+ )?\[|\bshape\b|\b[Ss]ee ")
ANNOUNCED = re.compile(r"Raises:|\b[Ss]ee `|\braise\b")

Function = tuple[str, ast.FunctionDef, str]


def public_functions() -> Iterator[Function]:
    """Functions and methods that are no file's or class's own affair, with their class's docstring behind theirs."""
    for file, tree in sources():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                about = ast.get_docstring(node) or ""
                yield from ((file, part, about) for part in node.body if is_public(part))
            elif is_public(node):
                yield file, node, ""


def is_public(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and not node.name.startswith("_")


FUNCTIONS = list(public_functions())


def text(function: Function) -> str:
    _, node, about = function
    return f"{ast.get_docstring(node) or ''}\n{about}"


def takes_tensors(node: ast.FunctionDef) -> bool:
    given = [arg.annotation for arg in (*node.args.args, *node.args.kwonlyargs)]
    return any(TENSORS.search(ast.unparse(one)) for one in (*given, node.returns) if one is not None)


def raises(node: ast.FunctionDef) -> bool:
    """Whether it says an error of its own, not one of a function inside."""
    inner = {
        part
        for child in ast.walk(node)
        if isinstance(child, ast.FunctionDef) and child is not node
        for part in ast.walk(child)
    }
    return any(isinstance(part, ast.Raise) and part.exc is not None and part not in inner for part in ast.walk(node))


def named(function: Function) -> str:
    return f"{function[0]}:{function[1].name}"


@pytest.mark.parametrize("function", [f for f in FUNCTIONS if takes_tensors(f[1])], ids=named)
def test_tensors_have_shapes(function: Function) -> None:
    assert SHAPES.search(text(function))


@pytest.mark.parametrize("function", [f for f in FUNCTIONS if raises(f[1])], ids=named)
def test_errors_are_announced(function: Function) -> None:
    assert ANNOUNCED.search(text(function))


def test_there_is_something_to_look_at() -> None:
    assert sum(takes_tensors(node) for _, node, _ in FUNCTIONS) > 50
    assert sum(raises(node) for _, node, _ in FUNCTIONS) > 30
