"""Every GPU kernel against the formula in fp64, over what it can be asked for."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from batch_specs import SPECS
from gpu_cases import CUDA, GPU_SPECS, error_and_limit, fp8_query_error, fp8_weights_error, tame_unused_slots, to_gpu
from paged_cases import make_case, make_layer, take_new_kv

from vllm_attn_plugin.kernels import EngineParams, NewKV, Phase
from vllm_attn_plugin.kernels.dispatch import KERNELS

BF16, FP16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
ALL = {**SPECS, **GPU_SPECS}
DECODES = ("decode", "long_decode", "full_cache_decode", "many_short")
# Kernels of both phases, and those that decode alone.
DECODING = ("flashinfer-fa2", "vllm-fa3")
ONLY_DECODE = ("xqa", "triton-decode")
PREFILLS = ("prefill", "chunked_prefill", "mixed", "full_cache_prefill", "long_prefill")


@dataclass(frozen=True)
class Ask:
    """One check: a kernel, a batch, a layer."""

    kernel: str
    spec: str
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype | None = None
    head_dim: int = 128
    num_kv_heads: int = 2
    group: int = 4
    page_size: int = 16
    layout: str = "LBHNC"
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    causal: bool = True

    @property
    def needs_finite_slots(self) -> bool:
        """XQA multiplies what lies outside the window, and with an fp8 cache what lies past the end, by 0."""
        return self.kernel == "xqa" and (self.kv_dtype is not None or "window_left" in self.options)

    @property
    def phase(self) -> Phase:
        """Some kernels only decode; those of both phases decode what has one query a request."""
        is_decode = self.kernel in ONLY_DECODE or (self.kernel in DECODING and set(ALL[self.spec].q_lens) == {1})
        return Phase.DECODE if is_decode else Phase.PREFILL

    @property
    def module(self) -> tuple[Any, ...]:
        """What a compiled module depends on; two checks with the same one wait for the same compilation."""
        shape = (self.group, self.page_size, "spec" in self.spec) if self.kernel == "xqa" else ()
        features = (self.options.get("window_left", -1) >= 0, "soft_cap" in self.options)
        return (self.kernel, self.dtype, self.kv_dtype, self.head_dim, features, shape)

    def __str__(self) -> str:
        names = [self.kernel, self.spec, str(self.dtype).removeprefix("torch.")]
        names += [f"kv_{str(self.kv_dtype).removeprefix('torch.')}"] if self.kv_dtype else []
        names += [f"d{self.head_dim}", f"{self.num_kv_heads * self.group}x{self.num_kv_heads}", f"p{self.page_size}"]
        names += [self.layout] if self.layout != "LBHNC" else []
        names += [f"{key}={value}" for key, value in self.options.items()] + ([] if self.causal else ["non_causal"])
        return "-".join(names)


def asks_around(base: Ask) -> list[Ask]:
    """A kernel's checks: every value of each option with the others at the base's, and dtypes by head sizes in full."""
    specs = DECODES if base.phase is Phase.DECODE else PREFILLS
    dtypes = [(BF16, None), (FP16, None), (BF16, E4M3)][: 2 if base.kernel == "flashinfer-fa3" else 3]
    asks = [
        replace(base, spec=spec, dtype=dtype, kv_dtype=kv_dtype, head_dim=head_dim)
        for dtype, kv_dtype in dtypes
        for head_dim in (64, 128, 256)
        for spec in specs[:3]
    ]
    asks += [replace(base, spec=specs[-1])] + [
        replace(base, spec=spec, group=g) for g in (1, 3, 7, 8, 16) for spec in specs[:2]
    ]
    asks += [replace(base, spec=spec, page_size=page) for page in (32, 64, 128) for spec in specs[:2]]
    asks += [
        replace(base, spec=spec, layout=layout)
        for layout in ("LBNHC", "BLHNC", *(("LBHNC_padded",) if base.kernel != "xqa" else ()))
        for spec in specs[:2]
    ]
    asks += [
        replace(base, spec=spec, num_kv_heads=1, layout=layout) for spec in specs[:1] for layout in ("LBHNC", "LBNHC")
    ]
    asks += [replace(base, spec=spec, options={"window_left": w}) for w in (0, 15, 127) for spec in specs[:3]]
    asks += [replace(base, spec=spec, options={"sm_scale": 0.3}) for spec in specs[:1]]
    return asks


def all_asks() -> list[Ask]:
    asks: list[Ask] = []
    for base in (
        Ask("xqa", "decode"),
        Ask("flashinfer-fa2", "decode"),
        Ask("flashinfer-fa2", "prefill"),
        Ask("flashinfer-fa3", "prefill"),
        Ask("vllm-fa3", "decode"),
        Ask("vllm-fa3", "prefill"),
        Ask("triton-decode", "decode"),
    ):
        asks += asks_around(base)
    for kernel in ("flashinfer-fa2", "flashinfer-fa3", "vllm-fa3"):
        asks += [
            Ask(kernel, spec, options={"soft_cap": 30.0, "window_left": w}) for spec in PREFILLS[:3] for w in (-1, 127)
        ]
        asks += [Ask(kernel, "prefill", causal=False), Ask(kernel, "empty_kv"), Ask(kernel, "padded_rows")]
        asks += [Ask(kernel, f"spec_decode_{q}") for q in (2, 5, 8)] + [Ask(kernel, "spec_decode_ragged")]
    asks += [Ask("flashinfer-fa2", spec, options={"soft_cap": 30.0}) for spec in DECODES[:2]]
    asks += [Ask("flashinfer-fa2", spec, kv_dtype=E5M2) for spec in ("decode", "mixed")]
    asks += [Ask("xqa", f"spec_decode_{q}") for q in range(2, 9)] + [
        Ask("xqa", f"spec_decode_{q}", group=8, head_dim=64) for q in (4, 8)
    ]
    asks += [Ask("xqa", "spec_decode_4", options={"window_left": 15}), Ask("xqa", "spec_decode_4", causal=False)]
    asks += [Ask("xqa", "spec_decode_ragged"), Ask("xqa", "spec_decode_4", kv_dtype=E4M3)]
    asks += [Ask("xqa", "spec_decode_4", head_dim=256, group=6, num_kv_heads=4)]  # 24/4 heads
    asks += [Ask("xqa", spec, options={"sinks": True, "window_left": w}) for spec in DECODES[:2] for w in (-1, 127)]
    asks += [
        Ask("vllm-fa3", spec) for spec in ("wide_decode", "full_cache_wide", "one_very_long_decode", "padded_rows")
    ]
    asks += [
        Ask("vllm-fa3", spec, head_dim=64, options={"sinks": True, "window_left": w})
        for spec in ("decode", "mixed", "long_chunked_prefill")
        for w in (-1, 127)
    ]
    # Whole pages, with what lies behind a request's end, for head sizes and windows whose tiles are others.
    asks += [
        Ask("vllm-fa3", spec, head_dim=head_dim, page_size=page_size, kv_dtype=kv_dtype, options=options)
        for spec in ("mixed", "long_prefill")
        for head_dim, kv_dtype in ((64, None), (128, E4M3), (256, None), (256, E4M3))
        for page_size in (64, 128)
        for options in ({}, {"window_left": 127})
    ]
    asks += [Ask("vllm-fa3", spec, group=16, page_size=128) for spec in ("mixed", "spec_decode_8")]
    asks += [Ask("vllm-fa3", "mixed", head_dim=80), Ask("vllm-fa3", "decode", head_dim=96)]
    asks += split_decode_asks()
    asks += [Ask("xqa", spec) for spec in ("wide_decode", "full_cache_wide", "one_very_long_decode", "padded_rows")]
    asks += [Ask("flashinfer-fa2", spec) for spec in ("wide_decode", "full_cache_wide", "one_very_long_decode")]
    asks += [
        Ask("flashinfer-sinks", spec, dtype=dtype, head_dim=head_dim, options={"sinks": True, "window_left": w})
        for spec in ("prefill", "chunked_prefill", "mixed", "long_chunked_prefill")
        for dtype, head_dim in ((BF16, 64), (FP16, 128))
        for w in (-1, 127)
    ]
    asks += [Ask("flashinfer-sinks", "mixed", kv_dtype=E4M3, head_dim=64, options={"sinks": True})]
    asks += [
        Ask(k, "decode", head_dim=64, num_kv_heads=kv, group=g)
        for k in ("xqa", "flashinfer-fa2")
        for kv, g in ((2, 7), (2, 16), (3, 3))
    ]
    return _slowest_compilations_first(list({str(ask): ask for ask in asks}.values()))


def split_decode_asks() -> list[Ask]:
    """What the split decode kernel can be asked for beyond what every decode kernel is."""
    base = Ask("triton-decode", "decode")
    asks = [replace(base, spec=f"spec_decode_{q}") for q in range(2, 9)]
    asks += [
        replace(base, spec=f"spec_decode_{q}", group=g, head_dim=d)
        for q in (4, 8)
        for g, d in ((8, 64), (8, 128), (8, 256))
    ]
    asks += [replace(base, spec="spec_decode_8", group=16), replace(base, spec="spec_decode_ragged")]
    asks += [
        replace(base, spec="spec_decode_4", options={"window_left": 15}),
        replace(base, spec="spec_decode_4", causal=False),
    ]
    specs = ("wide_decode", "full_cache_wide", "one_very_long_decode", "padded_rows", "empty_kv", "queries_before_keys")
    asks += [replace(base, spec=spec, page_size=page) for spec in specs for page in (16, 64, 128)]
    asks += [replace(base, spec=spec, head_dim=d) for spec in DECODES[:2] for d in (80, 96)]
    asks += [
        replace(base, spec=spec, kv_dtype=kv_dtype, dtype=dtype, page_size=page)
        for spec in ("long_decode", "wide_decode", "spec_decode_ragged")
        for kv_dtype in (E4M3, E5M2)
        for dtype, page in ((BF16, 128), (FP16, 16))
    ]
    for options in (
        {"soft_cap": 30.0},
        {"soft_cap": 30.0, "window_left": 127},
        {"sinks": True},
        {"sinks": True, "window_left": 127},
    ):
        asks += [replace(base, spec=spec, options=options) for spec in DECODES[:2]]
    return asks


def _slowest_compilations_first(asks: list[Ask]) -> list[Ask]:
    """One check of each compiled module first, so that parallel processes compile them side by side; fa3 is slowest."""
    order = ["flashinfer-fa3", "flashinfer-sinks", "flashinfer-fa2", "xqa", "vllm-fa3", "triton-decode"]
    first = {ask.module: ask for ask in reversed(asks)}
    heads = sorted(first.values(), key=lambda ask: order.index(ask.kernel))
    return heads + [ask for ask in asks if first[ask.module] is not ask]


@pytest.mark.parametrize("ask", all_asks(), ids=str)
def test_kernel_against_fp64(ask: Ask, record_property: Any) -> None:
    layer = make_layer(
        num_qo_heads=ask.num_kv_heads * ask.group,
        num_kv_heads=ask.num_kv_heads,
        head_dim=ask.head_dim,
        dtype=ask.dtype,
        kv_dtype=ask.kv_dtype,
        **ask.options,
    )
    scales = {"k_scale": 0.5, "v_scale": 2.0} if ask.kv_dtype else {}
    case = make_case(ALL[ask.spec], layer, page_size=ask.page_size, causal=ask.causal, layout=ask.layout, **scales)
    gpu = to_gpu(case)
    kernel = KERNELS[ask.kernel]
    if ask.needs_finite_slots:
        tame_unused_slots(gpu)
    engine = gpu.engine if ask.kernel in ONLY_DECODE else _without_speculation(gpu.engine)
    gpu.engine = engine
    assert kernel.reasons_against(ask.phase, layer, engine) == []
    out = gpu.run(kernel, ask.phase)
    error, limit = error_and_limit(case, out)
    if ask.kernel in ("xqa", "vllm-fa3") and ask.kv_dtype is not None:
        limit += 2 * fp8_weights_error(case)
    if ask.kernel == "vllm-fa3" and ask.kv_dtype is not None:
        limit += 2 * fp8_query_error(case)
    record_property("value", error)
    record_property("tolerance", limit)
    assert out.isfinite().all()
    assert error <= limit


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(
    "spec", ["decode", "long_decode", "wide_decode", "one_very_long_decode", "padded_rows", "spec_decode_ragged"]
)
def test_triton_decode_writes_the_step_s_keys_and_values(
    spec: str, dtype: torch.dtype, page_size: int, record_property: Any
) -> None:
    layer = make_layer(num_qo_heads=32, num_kv_heads=8, head_dim=128, dtype=dtype)
    case = make_case(ALL[spec], layer, page_size=page_size)
    whole = case.kv_cache.clone()
    new_kv = take_new_kv(case)
    gpu = to_gpu(case)
    gpu.inputs = replace(gpu.inputs, new_kv=NewKV(*(tensor.cuda() for tensor in new_kv)))
    error, limit = error_and_limit(case, gpu.run(KERNELS["triton-decode"], Phase.DECODE))
    record_property("value", error)
    record_property("tolerance", limit)
    assert error <= limit
    torch.testing.assert_close(gpu.kv_cache.cpu(), whole, rtol=0, atol=0, equal_nan=True)


def _without_speculation(engine: EngineParams) -> EngineParams:
    return replace(engine, max_decode_q_len=1)


def test_reference_agrees_on_the_gpu(record_property: Any) -> None:
    case = make_case(SPECS["mixed"], make_layer(dtype=BF16))
    gpu = to_gpu(case)
    error, limit = error_and_limit(case, gpu.run(KERNELS["reference"], Phase.PREFILL))
    record_property("value", error)
    record_property("tolerance", limit)
    assert error <= limit
    assert gpu.q.device.type == CUDA.type
