"""What every keyword of FlashInfer's TRT-LLM-gen calls must be, given what our kernel was given."""

from typing import Any

import contract
import pytest
import torch
from contract import FP8, Step
from raw_memory import dense_strides
from trtllm_double import NUM_SMS, Call

from vllm_attn_plugin.kernels import NVFP4, Phase
from vllm_attn_plugin.kernels.workspace import COUNTER_BYTES, trtllm_bytes, workspaces

CPU = torch.device("cpu")


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype


def check_query(value: torch.Tensor, step: Step, raw: Call) -> None:
    assert raw.query is value
    assert value.dtype == step.case.layer.q_dtype
    assert value.stride() == dense_strides(value.shape)
    rows = step.case.spec.num_tokens
    assert torch.equal(contract.as_bytes(value), contract.as_bytes(step.q[:rows]))


def check_kv_cache(value: Any, step: Step, raw: Call) -> None:
    assert type(value) is tuple
    pages = contract.pages_of(step.case)
    for given, expected, arrived in zip(value, pages, (raw.key_cache, raw.value_cache), strict=True):
        assert same_memory(given, expected), "the cache was copied"
        assert same_memory(arrived, given)
        assert arrived.stride() == given.stride()


def check_kv_cache_sf(value: Any, step: Step, raw: Call) -> None:
    if step.case.layer.kv_dtype != NVFP4:
        assert value is None
        assert raw.key_block_scales is None
        assert raw.value_block_scales is None
        return
    for given, arrived in zip(value, (raw.key_block_scales, raw.value_block_scales), strict=True):
        assert same_memory(given, arrived)
        assert given.untyped_storage().data_ptr() == step.case.kv_cache.untyped_storage().data_ptr()


def check_workspace(value: torch.Tensor, step: Step, raw: Call) -> None:
    whole = workspaces(CPU).trtllm
    assert whole is not None
    assert value.data_ptr() == whole.data_ptr() + COUNTER_BYTES, "scratch would lie on XQA's counters"
    assert raw.workspace_buffer is value
    assert raw.workspace_size == value.numel() == whole.numel() - COUNTER_BYTES
    longest = step.engine.max_num_tokens if step.phase is Phase.PREFILL else step.engine.max_decode_q_len
    assert whole.numel() >= trtllm_bytes(step.case.layer, step.engine, longest)
    assert not whole[:COUNTER_BYTES].any()


def check_counters(value: torch.Tensor, step: Step, raw: Call) -> None:
    assert value is workspaces(CPU).multi_ctas_counters
    assert raw.multi_ctas_kv_counter_buffer is value
    assert value.numel() >= 4 * max(step.engine.max_batch_size * step.case.layer.num_qo_heads, NUM_SMS)


def check_block_tables(value: torch.Tensor, step: Step, raw: Call) -> None:
    assert raw.block_tables is value
    assert torch.equal(value, step.case.block_tables)


def check_seq_lens(value: torch.Tensor, step: Step, raw: Call) -> None:
    assert raw.seq_lens is value
    assert torch.equal(value, step.case.seq_lens)


def check_max_seq_len(value: int, step: Step, raw: Call) -> None:
    assert raw.max_kv_len == value == step.engine.max_seq_len >= max(step.case.spec.seq_lens)


def check_bmm1_scale(value: float, step: Step, raw: Call) -> None:
    layer = step.case.layer
    expected = layer.sm_scale
    if layer.q_dtype == FP8:
        expected *= step.inputs.q_scale
    if layer.kv_dtype in (FP8, NVFP4):
        expected *= step.inputs.k_scale
    assert raw.bmm1_scale == value == pytest.approx(expected, rel=1e-12)


def check_bmm2_scale(value: float, step: Step, raw: Call) -> None:
    expected = step.inputs.v_scale if step.case.layer.kv_dtype in (FP8, NVFP4) else 1.0
    if step.out.dtype == FP8:
        expected /= step.inputs.o_scale
    assert raw.bmm2_scale == value == pytest.approx(expected, rel=1e-12)


def check_window(value: int, step: Step, raw: Call) -> None:
    assert raw.window_left == value == step.case.layer.window_left


def check_out(value: Any, step: Step, raw: Call) -> None:
    rows = step.case.spec.num_tokens
    if step.out.dtype == torch.uint8:
        assert same_memory(value.data, step.out[:rows])
        assert same_memory(raw.out, value.data)
        assert raw.out_scale_factor is value.scale is step.inputs.o_block_scales
        assert raw.o_sf_start_index == value.scale_start_index == step.inputs.o_first_row
        return
    assert raw.out is value
    assert raw.out_scale_factor is None
    if step.case.layer.kv_dtype == NVFP4 and step.out.dtype != FP8:
        staging = workspaces(CPU).fp8_output
        assert staging is not None
        assert value.data_ptr() == staging.data_ptr()
    else:
        assert same_memory(value, step.out[:rows])


