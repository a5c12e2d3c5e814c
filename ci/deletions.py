"""The steps that `ci.contract_deletions` takes out of the kernels, one at a time."""

from __future__ import annotations

from dataclasses import dataclass

CONTRACT = "tests/kernels/test_{}_contract.py"
TRTLLM, XQA, NATIVE = (CONTRACT.format(name) for name in ("trtllm", "xqa", "native"))
CACHE, QUANTIZED, IMPL = "tests/kernels/test_kv_cache.py", "tests/plugin/test_quantized.py", "tests/plugin/test_impl.py"


@dataclass(frozen=True)
class Deletion:
    """A step taken out: `old` becomes `new` in `file`, and one of `tests` must fail."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def _api(what: str, old: str, new: str, *tests: str) -> Deletion:
    return Deletion(what, "kernels/trtllm_api.py", old, new, tests or (TRTLLM, XQA))


def _interface(what: str, old: str, new: str) -> Deletion:
    return Deletion(what, "kernels/interface.py", old, new, (TRTLLM, XQA))


def _gen(what: str, old: str, new: str, *tests: str) -> Deletion:
    return Deletion(what, "kernels/trtllm_gen.py", old, new, tests or (TRTLLM,))


def _xqa(what: str, old: str, new: str) -> Deletion:
    return Deletion(what, "kernels/xqa.py", old, new, (XQA,))


def _native(what: str, old: str, new: str) -> Deletion:
    return Deletion(what, "kernels/flashinfer_native.py", old, new, (NATIVE,))


def _sinks(what: str, old: str, new: str) -> Deletion:
    return Deletion(what, "kernels/flashinfer_sinks.py", old, new, (NATIVE,))


def _cache(what: str, old: str, new: str, *tests: str) -> Deletion:
    return Deletion(what, "kernels/kv_cache.py", old, new, tests or (CACHE, TRTLLM))


def _space(what: str, old: str, new: str, *tests: str) -> Deletion:
    return Deletion(what, "kernels/workspace.py", old, new, tests or (TRTLLM, XQA))


def _impl(what: str, old: str, new: str) -> Deletion:
    return Deletion(what, "vllm_attn_plugin/impl.py", old, new, (IMPL, QUANTIZED))


SHARED_CALLS = (
    _api("query made contiguous", "canonical_strides(q.contiguous())", "canonical_strides(q)"),
    _api("query's size-1 strides canonical", "canonical_strides(q.contiguous())", "q.contiguous()"),
    _api(
        "pages' size-1 strides canonical (TRT-LLM-gen)",
        "return canonical_strides(kv_pages.k), canonical_strides(kv_pages.v)",
        "return kv_pages.k, kv_pages.v",
        TRTLLM,
    ),
    _api(
        "pages' size-1 strides canonical (XQA)",
        "return canonical_strides(kv_pages.k), canonical_strides(kv_pages.v)",
        "return kv_pages.k, kv_pages.v",
        XQA,
    ),
    _api("tables and lengths checked for int32 (TRT-LLM-gen)", "!= torch.int32", "== torch.int8", TRTLLM),
    _api("tables and lengths checked for int32 (XQA)", "!= torch.int32", "== torch.int8", XQA),
    _api("tables and lengths made contiguous (TRT-LLM-gen)", "return tensor.contiguous()", "return tensor", TRTLLM),
    _api("tables and lengths made contiguous (XQA)", "return tensor.contiguous()", "return tensor", XQA),
    _interface(
        "sinks present where the layer has them", "if sinks is None and not layer.has_sinks:", "if sinks is None:"
    ),
    _interface("sinks float32", "sinks.dtype != torch.float32 or ", ""),
    _interface("sinks one a query head", "sinks.shape != (layer.num_qo_heads,) or ", ""),
    _interface("sinks contiguous", " or not sinks.is_contiguous()", ""),
    _api("sm_scale in bmm1", "scale = layer.sm_scale", "scale = 1.0"),
    _api("k_scale in bmm1", "scale *= inputs.k_scale", "scale *= 1.0"),
    _api(
        "k_scale for quantized caches only",
        "    if layer.kv_dtype in SCALED_CACHES:\n        scale *= inputs.k_scale",
        "    scale *= inputs.k_scale",
    ),
    _api("k_scale for NVFP4 caches", "SCALED_CACHES = (*FP8_DTYPES, NVFP4)", "SCALED_CACHES = FP8_DTYPES"),
    _api("q_scale in bmm1", "scale *= inputs.q_scale", "scale *= 1.0", TRTLLM),
    _api(
        "q_scale for fp8 queries only",
        "    if layer.q_dtype in FP8_DTYPES:\n        scale *= inputs.q_scale",
        "    scale *= inputs.q_scale",
        TRTLLM,
    ),
    _api("v_scale in bmm2", "scale = inputs.v_scale if layer.kv_dtype in SCALED_CACHES else 1.0", "scale = 1.0"),
    _api(
        "v_scale for quantized caches only",
        "scale = inputs.v_scale if layer.kv_dtype in SCALED_CACHES else 1.0",
        "scale = inputs.v_scale",
    ),
    _api(
        "o_scale under an fp8 output",
        "return scale / inputs.o_scale if out_dtype in FP8_DTYPES else scale",
        "return scale",
        TRTLLM,
    ),
    _api(
        "o_scale for fp8 outputs only",
        "return scale / inputs.o_scale if out_dtype in FP8_DTYPES else scale",
        "return scale / inputs.o_scale",
        TRTLLM,
    ),
)
TRTLLM_GEN = (
    _gen("scratch behind XQA's counters", "max_q_len))[COUNTER_BYTES:]", "max_q_len))"),
    _gen("counters a buffer of their own", '            "multi_ctas_kv_counter_buffer": self._counters,\n', ""),
    _gen("counters for the largest batch", "_bytes(engine.max_batch_size,", "_bytes(1,"),
    _gen(
        "cumulated key lengths int32",
        "torch.zeros(engine.max_batch_size + 1, dtype=torch.int32, device",
        "torch.zeros(engine.max_batch_size + 1, dtype=torch.int64, device",
    ),
    _gen(
        "cumulated key lengths at one address",
        "cum_seq_lens_kv = self._cum_seq_lens_kv[: batch.batch_size + 1]",
        "cum_seq_lens_kv = torch.zeros(batch.batch_size + 1, dtype=torch.int32)",
    ),
    _gen(
        "cumulated key lengths start at 0",
        "torch.cumsum(seq_lens, 0, dtype=torch.int32, out=cum_seq_lens_kv[1:])",
        "torch.cumsum(seq_lens, 0, dtype=torch.int32, out=cum_seq_lens_kv[:-1])",
    ),
    _gen(
        "length limit the same in every step",
        "max_seq_len=self.engine.max_seq_len",
        "max_seq_len=int(batch.seq_lens_cpu.max())",
    ),
    _gen("query lengths that differ", "bool((q_lens != batch.max_q_len).any())", "False"),
    _gen(
        "block tables checked and dense",
        'trtllm_api.dense_int32("block_tables", batch.block_tables)',
        "batch.block_tables",
    ),
    _gen("lengths checked and dense", 'trtllm_api.dense_int32("seq_lens", batch.seq_lens)', "batch.seq_lens"),
    _gen("query starts checked and dense", 'trtllm_api.dense_int32("qo_indptr", batch.qo_indptr)', "batch.qo_indptr"),
    _gen(
        "queries that see later keys go to the context kernel",
        "self.phase is Phase.PREFILL or not causal",
        "self.phase is Phase.PREFILL",
    ),
    _gen("no window without a causal mask", "if self.layer.window_left >= 0:", "if False:"),
    _gen(
        "padding, keyless rows and a replay's absent rows cleared",
        "        if plan.clears_output:\n            _clear",
        "        if False:\n            _clear",
    ),
    _gen("clearing where requests have no keys", "            or bool((batch.seq_lens_cpu == 0).any())\n", ""),
    _gen(
        "clearing in calls that a graph may capture",
        "            or batch.num_rows in self.engine.decode_graph_sizes,\n",
        "",
    ),
    _gen("kernel's own buffer cleared with the output", "            target.zero_()\n", "            pass\n"),
    _gen("padding kept from the output", "if staged else out[rows]\n", "if staged else out\n"),
    _gen("padding kept from the query", "(plan, q[rows], kv_pages", "(plan, q, kv_pages"),
    _gen(
        "result of an NVFP4 cache staged in fp8",
        "staged = self._fp8_out is not None and out.dtype != FP8",
        "staged = False",
    ),
    _gen("staged result copied out", "out[rows].copy_(target)", "pass"),
    _gen("log-sum-exp from powers of two to natural", "own_lse.mul_(LOG_2)", "own_lse.mul_(1.0)"),
    _gen("cleared log-sum-exp holds the sinks", "(inputs.sinks / LOG_2).expand_as(lse)", "inputs.sinks.expand_as(lse)"),
    _gen(
        "room for the softmax statistics checked",
        "check_lse_room(self._workspace.numel(), self.layer, len(plan.seq_lens), plan.q_len)",
        "pass",
    ),
    _gen(
        "block scales of an NVFP4 cache handed over",
        "None if scales is None else trtllm_api.canonical_pages(scales)",
        "None",
    ),
    _gen(
        "block scales' size-1 strides canonical", "else trtllm_api.canonical_pages(scales)", "else (scales.k, scales.v)"
    ),
    _gen("window handed over", '"window_left": self.layer.window_left', '"window_left": -1'),
    _gen("sinks handed over", '"sinks": checked_sinks(self.layer, inputs)', '"sinks": None'),
    _gen("pages handed over head-major", '"kv_layout": "HND"', '"kv_layout": "NHD"'),
    _gen("NVFP4 output's factor", '"o_sf_scale": inputs.o_scale if', '"o_sf_scale": 1.0 if'),
    _gen(
        "NVFP4 output's first row",
        "inputs.o_block_scales, inputs.o_first_row, q.shape",
        "inputs.o_block_scales, 0, q.shape",
    ),
    _gen("bfloat16 over an fp8 cache refused in prefill", "if kv == FP8 != q and phase is Phase.PREFILL:", "if False:"),
    _gen("float16 over an fp8 cache refused", "if kv == FP8 and q == torch.float16:", "if False:"),
    _gen("NVFP4 cache needs an fp8 query", "if kv == NVFP4 and q != FP8:", "if False:"),
)
XQA_CALL = (
    _xqa("strides in whole heads checked", "        check_strides(kv_pages)\n", ""),
    _xqa("padding kept from the query", "dense_query(q[: plan.num_rows])", "dense_query(q)"),
    _xqa("padding kept from the output", "out=out[: plan.num_rows]", "out=out"),
    _xqa(
        "block tables dense, and as many as rows",
        'dense_int32("block_tables", batch.block_tables[:num_requests])',
        'dense_int32("block_tables", batch.block_tables)',
    ),
    _xqa(
        "lengths as many as rows",
        'dense_int32("seq_lens", batch.seq_lens[:num_requests])',
        'dense_int32("seq_lens", batch.seq_lens)',
    ),
    _xqa(
        "query starts handed over",
        'None if is_uniform else trtllm_api.dense_int32("qo_indptr", batch.qo_indptr)',
        "None",
    ),
    _xqa("draft mask handed over", "mask=plan.mask,", "mask=None,"),
    _xqa("draft mask causal", "row + 1 if causal else", "row + 2 if causal else"),
    _xqa("window handed over", "window_left=self.layer.window_left", "window_left=-1"),
    _xqa("sinks handed over", "sinks=checked_sinks(self.layer, inputs)", "sinks=None"),
    _xqa("pages handed over head-major", 'kv_layout="HND"', 'kv_layout="NHD"'),
    _xqa("length limit the same in every step", "max_seq_len=self.engine.max_seq_len", "max_seq_len=batch.max_seq_len"),
)
NATIVE_CALLS = (
    _native("k_scale", "k_scale=inputs.k_scale if is_fp8 else None", "k_scale=None"),
    _native("k_scale for fp8 caches only", "k_scale=inputs.k_scale if is_fp8 else None", "k_scale=inputs.k_scale"),
    _native("v_scale", "v_scale=inputs.v_scale if is_fp8 else None", "v_scale=None"),
    _native("v_scale for fp8 caches only", "v_scale=inputs.v_scale if is_fp8 else None", "v_scale=inputs.v_scale"),
    _native("padding kept from the query", "            q[: plan.num_rows],\n", "            q,\n"),
    _native("padding kept from the output", "out=out[: plan.num_rows]", "out=out"),
    _native("padding kept from the log-sum-exp", "None if lse is None else lse[: plan.num_rows]", "lse"),
    _native("log-sum-exp from powers of two to natural", ".mul_(LOG_2)", ".mul_(1.0)"),
    _native(
        "lengths less the pages before the window", "(batch.seq_lens_cpu - batch.first_key_cpu)", "batch.seq_lens_cpu"
    ),
    _native("window planned", '"window_left": self.layer.window_left', '"window_left": -1'),
    _native("soft cap planned", '"logits_soft_cap": self.layer.logits_soft_cap or None', '"logits_soft_cap": None'),
    _native("scale planned", '"sm_scale": self.layer.sm_scale', '"sm_scale": None'),
    _native("cache's dtype planned", '"kv_data_type": self.layer.kv_dtype', '"kv_data_type": self.layer.q_dtype'),
    _native("causality planned", "causal=batch.causal", "causal=True"),
    _native("pages handed over head-major", 'self._workspace, "HND", backend', 'self._workspace, "NHD", backend'),
    _sinks("k_scale with sinks", "self.layer.sm_scale * (inputs.k_scale if is_fp8 else 1.0)", "self.layer.sm_scale"),
    _sinks("padding kept from the query with sinks", "            q[: plan.num_rows],\n", "            q,\n"),
    _sinks("v_scale with sinks", "v_scale=inputs.v_scale if is_fp8 else None", "v_scale=None"),
    _sinks("window of the variant with sinks", '"use_sliding_window": is_windowed', '"use_sliding_window": False'),
)
MEMORY = (
    _cache(
        "fp8 storage viewed as fp8", "kv_cache if kv_cache.dtype == kv_dtype else kv_cache.view(kv_dtype)", "kv_cache"
    ),
    _cache(
        "cache's size-1 strides canonical",
        "pages = canonical_strides(kv_cache if kv_cache.dtype == kv_dtype else kv_cache.view(kv_dtype))",
        "pages = kv_cache if kv_cache.dtype == kv_dtype else kv_cache.view(kv_dtype)",
    ),
    _cache("cache's last stride checked", "if kv_cache.stride(3) != 1:", "if False:"),
    _cache(
        "cache's dtype checked",
        "if kv_cache.dtype != kv_dtype and not (kv_cache.dtype == torch.uint8 and kv_dtype.itemsize == 1):",
        "if False:",
    ),
    _cache("NVFP4 cache's size-1 strides canonical", "    kv_cache = canonical_strides(kv_cache)\n", ""),
    _cache(
        "NVFP4 pages checked dense",
        "if kv_cache.stride()[1:] != (page_size * token_bytes, token_bytes, 1):",
        "if False:",
    ),
    _cache("NVFP4 block scales viewed as fp8", ", blocks).view(torch.float8_e4m3fn)", ", blocks)"),
    _cache("stored fp8 divided by its scale", "(new.float() / scale)", "(new.float())"),
    _cache("stored fp8 saturated", ".clamp_(-limit, limit)", ""),
    _space("buffers zero at first", "torch.zeros(num_bytes", "torch.ones(num_bytes"),
    _space(
        "native kernels' buffer apart",
        'self.native = self._reserve("FlashInfer", self.native, num_bytes)',
        "self.native = self.reserve_trtllm(num_bytes)",
        TRTLLM,
        XQA,
        NATIVE,
    ),
    _space("softmax statistics in the size", "if layer.returns_lse:", "if False:"),
    _space(
        "a smaller buffer is not reused", "buffer is not None and buffer.numel() >= num_bytes", "buffer is not None"
    ),
    _impl("sinks made float32", "self._source_sinks.to(torch.float32)", "self._source_sinks"),
    _impl("window without the query itself", "sliding_window - 1", "sliding_window"),
    _impl("q_scale handed over", "q_scale=layer._q_scale_float", "q_scale=1.0"),
    _impl("k_scale handed over", "k_scale=layer._k_scale_float", "k_scale=1.0"),
    _impl("v_scale handed over", "v_scale=layer._v_scale_float", "v_scale=1.0"),
    _impl("o_scale handed over", "            o_scale=o_scale,\n", ""),
    _impl("each phase's rows of the block scales", "inputs = replace(inputs, o_first_row=phase.rows.start)", "pass"),
    _impl("output scale read once", "if self._o_scale is None:", "if True:"),
)

DELETIONS = (*SHARED_CALLS, *TRTLLM_GEN, *XQA_CALL, *NATIVE_CALLS, *MEMORY)
