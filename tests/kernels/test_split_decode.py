"""The split decode kernel around its device code: what it refuses, plans and reserves, and what it is compiled to."""

import re
import subprocess
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_specs import SPECS
from paged_cases import make_case, make_layer

from vllm_attn_plugin.kernels import EngineParams, LayerParams, Phase, Shelf
from vllm_attn_plugin.kernels.dispatch import KERNELS, choose
from vllm_attn_plugin.kernels.split_decode import SplitDecodeKernel
from vllm_attn_plugin.kernels.split_tiles import (
    ARRIVAL_BYTES,
    DecodeShape,
    DecodeStep,
    Tiles,
    block_rows,
    check_residency,
    choose_tiles,
    cut_memory,
    most_rows,
    workspace_bytes,
)
from vllm_attn_plugin.kernels.tuning import Table, Timing, write_table

FP16, BF16, E4M3, E5M2 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
CPU = torch.device("cpu")
LAYER = make_layer(num_qo_heads=32, num_kv_heads=8, head_dim=128, dtype=BF16)
ENGINE = EngineParams(
    device=CPU,
    page_size=64,
    max_batch_size=4,
    max_num_tokens=64,
    max_seq_len=4096,
    compute_capability=(9, 0),
    num_sms=132,
)
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@needs_triton
@pytest.mark.parametrize(
    ("layer", "engine"),
    [
        (LAYER, ENGINE),
        (replace(LAYER, kv_dtype=E4M3), ENGINE),
        (replace(LAYER, kv_dtype=E5M2, window_left=127, has_sinks=True, logits_soft_cap=30.0), ENGINE),
        (LAYER, replace(ENGINE, compute_capability=(8, 0), page_size=16)),
        (replace(LAYER, kv_dtype=E5M2), replace(ENGINE, compute_capability=(8, 0))),
        (replace(LAYER, kv_dtype=E4M3), replace(ENGINE, compute_capability=(8, 9))),
        (LAYER, replace(ENGINE, max_decode_q_len=8)),
        (LAYER, replace(ENGINE, compute_capability=(12, 0))),
    ],
)
def test_serves(layer: LayerParams, engine: EngineParams) -> None:
    assert SplitDecodeKernel.reasons_against(Phase.DECODE, layer, engine) == []


@pytest.mark.parametrize(
    ("layer", "engine", "reason"),
    [
        (LAYER, replace(ENGINE, compute_capability=(7, 5)), "it needs SM80 or newer, this is an SM75 GPU"),
        (LAYER, replace(ENGINE, compute_capability=None), "it needs SM80 or newer, this is a CPU"),
        (
            replace(LAYER, kv_dtype=E4M3),
            replace(ENGINE, compute_capability=(8, 6)),
            "an fp8 e4m3 cache needs SM89 or newer, this is an SM86 GPU",
        ),
        (replace(LAYER, head_dim=512), ENGINE, "head_dim 512 is above 256"),
        (LAYER, replace(ENGINE, page_size=8), "page size 8 is none that it reads, multiples of 16"),
        (replace(LAYER, has_alibi=True), ENGINE, "it has no ALiBi slopes, this layer has"),
        (replace(LAYER, q_dtype=torch.float32), ENGINE, "query dtype torch.float32 is none of float16, bfloat16"),
        (
            replace(LAYER, kv_dtype=FP16),
            ENGINE,
            "KV cache dtype torch.float16 is none of bfloat16, float8_e4m3fn, float8_e5m2",
        ),
        (
            replace(LAYER, num_kv_heads=1),
            replace(ENGINE, max_decode_q_len=5),
            "32 query heads a KV head and queries of 5 tokens make 160 rows, head_dim 128 allows 128",
        ),
        (
            replace(LAYER, num_kv_heads=2, head_dim=256),
            replace(ENGINE, max_decode_q_len=5),
            "16 query heads a KV head and queries of 5 tokens make 80 rows, head_dim 256 allows 64",
        ),
    ],
)
def test_refuses(layer: LayerParams, engine: EngineParams, reason: str) -> None:
    assert reason in SplitDecodeKernel.reasons_against(Phase.DECODE, layer, engine)


def test_refuses_prefill() -> None:
    assert SplitDecodeKernel.reasons_against(Phase.PREFILL, LAYER, ENGINE) == ["it only decodes"]


