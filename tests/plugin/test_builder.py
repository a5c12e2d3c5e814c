"""From vLLM's common metadata to a layer's output, through the builder and the impl."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batch_specs import ALL_SPECS, SPECS, BatchSpec
from paged_cases import LAYOUTS, PagedCase, assert_close_to_formula, cache_bytes, make_layer
from vllm.v1.attention.backend import AttentionCGSupport
from vllm_doubles import (
    CPU,
    common_metadata,
    forward,
    make_builder,
    make_case,
    make_config,
    make_layer_double,
    make_spec,
    run_step,
)

from vllm_attn_plugin import builder as builder_module
from vllm_attn_plugin.builder import AttnPluginMetadataBuilder, PlannedPhase, needs_exact_lengths
from vllm_attn_plugin.kernels import BySize, EngineParams, GraphSupport, NoKernelError, Phase, dispatch
from vllm_attn_plugin.kernels.dispatch import Candidate
from vllm_attn_plugin.kernels.reference import ReferenceKernel
from vllm_attn_plugin.kernels.workspace import Workspaces
from vllm_attn_plugin.metadata import BatchError, PagedBatch, PageListBuffers
from vllm_attn_plugin.settings import settings

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_left": 10},
    "everything": {"window_left": 21, "soft_cap": 2.0, "sinks": True, "alibi": True},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("drafts", [None, 3], ids=["no_drafts", "3_drafts"])
@pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.name)
def test_step_equals_the_formula(spec: BatchSpec, drafts: int | None, option: str) -> None:
    case = make_case(spec, make_layer(**OPTIONS[option]))
    out = run_step(case, padding=5, num_speculative_tokens=drafts)
    assert (out[spec.num_tokens :] == 0).all(), "padding of the query must come out as zeros"
    assert_close_to_formula(case, out[: spec.num_tokens])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn, torch.float8_e5m2])
def test_step_in_half_precision_and_fp8(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    layer = make_layer(num_qo_heads=9, num_kv_heads=3, dtype=dtype, kv_dtype=kv_dtype)
    scales = {"k_scale": 0.5, "v_scale": 2.0} if kv_dtype else {}
    case = make_case(SPECS["mixed"], layer, layout="LBNHC", **scales)
    assert_close_to_formula(case, run_step(case))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_writes_new_tokens_where_the_next_step_reads_them(layout: str) -> None:
    """The slots of the new tokens are NaN before the step."""
    case = make_case(SPECS["mixed"], make_layer(), layout=layout)
    full = cache_bytes(case.kv_cache)
    case.kv_cache[case.slot_mapping // 16, :, case.slot_mapping % 16] = float("nan")
    assert cache_bytes(case.kv_cache) != full
    assert_close_to_formula(case, run_step(case))
    assert cache_bytes(case.kv_cache) == full


def test_phases_take_their_own_rows() -> None:
    case = make_case(SPECS["mixed"], make_layer())
    metadata = make_builder(case).build(0, common_metadata(case))
    (plans,) = metadata.plans.values()
    assert plans.decode is not None
    assert plans.prefill is not None
    assert (plans.decode.rows, plans.prefill.rows) == (slice(0, 3), slice(3, 48))
    assert (plans.decode.kernel.phase, plans.prefill.kernel.phase) == (Phase.DECODE, Phase.PREFILL)
    assert isinstance(plans.decode.kernel, ReferenceKernel)
    assert metadata.num_rows == 48


@pytest.mark.parametrize(("spec_name", "absent"), [("decode", "prefill"), ("chunked_prefill", "decode")])
def test_absent_phase_is_none(spec_name: str, absent: str) -> None:
    case = make_case(SPECS[spec_name], make_layer())
    (plans,) = make_builder(case).build(0, common_metadata(case)).plans.values()
    assert getattr(plans, absent) is None


@pytest.mark.parametrize(("drafts", "threshold"), [(None, 1), (1, 2), (7, 8)])
def test_decodes_are_asked_to_come_first(drafts: int | None, threshold: int) -> None:
    assert make_builder(
        make_case(SPECS["decode"], make_layer()), num_speculative_tokens=drafts
    ).reorder_batch_threshold == (threshold)


def test_counts_shorter_than_the_runner_tensors() -> None:
    """The runner's tensors are as long as its largest batch; the counts say what is this step's."""
    case = make_case(SPECS["decode"], make_layer())
    long_indptr = torch.cat([case.qo_indptr, torch.tensor([5, 99], dtype=torch.int32)])
    metadata = make_builder(case).build(
        0,
        common_metadata(
            case,
            query_start_loc_cpu=long_indptr,
            seq_lens=torch.cat([case.seq_lens, torch.tensor([2**30, -1], dtype=torch.int32)]),
            block_table_tensor=torch.cat([case.block_tables, case.block_tables[:2]]),
        ),
    )
    assert_close_to_formula(case, forward(make_layer_double(case), case, metadata))


def test_graph_padding_is_part_of_the_step() -> None:
    """A full graph's step: padded requests repeat the last start, and tokens are padded with slots -1."""
    case = make_case(SPECS["padded_rows"], make_layer())
    layer = make_layer_double(case)
    metadata = make_builder(case, {"layer": layer}).build(0, common_metadata(case, num_actual_tokens=5))
    out = forward(layer, case, metadata, padding=2)
    assert_close_to_formula(case, out[:3])
    assert (out[3:] == 0).all()


