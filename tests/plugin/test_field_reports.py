"""Public reports against other backends, replayed through vLLM's metadata; numbered as in the project's list."""

from typing import Any

import pytest
import torch
from batch_specs import BatchSpec
from paged_cases import PagedCase, assert_close_to_formula, cache_bytes, make_layer
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.core.kv_cache_utils import KVCacheTensor
from vllm.v1.kv_cache_interface import KVCacheLayout, create_kv_cache_views
from vllm.v1.worker.utils import AttentionGroup, select_common_block_size
from vllm_doubles import (
    CPU,
    LayerDouble,
    common_metadata,
    forward,
    make_builder,
    make_case,
    make_config,
    make_layer_double,
    make_spec,
    run_step,
)

import vllm_attn_plugin
from vllm_attn_plugin.backend import AttnPluginBackend
from vllm_attn_plugin.builder import PlannedPhase
from vllm_attn_plugin.impl import AttnPluginImpl
from vllm_attn_plugin.metadata import BatchError, PagedBatch
from vllm_attn_plugin.platform import AttnPluginCpuPlatform


def planned_batches(monkeypatch: pytest.MonkeyPatch) -> list[PagedBatch]:
    """A list that fills with the batches that kernels are asked to plan."""
    from vllm_attn_plugin.kernels.reference import ReferenceKernel

    batches: list[PagedBatch] = []
    plan = ReferenceKernel.plan

    def record(self: ReferenceKernel, batch: PagedBatch) -> Any:
        batches.append(batch)
        return plan(self, batch)

    monkeypatch.setattr(ReferenceKernel, "plan", record)
    return batches


def test_report_01_full_cache() -> None:
    spec = BatchSpec("full", (1,) * 8, (128,) * 8, is_full=True)
    case = make_case(spec, make_layer())
    assert case.num_pages == 64 + 1, "the pages in use and vLLM's null page"
    assert_close_to_formula(case, run_step(case, max_model_len=128, max_num_seqs=8))


@pytest.mark.parametrize("padded_seq_len", [0, 1])
def test_report_02_dummy_batch_padding(padded_seq_len: int) -> None:
    """The builder gets num_reqs padded to 2 while tokens stay 1; a dummy run's table is zero and it writes nothing."""
    case = make_case(BatchSpec("one", (1,), (1,)), make_layer())
    layer = make_layer_double(case)
    common = common_metadata(
        case,
        num_reqs=2,
        query_start_loc_cpu=torch.tensor([0, 1, 1], dtype=torch.int32),
        seq_lens=torch.tensor([1, padded_seq_len], dtype=torch.int32),
        block_table_tensor=torch.zeros((2, 4), dtype=torch.int32),
    )
    metadata = make_builder(case, {"layer": layer}).build(0, common)
    assert metadata.num_rows == 1
    case.kv_cache[0] = 0.0
    output = torch.full((2, *case.q.shape[1:]), float("nan"))
    layer.impl.forward(layer, case.q.expand(2, -1, -1), case.q, case.q, case.kv_cache, metadata, output)
    assert (output == 0).all()


@pytest.mark.parametrize("max_seq_len", [16, 241])
def test_report_03_dummy_request_longer_than_its_row(max_seq_len: int) -> None:
    """496 tokens over 256 requests with max_model_len 16."""
    case = make_case(BatchSpec("dummy", (1,) * 255 + (241,), (1,) * 255 + (241,)), make_layer(head_dim=8))
    common = common_metadata(case, block_table_tensor=torch.zeros((256, 8), dtype=torch.int32), max_seq_len=max_seq_len)
    message = r"request 255 needs 16 pages for its 241 tokens .* its block table row has 8 slots"
    with pytest.raises(BatchError, match=message):
        make_builder(case, max_model_len=16).build(0, common)


def test_report_04_decode_context_parallelism_is_refused() -> None:
    """Plans are made of global lengths here, so a rank's local ones must never be asked for."""
    vllm_attn_plugin.register()
    assert not AttnPluginImpl.supports_dcp
    config = AttentionSelectorConfig(
        head_size=64, dtype=torch.float32, kv_cache_dtype="auto", block_size=16, use_dcp=True
    )
    with pytest.raises(ValueError, match="Selected backend CUSTOM cannot serve this model on a CPU: DCP not supported"):
        AttnPluginCpuPlatform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, config)