@needs_triton
def test_can_be_forced() -> None:
    choice = choose(Phase.DECODE, LAYER, ENGINE, forced="triton-decode")
    assert list(choice.kernels) == [SplitDecodeKernel] == [KERNELS["triton-decode"]]


def test_plan_is_the_batch_s_own_tensors() -> None:
    case = make_case(SPECS["spec_decode_ragged"], make_layer(dtype=FP16))
    kernel = SplitDecodeKernel(Phase.DECODE, case.layer, replace(case.engine(), num_sms=4, max_decode_q_len=8))
    batch = case.batch()
    plan = kernel.plan(batch)
    assert plan.seq_lens is batch.seq_lens
    assert plan.qo_indptr is batch.qo_indptr
    assert plan.block_tables is batch.block_tables
    assert (plan.num_rows, plan.q_len, plan.causal) == (18, 8, True)


def test_memory_holds_two_parts_of_every_program() -> None:
    buffer = torch.zeros(workspace_bytes(264, 32, 96), dtype=torch.uint8)
    memory = cut_memory(buffer, 264, 32)
    assert memory.arrivals.numel() * 4 == ARRIVAL_BYTES
    assert memory.part_stats.numel() == 2 * 264 * 32 * 2
    assert memory.parts.numel() == 2 * 264 * 32 * 128


def test_arrivals_are_watched() -> None:
    kernel = SplitDecodeKernel(Phase.DECODE, LAYER, ENGINE)
    (arrivals,) = kernel.zeroed_memory().values()
    assert arrivals.dtype == torch.uint8
    assert arrivals.numel() == ARRIVAL_BYTES


@pytest.mark.parametrize(("group", "q_len", "rows"), [(1, 1, 16), (4, 4, 16), (7, 3, 32), (8, 8, 64), (16, 8, 128)])
def test_rows(group: int, q_len: int, rows: int) -> None:
    assert block_rows(group, q_len) == rows


# What a program may have of a multiprocessor's shared memory, in bytes.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 120: 99 * 1024}


@dataclass(frozen=True)
class Target:
    """A GPU and a layer to compile for."""

    capability: int
    kv_dtype: torch.dtype = BF16
    head_dim: int = 128
    group: int = 4
    q_len: int = 1
    page_size: int = 64
    is_dependent: bool = False
    writes_kv: bool = False


@dataclass(frozen=True)
class HopperGpu:
    """What torch says of an H200."""

    name: str = "NVIDIA H200"
    shared_memory_per_multiprocessor: int = 228 * 1024
    regs_per_multiprocessor: int = 65536


TARGETS = [
    Target(90),
    Target(90, group=16),
    Target(90, writes_kv=True),
    Target(90, kv_dtype=E4M3, is_dependent=True),
    Target(80, page_size=16),
    Target(90, head_dim=256, group=2),
]


