"""The README against the code: messages that users see, settings, versions, and numbers of the result files."""

import re
import tomllib
from pathlib import Path

import pytest
from documents import ROOT, messages, result, spans_in, table

from vllm_attn_plugin.kernels.dispatch import KERNELS
from vllm_attn_plugin.settings import CACHE_VARIABLE, PREFIX, SettingsError, parse

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
MESSAGES = [spans_in(cell)[0] for cell, _ in table(TEXT, "messages")]
# The peer may be this many times as near to FLASH_ATTN as ours; a row keeps the limit that follows.
LIMIT_FACTOR = 1.5


def occurs(message: str) -> bool:
    """Whether the sources hold a string with the message's fixed parts in order; `…` stands for what is filled in."""
    pattern = re.compile(".*".join(re.escape(part) for part in message.split("…")), re.DOTALL)
    return any(pattern.search(text) for text in messages())


@pytest.mark.parametrize("message", MESSAGES)
def test_message_is_one_that_the_code_says(message: str) -> None:
    assert occurs(message)


def test_a_message_that_the_code_no_longer_says_would_be_noticed() -> None:
    assert not occurs("workspace needs … GiB, but … MiB are free on …")
    assert not occurs("MiB are free on … workspace needs")


def test_settings_are_those_that_are_read() -> None:
    named = {spans_in(cell)[0] for cell, *_ in table(TEXT, "settings")}
    with pytest.raises(SettingsError) as refused:
        parse({f"{PREFIX}MISSPELT": "1"}, ())
    assert named == set(re.findall(rf"{PREFIX}\w+", str(refused.value))) - {f"{PREFIX}MISSPELT"}
    assert CACHE_VARIABLE in named


def test_kernels_that_the_readme_forces_exist() -> None:
    forced = re.findall(rf"{PREFIX}(?:DECODE|PREFILL)_KERNEL=([\w-]+)", TEXT)
    assert forced
    assert set(forced) <= set(KERNELS)


def test_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    gpu = dict(line.split(">=") for line in project["optional-dependencies"]["gpu"])
    for name, version in (
        ("Python", project["requires-python"].removeprefix(">=")),
        ("vLLM", gpu["vllm"]),
        ("FlashInfer, for its kernels on a GPU", gpu["flashinfer-python"]),
    ):
        assert f"| {name} | {version} or newer" in TEXT


def test_logprobs_are_those_of_the_result_file() -> None:
    rows = result("nvidia-h200/logprobs.json")["rows"]
    written = re.findall(r"^  \| ([^|]+) \| ([\d.e-]+, [\d.e-]+) \| ([\d.e-]+, [\d.e-]+)", TEXT, re.MULTILINE)
    assert len(written) == len(rows)
    pairs = {(ours, peer) for _, ours, peer in written}
    for row in rows:
        ours = f"{row['mean']:.3g}, {row['largest']:.3g}"
        peer = f"{row['mean_limit'] / LIMIT_FACTOR:.3g}, {row['largest_limit'] / LIMIT_FACTOR:.3g}"
        assert (ours, peer) in pairs, row["case"]


def test_throughput_is_that_of_the_result_file() -> None:
    ratio = result("cpu-amd-epyc/throughput.json")["ratio_of_medians"]
    assert f"CUSTOM reaches {ratio:.2f} of CPU_ATTN's throughput" in TEXT


def test_every_document_is_reached_from_the_readme() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        assert f"](docs/{page.name})" in TEXT, page.name


def test_picture_is_one_that_a_code_host_shows() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+\.svg)\)", TEXT)
    assert pictures == ["docs/images/batch.svg"]
    drawing = Path(ROOT / pictures[0]).read_text(encoding="utf-8")
    # Scripts, styles from elsewhere and embedded pages are taken out or refused there.
    assert not re.search(r"<script|<foreignObject|href=|@import", drawing)