def test_non_causal_step() -> None:
    case = make_case(SPECS["chunked_prefill"], make_layer(), causal=False)
    assert_close_to_formula(case, run_step(case))


def test_causal_as_a_tensor_is_refused() -> None:
    case = make_case(SPECS["decode"], make_layer())
    with pytest.raises(
        ValueError, match="cannot mix causal and non-causal requests in one batch; serve this model with"
    ):
        make_builder(case).build(0, common_metadata(case, causal=torch.ones(6, dtype=torch.bool)))


def test_keys_and_values_of_two_widths_are_refused() -> None:
    case = make_case(SPECS["decode"], make_layer())
    layers = {"layer": make_layer_double(case)}
    spec = make_spec(case)
    object.__setattr__(spec, "head_size_v", 32)
    with pytest.raises(ValueError, match="needs keys and values of one head size; this model has 64 and 32"):
        AttnPluginMetadataBuilder(spec, ["layer"], make_config(layers), CPU)


def test_page_past_the_cache_is_named() -> None:
    case = make_case(SPECS["decode"], make_layer())
    case.block_tables[2, 1] = case.num_pages
    with pytest.raises(BatchError, match=rf"request 2 uses page {case.num_pages} \(its page 1\)"):
        make_builder(case).build(0, common_metadata(case))


def test_max_seq_len_of_the_runner_may_exceed_the_engine_limit() -> None:
    case = make_case(SPECS["decode"], make_layer())
    make_builder(case, max_model_len=16).build(0, common_metadata(case))


def test_workspaces_are_told_with_their_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(builder_module.logger, "info_once", lambda text, *values: lines.append(text % values))
    shared = Workspaces(torch.device("cpu"), trtllm=torch.zeros(3 << 20, dtype=torch.uint8))
    monkeypatch.setattr(builder_module, "workspaces", lambda device: shared)
    case = make_case(SPECS["decode"], make_layer())
    make_builder(case)
    shared.native = torch.zeros(5 << 20, dtype=torch.uint8)
    make_builder(case)
    assert [line for line in lines if "workspaces" in line] == [
        "Attention workspaces on cpu: TRT-LLM-gen/XQA 3 MiB.",
        "Attention workspaces on cpu: TRT-LLM-gen/XQA 3 MiB, FlashInfer 5 MiB.",
    ]


@pytest.mark.parametrize("hook", ["build_for_cudagraph_capture", "build_for_drafting"])
def test_other_builds_go_the_same_way(hook: str) -> None:
    case = make_case(SPECS["decode"], make_layer())
    arguments = {"draft_index": 0} if hook == "build_for_drafting" else {}
    metadata = getattr(make_builder(case), hook)(common_metadata(case), **arguments)
    assert_close_to_formula(case, forward(make_layer_double(case), case, metadata))


class SmallKernel(ReferenceKernel):
    name = "small"
    graph_support = GraphSupport.UNIFORM
    reads_page_lists = False


class LargeKernel(ReferenceKernel):
    name = "large"
    graph_support = GraphSupport.SINGLE_TOKEN