def compiled(target: Target) -> tuple[Any, Tiles]:
    """The kernel as it is compiled for a target, and its tiles."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vllm_attn_plugin.kernels import split_decode_launch as device

    layer = make_layer(
        num_qo_heads=8 * target.group, num_kv_heads=8, head_dim=target.head_dim, dtype=BF16, kv_dtype=target.kv_dtype
    )
    rows = block_rows(target.group, target.q_len)
    capability = divmod(target.capability, 10)
    tiles = replace(choose_tiles(layer, rows, capability), is_dependent=target.is_dependent)
    step = DecodeStep(torch.zeros(8), torch.zeros(9), torch.zeros(8, 1), 8, target.q_len, causal=True)
    absent = dict.fromkeys(("lse", "sinks", *(() if target.writes_kv else ("new_k", "new_v", "slot_mapping"))))
    constants = {**device.constants(DecodeShape(layer, tiles, 264), step, target.page_size), **absent}
    is_fp8 = target.kv_dtype != BF16
    pointers = {
        **dict.fromkeys(("k_pages", "v_pages"), "*i16" if is_fp8 else "*bf16"),
        "q": "*i32" if is_fp8 else "*bf16",
        **dict.fromkeys(("out", "new_k", "new_v"), "*bf16"),
        "slot_mapping": "*i64",
        **dict.fromkeys(("seq_lens", "qo_indptr", "block_tables", "arrivals"), "*i32"),
        **dict.fromkeys(("parts", "part_stats"), "*fp32"),
    }
    numbers = {
        **dict.fromkeys(("scale", "soft_cap", "v_scale"), "fp32"),
        **dict.fromkeys(("new_k_start", "new_v_start"), "i64"),
    }
    names = device.split_decode_kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else pointers.get(name) or numbers.get(name, "i32") for name in names
    }
    aligned = [
        (place,)
        for place, name in enumerate(names)
        if name in pointers or name.startswith("new_") or (name.endswith("_stride") and name != "lse_row_stride")
    ]
    source = ASTSource(
        device.split_decode_kernel, signature, constants, {place: [["tt.divisibility", 16]] for place in aligned}
    )
    # Shared memory is for the loop's turns; what else is compiled takes Triton's defaults.
    gpu = GPUTarget("cuda", target.capability, 32)
    return triton.compile(source, target=gpu, options=device.options(tiles)), tiles


def disassembled(kernel: Any, binary: Path) -> str:
    """The machine instructions of a compiled kernel."""
    import triton

    binary.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(binary)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def check_compiled(target: Target, folder: Path) -> None:
    """No register spilled in the loop, shared memory that is there, keys and values copied asynchronously by 16 bytes.

    What is needed again behind the loop alone may be spilled before it.
    """
    kernel, tiles = compiled(target)
    assert kernel.metadata.shared <= SHARED_BYTES[target.capability]
    assert tiles.shares_merging == (target.capability == 90)
    if tiles.shares_merging:
        check_residency(tiles, kernel.metadata.shared, HopperGpu())
    instructions = disassembled(kernel, folder / "kernel.cubin")
    loop = instructions[instructions.index("HMMA") : instructions.rindex("HMMA")]
    assert not re.findall(r"\b(?:LDL|STL)\b.*", loop), "registers are spilled"
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (0x\w+)", kernel.asm["ptx"])
    assert copies.count("0x10") >= 20
    # Four bytes at a time come maxima and denominators of parts, which are few.
    assert set(copies) <= {"0x10", "0x4"}
    if not target.writes_kv:  # of a row of new keys each thread has a number or two
        assert not re.search(r"ld\.global\S*\.[bu](8|16)\b", kernel.asm["ptx"])
    assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == target.is_dependent


@pytest.mark.parametrize(("kilobytes", "num_warps", "message"), [(114, 4, "shared memory"), (40, 8, "registers")])
def test_programs_that_would_wait_for_ever_are_refused(kilobytes: int, num_warps: int, message: str) -> None:
    tiles = Tiles(block_n=64, num_warps=num_warps, num_stages=3, programs_per_sm=2, shares_merging=True)
    with pytest.raises(RuntimeError, match=f"2 programs of .* {message} .* H200.*VLLM_ATTN_PLUGIN_DECODE_KERNEL"):
        check_residency(tiles, kilobytes * 1024, HopperGpu())


@needs_triton
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_compiles_without_spilling(target: Target, tmp_path: Path) -> None:
    check_compiled(target, tmp_path)


@pytest.mark.parametrize(("head_dim", "limit"), [(64, 128), (128, 128), (192, 64), (256, 64)])
def test_most_rows(head_dim: int, limit: int) -> None:
    assert most_rows(head_dim) == limit


def measured(tmp_path: Path, layer: LayerParams, microseconds: dict[str, float]) -> EngineParams:
    """An SM90 engine with a table of one point."""
    engine = replace(ENGINE, tables=Shelf("a GPU", "0.7.2", (tmp_path,)))
    configuration = engine.configuration(layer)
    write_table(Table("a GPU", "0.7.2", configuration, (Timing(4, 4096, microseconds),), "a table"), tmp_path, {})
    return engine


@needs_triton
def test_tables_say_where_it_serves_as_of_any_other(tmp_path: Path) -> None:
    slower = measured(tmp_path / "slower", LAYER, {"xqa": 10.0, "flashinfer-fa2": 11.0, "triton-decode": 12.0})
    assert str(choose(Phase.DECODE, LAYER, slower)) == "xqa"
    faster = measured(tmp_path / "faster", LAYER, {"xqa": 10.0, "flashinfer-fa2": 11.0, "triton-decode": 9.0})
    assert str(choose(Phase.DECODE, LAYER, faster)) == "triton-decode"
