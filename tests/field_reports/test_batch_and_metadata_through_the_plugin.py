"""Public reports 1 to 13 through vLLM's metadata: the builder, the cache update and the impl of a whole step."""

from typing import Any

import pytest
import torch
from batch_specs import BatchSpec
from paged_cases import PagedCase, assert_close_to_formula, make_layer
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
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


def test_report_01_full_cache_in_a_step() -> None:
    spec = BatchSpec("full", (1,) * 8, (128,) * 8, is_full=True)
    case = make_case(spec, make_layer())
    assert case.num_pages == 64 + 1, "the pages in use and vLLM's null page"
    assert_close_to_formula(case, run_step(case, max_model_len=128, max_num_seqs=8))


@pytest.mark.parametrize("padded_seq_len", [0, 1])
def test_report_02_dummy_batch_padding_in_a_step(padded_seq_len: int) -> None:
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
def test_report_03_dummy_request_longer_than_its_row_in_a_step(max_seq_len: int) -> None:
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


def test_report_05_kernel_page_size_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_report_06_decodes_behind_a_short_extend_in_a_step() -> None:
    case = make_case(BatchSpec("extend", (1, 4, 4, 4), (40, 20, 30, 64)), make_layer())
    layer = make_layer_double(case)
    metadata = make_builder(case, {"layer": layer}, num_speculative_tokens=3).build(0, common_metadata(case))
    (plans,) = metadata.plans.values()
    assert tokens_of(plans.decode) == slice(0, 13)
    assert plans.prefill is None
    assert_close_to_formula(case, forward(layer, case, metadata))


def test_report_07_rows_are_cut_by_requests_not_by_tokens_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(BatchSpec("drafts", (4, 4, 4, 4, 30), (20, 4, 33, 64, 50)), make_layer())
    batches = planned_batches(monkeypatch)
    out = run_step(case, num_speculative_tokens=3)
    _, prefill = batches
    assert torch.equal(prefill.block_tables, case.block_tables[4:])
    assert_close_to_formula(case, out)


def test_report_08_chunked_prefill_length_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_report_11_window_off_by_one_in_a_step(window: int, masked: int) -> None:
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


def test_report_12_empty_kv_in_a_batch_in_a_step() -> None:
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


def test_report_13_profile_run_against_prefill_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
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
