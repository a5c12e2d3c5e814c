"""The plot command: which charts it draws of which result, what stands on them, and what it refuses."""

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_attn_plugin import plot
from vllm_attn_plugin.__main__ import main


def backend(*rounds: float, error: str = "") -> dict[str, Any]:
    return {
        "rounds": list(rounds),
        "output_tokens_per_s": sorted(rounds)[len(rounds) // 2] if rounds else None,
        "error": error,
    }


def serve_row(name: str, group: str, ratio: float | None = 1.1, best: str = "FLASH_ATTN") -> dict[str, Any]:
    backends = {
        "TRITON_ATTN": backend(70, 80, 90),
        "FLASH_ATTN": backend(99, 100, 101),
        "FLASHINFER": backend(error="refused"),
        "CUSTOM": backend(109, 110, 113),
    }
    return {"row": name, "group": group, "best_peer": best, "ratio": ratio, "backends": backends}


SERVE = {
    "gpu": "NVIDIA H200",
    "model": "llama-3-8b",
    "dtype": "bfloat16",
    "rows": [
        serve_row("1x512+128", "auto"),
        serve_row("8x2048+256", "auto"),
        serve_row("1x512+128:fp8", "fp8"),
        serve_row("32x2048+256:ngram3", "auto:ngram3", ratio=None, best=""),
    ],
}


def kernel_row(kernel: str, batch_size: int, seq_len: int, gbps: float, kv_dtype: str = "bfloat16") -> dict[str, Any]:
    place = {"phase": "decode", "page_size": 16, "heads": "32/8", "head_dim": 128, "kv_dtype": kv_dtype}
    shape = {"batch_size": batch_size, "seq_len": seq_len, "layer_us": 9.0, "spread_us": 0.1, "gbps": gbps}
    return {"kernel": kernel, **place, **shape}


KERNELS = {
    "gpu": "NVIDIA H200",
    "read_bandwidth_gbps": 4470.4,
    "rows": [
        kernel_row("xqa", 1, 1024, 400),
        kernel_row("xqa", 8, 128, 200),
        kernel_row("xqa", 64, 8192, 4000),
        kernel_row("fa3", 64, 8192, 4200),
        kernel_row("xqa", 64, 8192, 3900, "float8_e4m3fn"),
    ],
}


def build_row(
    backend: str, over: str, batch_size: int, seq_len: int, build_us: float | None, step: str = "decode"
) -> dict[str, Any]:
    place = {"backend": backend, "kv_dtype": "auto", "step": step, "over": over}
    times = {"build_us": build_us, "p99_us": None if build_us is None else build_us + 10}
    return {**place, "batch_size": batch_size, "seq_len": seq_len, **times}


BUILD = {
    "gpu": "NVIDIA H200",
    "rows": [
        *(build_row("CUSTOM", "batch", batch_size, 2048, 30 + batch_size / 8) for batch_size in (1024, 1)),
        *(build_row("CUSTOM", "length", 64, seq_len, 38) for seq_len in (128, 32768)),
        *(build_row("TRITON_ATTN", "batch", batch_size, 2048, 90) for batch_size in (1, 1024)),
        build_row("FLASHINFER", "batch", 1, 2048, None),
        build_row("CUSTOM", "batch", 1, 2048, 70, step="mixed"),
    ],
}


def figures(document: dict[str, Any]) -> dict[str, Any]:
    return plot.figures_of(document, Path("result.json"))


def legend(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_bars_are_each_backends_part_of_the_best_peer() -> None:
    found = figures(SERVE)
    # The row with drafts is not whole yet.
    assert list(found) == ["auto", "fp8"]
    axes = found["auto"].axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1x512+128", "8x2048+256"]
    assert axes.get_title() == "Output tokens/s over the best peer's: llama-3-8b, bfloat16 KV cache, NVIDIA H200"
    assert "fp8 KV cache" in found["fp8"].axes[0].get_title()
    heights = {}
    for bars in axes.containers:
        if hasattr(bars, "patches"):
            heights[bars.get_label()] = [patch.get_height() for patch in bars.patches]
    assert heights["CUSTOM"] == pytest.approx([1.1, 1.1])
    assert heights["FLASH_ATTN"] == pytest.approx([1.0, 1.0])
    assert heights["TRITON_ATTN"] == pytest.approx([0.8, 0.8])
    assert heights["FLASHINFER"] == []


def test_error_bars_reach_from_the_least_round_to_the_most() -> None:
    axes = figures(SERVE)["fp8"].axes[0]
    ours = next(bars for bars in axes.containers if bars.get_label() == "CUSTOM")
    segment = ours.errorbar.lines[2][0].get_segments()[0]
    assert [end[1] for end in segment] == pytest.approx([1.09, 1.13])


def test_lines_are_kernels_and_the_measured_bandwidth() -> None:
    found = figures(KERNELS)
    assert list(found) == [
        "decode, 32/8 heads of 128, bfloat16 cache, pages of 16",
        "decode, 32/8 heads of 128, float8_e4m3fn cache, pages of 16",
    ]
    axes = found["decode, 32/8 heads of 128, bfloat16 cache, pages of 16"].axes[0]
    assert legend(axes) == ["xqa", "fa3", "read bandwidth, measured: 4470 GB/s"]
    xqa, fa3, bandwidth = axes.get_lines()
    # Two shapes read 1024 tokens: the line goes between them, both are points.
    assert list(zip(*xqa.get_data(), strict=True)) == [(1024, 300), (64 * 8192, 4000)]
    assert axes.collections[0].get_offsets().tolist() == [[1024, 200], [1024, 400], [64 * 8192, 4000]]
    assert list(fa3.get_ydata()) == [4200]
    assert set(bandwidth.get_ydata()) == {4470.4}


def test_build_time_is_drawn_over_the_batch_and_over_the_length_a_line_a_backend() -> None:
    found = figures(BUILD)
    assert list(found) == ["decode auto", "mixed auto"]
    over_batch, over_length = found["decode auto"].axes
    assert found["decode auto"].get_suptitle() == "Host time of build(): decode, auto KV cache, NVIDIA H200"
    # A backend that could not run has no line.
    assert legend(over_batch) == ["CUSTOM", "TRITON_ATTN"]
    assert legend(over_length) == ["CUSTOM"]
    ours, theirs = (container.lines[0] for container in over_batch.containers)
    assert list(zip(*ours.get_data(), strict=True)) == [(1, 30.125), (1024, 158)]
    assert list(theirs.get_ydata()) == [90, 90]
    assert list(over_length.containers[0].lines[0].get_xdata()) == [128, 32768]
    assert {(axes.get_xscale(), axes.get_yscale()) for axes in (over_batch, over_length)} == {("log", "log")}


def test_bars_of_the_build_time_reach_to_the_99th_percentile() -> None:
    bars = figures(BUILD)["decode auto"].axes[1].containers[0].lines[2][0]
    assert [[end[1] for end in segment] for segment in bars.get_segments()] == [[38, 48], [38, 48]]


@pytest.mark.parametrize(
    ("document", "names"),
    [
        (SERVE, ["result-auto.png", "result-fp8.png"]),
        (
            KERNELS,
            [
                "result-decode-32-8-heads-of-128-bfloat16-cache-pages-of-16.png",
                "result-decode-32-8-heads-of-128-float8_e4m3fn-cache-pages-of-16.png",
            ],
        ),
        (BUILD, ["result-decode-auto.png", "result-mixed-auto.png"]),
    ],
)
def test_files_are_png_of_a_size_to_look_at(
    document: dict[str, Any], names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "result.json", tmp_path / "new" / "charts"
    file.write_text(json.dumps(document))
    assert main(["plot", str(file), "--output", str(folder)]) == 0
    assert capsys.readouterr().out.split() == [str(folder / name) for name in names]
    for name in names:
        data = (folder / name).read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", data[16:24])
        assert (width, height) == (1200, 600)
        assert len(data) > 10_000


def test_charts_lie_beside_the_result_unless_told_otherwise(tmp_path: Path) -> None:
    (tmp_path / "build.json").write_text(json.dumps(BUILD))
    assert main(["plot", str(tmp_path / "build.json")]) == 0
    assert (tmp_path / "build-decode-auto.png").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("{", "is no JSON"),
        ("[]", "has no list `rows`"),
        ('{"rows": [{"case": "smollm2"}]}', "have none of the fields backends, layer_us, build_us"),
        (json.dumps({"rows": SERVE["rows"][3:]}), "holds no measured row yet"),
    ],
)
def test_what_is_no_result_is_refused_in_one_sentence(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.json"
    if text is not None:
        file.write_text(text)
    assert main(["plot", str(file)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert str(file) in error
    assert error.count("\n") == 1


def test_missing_matplotlib_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (tmp_path / "build.json").write_text(json.dumps(BUILD))
    assert main(["plot", str(tmp_path / "build.json")]) == 2
    assert capsys.readouterr().err == (
        "error: plot needs matplotlib, which is not installed: pip install 'vllm-attn-plugin[plot]'.\n"
    )
