"""Every document: its links lead somewhere, and the files and names that it speaks of exist."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from documents import A_PATH, LINK, PAGES, PLACE, ROOT, anchors, defined_in, relative, spans_in, without_blocks

TEXTS = {relative(page): page.read_text(encoding="utf-8") for page in PAGES}


def links() -> list[tuple[str, str]]:
    return [(page, target) for page, text in TEXTS.items() for _, target in LINK.findall(without_blocks(text))]


def places() -> list[tuple[str, str, str]]:
    """A page, a source file that it links, and a name that stands behind the link."""
    return [
        (page, target, name)
        for page, text in TEXTS.items()
        for target, names in PLACE.findall(without_blocks(text))
        for name in spans_in(names)
    ]


@pytest.mark.parametrize(("page", "target"), sorted(set(links())))
def test_link_leads_somewhere(page: str, target: str) -> None:
    if re.match(r"https?://", target):
        return  # nothing here asks the network
    path, _, anchor = target.partition("#")
    file = (ROOT / page).parent / path if path else ROOT / page
    assert file.exists(), f"{page} links {target}"
    if anchor:
        assert anchor in anchors(file.read_text(encoding="utf-8")), f"{page} links {target}"


@pytest.mark.parametrize(("page", "target", "name"), sorted(set(places())))
def test_name_behind_a_link_is_in_the_file(page: str, target: str, name: str) -> None:
    file = ((ROOT / page).parent / target).resolve()
    assert name in defined_in(file), f"{page}: {relative(file)} has no {name}"


@pytest.mark.parametrize("page", TEXTS)
def test_path_in_code_exists(page: str) -> None:
    for span in spans_in(without_blocks(TEXTS[page])):
        if A_PATH.fullmatch(span) and not span.startswith("ci/results/MACHINE"):
            assert (ROOT / span).exists(), f"{page} speaks of {span}"


@pytest.mark.parametrize("page", TEXTS)
def test_command_exists(page: str) -> None:
    for module in re.findall(r"\bpython3? -m ([\w.]+)", TEXTS[page]):
        assert find_spec(module) is not None, f"{page} runs {module}"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    said = re.findall(r"(?:^    |`)(?:[A-Z]+=\S+ )*make ([a-z-]+)", TEXTS[page], re.MULTILINE)
    assert set(said) <= targets, f"{page} runs make {set(said) - targets}"


@pytest.mark.parametrize("page", TEXTS)
def test_table_has_as_many_cells_in_every_row(page: str) -> None:
    for block in re.findall(r"(?:^\|.*\n)+", TEXTS[page], re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line))) for line in block.splitlines()}
        assert len(widths) == 1, f"{page}: {block.splitlines()[0]}"


def test_documents_name_many_places() -> None:
    """The pattern that finds them would find nothing if their form changed."""
    named = {page for page, _, _ in places()}
    assert {"docs/architecture.md", "docs/metadata.md"} <= named
    assert len(places()) > 60


def test_anchors_are_those_of_a_code_host(tmp_path: Path) -> None:
    text = "# One `mixed` batch\n\n## Padding, in a graph\n\n## 1. Found again, or planned\n\n## Twice\n\n## Twice\n"
    assert anchors(text) == {
        "one-mixed-batch",
        "padding-in-a-graph",
        "1-found-again-or-planned",
        "twice",
        "twice-1",
    }


def test_a_name_that_does_not_exist_would_be_noticed() -> None:
    names = defined_in(ROOT / "vllm_attn_plugin" / "builder.py")
    assert {"set_up_kernels", "AttnPluginMetadataBuilder.build", "AttnPluginMetadataBuilder._page_lists"} <= names
    assert "AttnPluginMetadataBuilder.plan" not in names