def check_o_sf_scale(value: float | None, step: Step, raw: Call) -> None:
    is_fp4 = step.out.dtype == torch.uint8
    assert value == (step.inputs.o_scale if is_fp4 else None)
    assert raw.o_sf_scale == (step.inputs.o_scale if is_fp4 else -1.0)


def check_o_sf_vec_size(value: int | None, step: Step, raw: Call) -> None:
    assert value == (16 if step.out.dtype == torch.uint8 else None)
    assert raw.o_sf_vec_size == (value or -1)


def check_sinks(value: torch.Tensor | None, step: Step, raw: Call) -> None:
    assert value is raw.attention_sinks is step.case.inputs.sinks
    assert (value is None) == (not step.case.layer.has_sinks)


def check_layout(value: str, step: Step, raw: Call) -> None:
    # With NHD the pages would be transposed on the way: see that they were not.
    assert value == "HND"
    assert raw.key_cache.shape[1:3] == (step.case.layer.num_kv_heads, step.case.page_size)


def check_backend(value: str, step: Step, raw: Call) -> None:
    assert value == "trtllm-gen"


def check_lse(value: torch.Tensor | None, step: Step, raw: Call) -> None:
    assert value is raw.lse
    if step.lse is not None:
        assert value is not None
        assert same_memory(value, step.lse[: step.case.spec.num_tokens])


def query_lengths(step: Step) -> tuple[int, bool]:
    lens = set(step.case.spec.q_lens)
    return max(lens), len(lens) == 1


def check_q_len_per_req(value: int | None, step: Step, raw: Call) -> None:
    longest, is_uniform = query_lengths(step)
    assert value == (longest if is_uniform else None)
    assert raw.max_q_len == longest
    assert raw.batch_size == len(step.case.spec.q_lens)


def check_decode_max_q_len(value: int | None, step: Step, raw: Call) -> None:
    longest, is_uniform = query_lengths(step)
    assert value == (None if is_uniform else longest)


def check_decode_cum_seq_lens_q(value: torch.Tensor | None, step: Step, raw: Call) -> None:
    assert raw.cum_seq_lens_q is value
    if query_lengths(step)[1]:
        assert value is None
    else:
        assert value is not None
        assert torch.equal(value, step.case.qo_indptr)


def check_context_max_q_len(value: int, step: Step, raw: Call) -> None:
    assert raw.max_q_len == value == max(step.case.spec.q_lens)


def check_batch_size(value: int, step: Step, raw: Call) -> None:
    assert raw.batch_size == value == len(step.case.spec.seq_lens)


def check_context_cum_seq_lens_q(value: torch.Tensor, step: Step, raw: Call) -> None:
    assert raw.cum_seq_lens_q is value
    assert torch.equal(value, step.case.qo_indptr)


def check_cum_seq_lens_kv(value: torch.Tensor, step: Step, raw: Call) -> None:
    assert raw.cum_seq_lens_kv is value
    assert value.dtype == torch.int32
    assert value.tolist() == [0, *step.case.seq_lens.cumsum(0).tolist()]


def check_causal(value: bool, step: Step, raw: Call) -> None:
    assert raw.is_causal == value == (step.case.causal or max(step.case.spec.q_lens) == 1)


SHARED: dict[str, contract.Check] = {
    "query": check_query,
    "kv_cache": check_kv_cache,
    "kv_cache_sf": check_kv_cache_sf,
    "workspace_buffer": check_workspace,
    "multi_ctas_kv_counter_buffer": check_counters,
    "block_tables": check_block_tables,
    "seq_lens": check_seq_lens,
    "bmm1_scale": check_bmm1_scale,
    "bmm2_scale": check_bmm2_scale,
    "window_left": check_window,
    "out": check_out,
    "o_sf_scale": check_o_sf_scale,
    "o_sf_vec_size": check_o_sf_vec_size,
    "sinks": check_sinks,
    "kv_layout": check_layout,
    "lse": check_lse,
}
CHECKS: dict[str, dict[str, contract.Check]] = {
    "trtllm_batch_decode_with_kv_cache": {
        **SHARED,
        "backend": check_backend,
        "max_seq_len": check_max_seq_len,
        "q_len_per_req": check_q_len_per_req,
        "max_q_len": check_decode_max_q_len,
        "cum_seq_lens_q": check_decode_cum_seq_lens_q,
    },
    "trtllm_batch_context_with_kv_cache": {
        **SHARED,
        "max_kv_len": check_max_seq_len,
        "max_q_len": check_context_max_q_len,
        "batch_size": check_batch_size,
        "cum_seq_lens_q": check_context_cum_seq_lens_q,
        "cum_seq_lens_kv": check_cum_seq_lens_kv,
        "causal": check_causal,
    },
}