def test_report_05_kernel_page_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's block is 544 tokens, the kernel's page 32: vLLM's own attention group expands the table."""
    case = make_case(BatchSpec("two_blocks", (1, 4), (600, 33)), make_layer(head_dim=8), page_size=32)
    # Blocks 3 and 1 for the first request, 2 for the second; a block is 17 pages.
    blocks = torch.tensor([[3, 1], [2, -1]], dtype=torch.int32)
    pages = torch.full((4 * 17, *case.kv_cache.shape[1:]), float("nan"))
    expanded = (blocks[..., None] * 17 + torch.arange(17, dtype=torch.int32)).flatten(1)
    for row, seq_len in enumerate(case.spec.seq_lens):
        used = -(-seq_len // 32)
        pages[expanded[row, :used]] = case.kv_cache[case.block_tables[row, :used]]
    case.kv_cache = pages
    layer = make_layer_double(case)
    group = AttentionGroup(AttnPluginBackend, ["layer"], make_spec(case, block_size=544), 0)
    config = make_config({"layer": layer})
    monkeypatch.setattr(type(group.kv_cache_spec), "max_num_blocks_per_req", lambda *args: 4)
    group.create_metadata_builders(config, CPU, kernel_block_size=32)
    batches = planned_batches(monkeypatch)
    metadata = group.build_metadata(common_metadata(case, block_table_tensor=blocks))
    (decode, prefill) = batches
    assert {batch.page_size for batch in batches} == {32}
    assert decode.paged_kv_indices.tolist() == [*range(51, 68), 17, 18]
    assert prefill.paged_kv_indices.tolist() == [34, 35]
    assert decode.block_tables.shape[1] >= 34, "the table is the expanded one"
    output = torch.full_like(case.q, float("nan"))
    layer.impl.forward(layer, case.q, case.q, case.q, case.kv_cache, metadata, output)
    assert_close_to_formula(case, output)


def test_report_05_block_of_544_tokens_is_itself_a_page() -> None:
    """Asked alone, the backend takes the whole block, and steps over it are right."""
    assert select_common_block_size(544, [AttnPluginBackend]) == 544
    case = make_case(BatchSpec("blocks", (1, 4), (600, 33)), make_layer(), page_size=544)
    assert_close_to_formula(case, run_step(case))


def tokens_of(phase: PlannedPhase | None) -> slice | None:
    return phase.rows if phase else None


def test_report_06_decodes_behind_a_short_extend() -> None:
    case = make_case(BatchSpec("extend", (1, 4, 4, 4), (40, 20, 30, 64)), make_layer())
    layer = make_layer_double(case)
    metadata = make_builder(case, {"layer": layer}, num_speculative_tokens=3).build(0, common_metadata(case))
    (plans,) = metadata.plans.values()
    assert tokens_of(plans.decode) == slice(0, 13)
    assert plans.prefill is None
    assert_close_to_formula(case, forward(layer, case, metadata))


def test_report_07_rows_are_cut_by_requests_not_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(BatchSpec("drafts", (4, 4, 4, 4, 30), (20, 4, 33, 64, 50)), make_layer())
    batches = planned_batches(monkeypatch)
    out = run_step(case, num_speculative_tokens=3)
    _, prefill = batches
    assert torch.equal(prefill.block_tables, case.block_tables[4:])
    assert_close_to_formula(case, out)


def test_report_08_chunked_prefill_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three 24-token chunks; the table already names the pages of the third."""
    case = make_case(BatchSpec("second_chunk", (24,), (48,)), make_layer())
    unused = [page for page in range(1, case.num_pages) if page not in case.block_tables]
    case.block_tables[0, 3:5] = torch.tensor(unused[:2])
    batches = planned_batches(monkeypatch)
    out = run_step(case)
    assert batches[0].seq_lens.tolist() == [48]
    assert_close_to_formula(case, out)


def test_report_09_window_soft_cap_and_scale_from_the_layer() -> None:
    """Windowed and global layers in one group: one builder, and each layer as its own parameters say."""
    spec = BatchSpec("mixed", (1, 1, 13, 32), (40, 64, 13, 50))
    options: dict[str, dict[str, Any]] = {
        "windowed": {"window_left": 9},
        "wider": {"window_left": 30, "sm_scale": 0.3},
        "global": {},
        "capped": {"soft_cap": 1.5},
        "with_sinks": {"window_left": 9, "sinks": True},
        "like_the_first": {"window_left": 9},
    }
    # vLLM keeps all pages of a request as long as one layer of the group has no window.
    cases = {name: make_case(spec, make_layer(**layer), freed=False) for name, layer in options.items()}
    layers = {name: make_layer_double(case) for name, case in cases.items()}
    first = cases["windowed"]
    metadata = make_builder(first, layers).build(0, common_metadata(first))
    assert len(metadata.plans) == 5, "equal layers share a plan"
    for name, case in cases.items():
        assert torch.equal(case.block_tables, first.block_tables)
        assert_close_to_formula(case, forward(layers[name], case, metadata))
    assert (cases["windowed"].expected()[0] - cases["global"].expected()[0]).abs().max() > 0.1


@pytest.mark.parametrize(("window", "masked"), [(1024, 1), (1025, 0), (1023, 2)])
def test_report_11_window_off_by_one(window: int, masked: int) -> None:
    """Window 1024 as a model states it, 1025 keys, one query: key 0 is masked, key 1 is not."""
    case = make_case(BatchSpec("window", (1,), (1025,)), make_layer(window_left=window - 1), freed=False)
    case.q.zero_()
    case.values[0].zero_()
    case.values[0][masked - 1 if masked else 1024] = 1e6 if masked else 0.0
    case.values[0][masked] = float(window)  # the first key that is seen
    positions = torch.arange(1025)
    slots = case.block_tables[0, positions // 16] * 16 + positions % 16
    case.kv_cache[slots // 16, :, slots % 16, 64:] = case.values[0]
    out = run_step(case)
    torch.testing.assert_close(out, torch.ones_like(out), rtol=1e-5, atol=0)


def test_report_12_empty_kv_in_a_batch() -> None:
    case = make_case(BatchSpec("one_empty", (1, 1, 1), (20, 0, 33)), make_layer())
    out = run_step(case)
    assert (out[1] == 0).all()
    assert_close_to_formula(case, out)


def profile_step(case: PagedCase, layer: LayerDouble, builder: Any) -> torch.Tensor:
    """A profile run that does build metadata, over a cache that is not there yet."""
    real, layer.kv_cache = layer.kv_cache, torch.tensor([])
    common = common_metadata(case, block_table_tensor=torch.zeros_like(case.block_tables))
    metadata = builder.build(0, common)
    out = forward(layer, case, metadata)
    layer.kv_cache = real
    return out


def test_report_13_profile_run_against_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """indptr of batch + 1 entries in both; the prefill after a profile run reads its cached prefix."""
    case = make_case(BatchSpec("cached_prefix", (16, 20), (48, 64)), make_layer())
    layer = make_layer_double(case)
    builder = make_builder(case, {"layer": layer})
    batches = planned_batches(monkeypatch)
    assert (profile_step(case, layer, builder) == 0).all()
    out = forward(layer, case, builder.build(0, common_metadata(case)))
    profile, prefill = batches
    assert profile.paged_kv_indptr.tolist() == [0, 0, 0]
    assert prefill.paged_kv_indptr.tolist() == [0, 3, 7]
    assert_close_to_formula(case, out)


@pytest.mark.parametrize("slot", [-1, 0])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("num_tokens", [1, 6])
def test_report_17_warm_up_leaves_the_cache_unchanged(num_tokens: int, kv_dtype: torch.dtype, slot: int) -> None:
    """A dummy run's slots are all -1, or all 0: page 0 is vLLM's null block, which no request owns."""
    case = make_case(BatchSpec("warm_up", (1,) * num_tokens, (1,) * num_tokens), make_layer(kv_dtype=kv_dtype))
    case.kv_cache.view(kv_dtype).view(torch.uint8).zero_()
    case.slot_mapping.fill_(slot)
    layer = make_layer_double(case)
    common = common_metadata(case, block_table_tensor=torch.zeros_like(case.block_tables), max_seq_len=2048)
    metadata = make_builder(case, {"layer": layer}).build(0, common)
    before = cache_bytes(case.kv_cache)
    out = forward(layer, case, metadata)
    assert out.isfinite().all()
    assert cache_bytes(case.kv_cache) == before


def test_report_22_query_key_and_value_are_slices_of_one_tensor() -> None:
    case = make_case(BatchSpec("mixed", (1, 1, 20), (40, 17, 33)), make_layer(num_qo_heads=14, num_kv_heads=2))
    layer = make_layer_double(case)
    metadata = make_builder(case, {"layer": layer}).build(0, common_metadata(case))
    expected = forward(layer, case, metadata)
    k = torch.cat([keys[-q:] for keys, q in zip(case.keys, case.spec.q_lens, strict=True)])
    v = torch.cat([values[-q:] for values, q in zip(case.values, case.spec.q_lens, strict=True)])
    fused = torch.cat([case.q, k, v], dim=1)
    q, k, v = fused[:, :14], fused[:, 14:16], fused[:, 16:]
    case.kv_cache[case.slot_mapping // 16, :, case.slot_mapping % 16] = float("nan")
    layer.impl.do_kv_cache_update(layer, k, v, case.kv_cache, case.slot_mapping)
    output = torch.full_like(expected, float("nan"))
    layer.impl.forward(layer, q, k, v, case.kv_cache, metadata, output)
    assert torch.equal(output, expected)


def vllm_cache(case: PagedCase, layout: KVCacheLayout, padding: int, num_layers: int = 3) -> torch.Tensor:
    """The case's cache moved into a view that vLLM itself makes, of a buffer full of NaN."""
    spec = make_spec(case)
    page = spec.page_size_bytes + padding
    if padding:
        object.__setattr__(spec, "page_size_padded", page)
    layers_inside = layout.name.startswith("B")
    tensor = KVCacheTensor(
        size=page * case.num_pages * num_layers,
        layers=[f"layer{i}" for i in range(num_layers)],
        layer_stride=page if layers_inside else page * case.num_pages,
        block_stride=page * num_layers if layers_inside else page,
    )
    raw = torch.full((tensor.size // 4,), float("nan")).view(torch.int8)
    view: torch.Tensor = create_kv_cache_views(raw, spec, case.num_pages, layout, tensor)[1]
    view.copy_(case.kv_cache)
    return view


@pytest.mark.parametrize("padding", [0, 512])
@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLHNC, KVCacheLayout.BLNHC])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_report_25_and_26_views_as_vllm_makes_them(num_kv_heads: int, layout: KVCacheLayout, padding: int) -> None:
    """One KV head, whatever stride it has; and blocks that are padded."""
    case = make_case(BatchSpec("mixed", (1, 1, 20), (40, 17, 33)), make_layer(num_kv_heads=num_kv_heads))
    case.kv_cache = vllm_cache(case, layout, padding)
    is_padded = case.kv_cache.stride(0) > case.kv_cache[0].numel()
    assert is_padded == (padding > 0 or layout.name.startswith("B"))
    assert_close_to_formula(case, run_step(case))


@pytest.mark.parametrize("q_scale", [1.0, 3.0])
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_report_27_scales(kv_dtype: torch.dtype, q_scale: float) -> None:
    """k_scale 0.5 and v_scale 2 each once, on store and on read; q_scale not at all, as the query is not fp8."""
    layer = make_layer(dtype=torch.bfloat16, kv_dtype=kv_dtype)
    case = make_case(BatchSpec("mixed", (1, 4), (40, 30)), layer, k_scale=0.5, v_scale=2.0)
    double = make_layer_double(case)
    double._q_scale_float = q_scale
    before = cache_bytes(case.kv_cache)
    metadata = make_builder(case, {"layer": double}).build(0, common_metadata(case))
    assert_close_to_formula(case, forward(double, case, metadata))
    assert cache_bytes(case.kv_cache) == before, "the new tokens came back as the bytes they were"


@pytest.mark.parametrize("heads", [(14, 2), (32, 2), (9, 3)], ids=lambda heads: f"{heads[0]}/{heads[1]}")
def test_report_28_odd_groups(heads: tuple[int, int]) -> None:
    case = make_case(
        BatchSpec("mixed", (1, 1, 9), (40, 9, 20)), make_layer(num_qo_heads=heads[0], num_kv_heads=heads[1])
    )
    assert_close_to_formula(case, run_step(case))


def test_report_29_short_kv() -> None:
    case = make_case(BatchSpec("short", (8,), (9,)), make_layer(num_qo_heads=14, num_kv_heads=2, dtype=torch.bfloat16))
    assert_close_to_formula(case, run_step(case))
