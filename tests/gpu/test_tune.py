"""Tuning on a GPU: a small grid is measured, its table is found again, and the dispatch follows it."""

from dataclasses import replace
from pathlib import Path

import torch
from paged_cases import make_layer

from vllm_attn_plugin.__main__ import main
from vllm_attn_plugin.kernels import Phase, Shelf, choose, find_toolchain
from vllm_attn_plugin.kernels.timed_batch import decode_point, engine_of
from vllm_attn_plugin.kernels.tuning import Configuration


def test_tuned_table_is_what_the_dispatch_follows(tmp_path: Path) -> None:
    grid = ["--batch-sizes", "1", "16", "--seq-lens", "128", "2048"]
    assert main(["tune", "--heads", "8/2", *grid, "--output", str(tmp_path)]) == 0
    shelf = Shelf(torch.cuda.get_device_name(), find_toolchain().flashinfer_version or "", (tmp_path,))
    configuration = Configuration(8, 2, 128, 16, "bfloat16", "bfloat16", 1)
    table = shelf.find(configuration)
    assert table is not None
    assert {(timing.batch_size, timing.seq_len) for timing in table.timings} == {
        (1, 128),
        (1, 2048),
        (16, 128),
        (16, 2048),
    }
    assert all(0 < us < 1e5 for timing in table.timings for us in timing.microseconds.values())
    layer = make_layer(num_qo_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    engine = replace(engine_of(decode_point(configuration, 16, 2048)), tables=shelf)
    choice = choose(Phase.DECODE, layer, engine)
    assert choice.reason == f"fastest in {table.source}"
    names = list(table.timings[0].microseconds)
    assert [choice.kernels.pick(size).name for size, _ in table.fastest(names, 2048)] == [
        name for _, name in table.fastest(names, 2048)
    ]