@pytest.fixture
def two_decode_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode goes to one kernel for up to 3 requests, to another above."""
    rules = {
        Phase.DECODE: (Candidate(SmallKernel, 3), Candidate(LargeKernel)),
        Phase.PREFILL: (Candidate(ReferenceKernel),),
    }
    monkeypatch.setattr(dispatch, "preference", lambda phase, layer, engine: rules[phase])


def decode_of(builder: AttnPluginMetadataBuilder, case: PagedCase) -> PlannedPhase:
    (plans,) = builder.build(0, common_metadata(case)).plans.values()
    assert plans.decode is not None
    return plans.decode


def decodes(size: int, padded: int = 0) -> PagedCase:
    spec = BatchSpec(
        f"decode_{size}", (1,) * size + (0,) * padded, tuple(20 + row for row in range(size)) + (0,) * padded
    )
    return make_case(spec, make_layer())


@pytest.mark.usefixtures("two_decode_kernels")
@pytest.mark.parametrize(
    ("size", "padded", "kernel"), [(1, 0, "small"), (3, 0, "small"), (4, 0, "large"), (2, 1, "small"), (2, 2, "large")]
)
def test_padded_size_of_the_batch_picks_the_decode_kernel(size: int, padded: int, kernel: str) -> None:
    case = decodes(size, padded)
    assert decode_of(make_builder(case), case).kernel.name == kernel


@pytest.mark.usefixtures("two_decode_kernels")
@pytest.mark.parametrize("rows", range(1, 9))
def test_captured_step_and_its_replays_have_one_kernel(rows: int) -> None:
    layer = make_layer_double(decodes(1))
    builder = make_builder(decodes(1), {"layer": layer})
    kernels = set()
    for real in range(1, rows + 1):
        case = decodes(real, padded=rows - real)
        layer.kv_cache = case.kv_cache
        kernels.add(decode_of(builder, case).kernel)
    (captured,) = builder.build_for_cudagraph_capture(common_metadata(case)).plans.values()
    assert captured.decode is not None
    assert kernels == {captured.decode.kernel}


@pytest.mark.usefixtures("two_decode_kernels")
def test_each_kernel_is_set_up_once_and_steps_of_both_equal_the_formula() -> None:
    layer = make_layer_double(decodes(1))
    builder = make_builder(decodes(1), {"layer": layer})
    picked = set()
    for size in (2, 3, 4, 6, 2):
        case = decodes(size)
        layer.kv_cache = case.kv_cache
        picked.add(id(decode_of(builder, case).kernel))
        assert_close_to_formula(case, forward(layer, case, builder.build(0, common_metadata(case))))
    assert len(picked) == 2


@pytest.mark.usefixtures("two_decode_kernels")
def test_decodes_of_a_mixed_step_are_counted_alone() -> None:
    case = make_case(BatchSpec("mixed", (1, 1, 9, 9), (20, 30, 9, 40)), make_layer())
    assert decode_of(make_builder(case), case).kernel.name == "small"


class MixingKernel(ReferenceKernel):
    name = "mixing"
    serves_mixed = True


@pytest.mark.parametrize(
    ("decode_kernel", "kv_dtype", "goes_in_one"),
    [
        (MixingKernel, None, True),
        (SmallKernel, None, True),
        (MixingKernel, torch.float8_e4m3fn, True),
        # One of the two may round the query to the cache's dtype.
        (SmallKernel, torch.float8_e4m3fn, False),
    ],
)
@pytest.mark.parametrize(("q_lens", "is_mixed"), [((1, 1, 9, 9), True), ((1, 9, 1), True), ((1, 1), False)])
def test_mixed_step_goes_in_one_call_where_the_prefill_kernel_answers_decodes_alike(
    q_lens: tuple[int, ...],
    is_mixed: bool,
    decode_kernel: type[ReferenceKernel],
    kv_dtype: torch.dtype | None,
    goes_in_one: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules = {Phase.DECODE: (Candidate(decode_kernel),), Phase.PREFILL: (Candidate(MixingKernel),)}
    monkeypatch.setattr(dispatch, "preference", lambda phase, layer, engine: rules[phase])
    spec = BatchSpec("step", q_lens, tuple(20 + q_len for q_len in q_lens))
    case = make_case(spec, make_layer(kv_dtype=kv_dtype))
    layer = make_layer_double(case)
    metadata = make_builder(case, {"layer": layer}).build(0, common_metadata(case))
    (plans,) = metadata.plans.values()
    assert (plans.decode is None) == (is_mixed and goes_in_one)
    assert (plans.prefill is None) != is_mixed
    assert_close_to_formula(case, forward(layer, case, metadata))


@pytest.mark.usefixtures("two_decode_kernels")
def test_graph_support_is_the_least_of_the_kernels_that_can_be_picked() -> None:
    case = decodes(1)
    support = AttnPluginMetadataBuilder.get_cudagraph_support
    layers = {"layer": make_layer_double(case)}
    device = {"device_config": SimpleNamespace(device_type="cpu")}
    both = SimpleNamespace(**vars(make_config(layers)), **device)
    assert support(both, make_spec(case)) == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    only_small = SimpleNamespace(**vars(make_config(layers, max_num_seqs=3)), **device)
    assert support(only_small, make_spec(case)) == AttentionCGSupport.UNIFORM_BATCH


@pytest.mark.usefixtures("two_decode_kernels")
@pytest.mark.parametrize(("size", "is_listed"), [(3, False), (4, True)])
def test_page_lists_are_made_only_for_a_kernel_that_reads_them(
    size: int, is_listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = decodes(size)
    builder = make_builder(case)
    buffers = PageListBuffers(256, 8, CPU)
    monkeypatch.setattr(builder, "_page_lists", {(Phase.DECODE, -1): buffers})
    listed = []
    monkeypatch.setattr(PagedBatch, "list_on_device", lambda batch, into: listed.append(into) or batch)
    builder.build(0, common_metadata(case))
    assert listed == ([buffers] if is_listed else [])


@pytest.mark.usefixtures("two_decode_kernels")
def test_log_names_the_kernels_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(builder_module.logger, "info_once", lambda text, *values: lines.append(text % values))
    make_builder(decodes(1))
    assert [line for line in lines if "kernels" in line] == [
        "Attention kernels: prefill=reference, decode=small up to 3 requests, large above "
        "(first choices on a CPU that can serve it)."
    ]


@pytest.mark.parametrize("is_exact", [True, False])
def test_lengths_are_fetched_from_the_device_only_for_a_plan_that_needs_them(
    is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = decodes(3)
    builder = make_builder(case)
    assert builder._needs_exact_lengths, "the host is the device"
    monkeypatch.setattr(builder, "_needs_exact_lengths", is_exact)
    bound = case.seq_lens + 3
    found = builder._host_lengths(common_metadata(case, seq_lens_cpu_upper_bound=bound))
    assert torch.equal(found, case.seq_lens if is_exact else bound)


def test_one_kernel_that_waits_makes_every_step_wait() -> None:
    class WaitingKernel(ReferenceKernel):
        @classmethod
        def waits_for_lengths(cls, phase: Phase, engine: EngineParams) -> bool:
            return phase is Phase.DECODE and engine.max_decode_q_len > 1

    case = decodes(1)
    quick, waiting = (kernel(Phase.DECODE, case.layer, case.engine()) for kernel in (ReferenceKernel, WaitingKernel))
    layers = [{Phase.DECODE: BySize((quick,))}, {Phase.DECODE: BySize((quick, waiting), (8,))}]
    drafting = replace(case.engine(), max_decode_q_len=4)
    assert needs_exact_lengths(layers, drafting)
    assert not needs_exact_lengths(layers[:1], drafting)
    assert not needs_exact_lengths(layers, case.engine())
    assert not needs_exact_lengths([{Phase.PREFILL: BySize((waiting,))}], drafting)


def test_use_trtllm_attention_of_the_engine_reaches_the_dispatch() -> None:
    with pytest.raises(NoKernelError, match="use_trtllm_attention=True asks for a TensorRT-LLM decode kernel"):
        make_builder(decodes(1), use_trtllm_attention=True)
    make_builder(decodes(1), use_trtllm_attention=False)


@pytest.mark.parametrize("phase", ["PREFILL", "DECODE"])
def test_kernel_that_the_settings_force_is_the_one_chosen(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherKernel(ReferenceKernel):
        name = "other"

    monkeypatch.setitem(dispatch.KERNELS, "other", OtherKernel)
    monkeypatch.setenv(f"VLLM_ATTN_PLUGIN_{phase}_KERNEL", "other")
    settings.cache_clear()
    case = make_case(SPECS["mixed"], make_layer())
    (plans,) = make_builder(case).build(0, common_metadata(case)).plans.values()
    kernels = {"DECODE": plans.decode, "PREFILL": plans.prefill}
    assert {name for name, planned in kernels.items() if planned and isinstance(planned.kernel, OtherKernel)} == {phase}
