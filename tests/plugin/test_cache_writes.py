"""When new keys and values go to the cache: at once, or with a layer's attention."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batch_specs import SPECS
from paged_cases import make_layer
from vllm.config import CUDAGraphMode
from vllm_doubles import common_metadata, forward, make_builder, make_case, make_layer_double

from vllm_attn_plugin import cache_writes
from vllm_attn_plugin.builder import LayerPlans
from vllm_attn_plugin.cache_writes import CacheWrites, writes_kv
from vllm_attn_plugin.kernels import NewKV

BF16 = torch.bfloat16


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def new_kv(num_tokens: int = 3) -> NewKV:
    k, v = (torch.zeros(num_tokens, 2, 64, dtype=BF16).as_subclass(OnGpu) for _ in range(2))
    return NewKV(k, v, torch.arange(num_tokens))


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A forward pass without graphs."""
    context = SimpleNamespace(cudagraph_runtime_mode=CUDAGraphMode.NONE)
    monkeypatch.setattr(cache_writes, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(cache_writes, "get_forward_context", lambda: context)
    return context


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.FULL])
def test_keys_and_values_are_left_to_attention_once(engine: SimpleNamespace, mode: CUDAGraphMode) -> None:
    engine.cudagraph_runtime_mode = mode
    writes, given = CacheWrites(make_layer(dtype=BF16)), new_kv()
    assert writes.leave(given)
    assert writes.take(given.k) is given
    assert writes.take(given.k) is None


def test_graphs_of_pieces_between_attention_layers_write_at_once(engine: SimpleNamespace) -> None:
    engine.cudagraph_runtime_mode = CUDAGraphMode.PIECEWISE
    assert not CacheWrites(make_layer(dtype=BF16)).leave(new_kv())


def test_quantized_caches_and_caches_in_host_memory_are_written_at_once() -> None:
    assert not CacheWrites(make_layer(dtype=BF16, kv_dtype=torch.float8_e4m3fn)).leave(new_kv())
    on_cpu = NewKV(*(torch.zeros(3, 2, 64) for _ in range(2)), torch.arange(3))
    assert not CacheWrites(make_layer()).leave(on_cpu)


def test_what_runs_outside_of_an_engine_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_writes, "is_forward_context_available", lambda: False)
    assert not CacheWrites(make_layer(dtype=BF16)).leave(new_kv())


def test_keys_of_another_step_are_refused() -> None:
    writes = CacheWrites(make_layer(dtype=BF16))
    assert writes.leave(new_kv(3))
    with pytest.raises(
        RuntimeError, match=r"keys of 3 tokens to cache, .* of 5 tokens; set VLLM_ATTN_PLUGIN_DECODE_KERNEL"
    ):
        writes.take(new_kv(5).k)


def plan_of(writes: bool) -> Any:
    return SimpleNamespace(kernel=SimpleNamespace(writes_kv=writes))


def test_a_kernel_writes_only_where_it_serves_the_whole_step() -> None:
    assert writes_kv(LayerPlans(decode=plan_of(True), prefill=None))
    assert not writes_kv(LayerPlans(decode=plan_of(False), prefill=None))
    assert not writes_kv(LayerPlans(decode=plan_of(True), prefill=plan_of(False)))
    assert not writes_kv(LayerPlans(decode=None, prefill=plan_of(False)))


def test_what_was_left_is_in_the_cache_before_a_kernel_that_writes_nothing_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An empty cache, and a step that brings all keys: where they were not written, the answer would be another."""
    monkeypatch.setattr(CacheWrites, "leave", lambda self, given: setattr(self, "_left", given) is None)
    case = make_case(SPECS["prefill"], make_layer())
    layer = make_layer_double(case)
    layer.kv_cache = torch.zeros_like(case.kv_cache)
    metadata = make_builder(case, {"layer": layer}).build(0, common_metadata(case))
    exact, _ = case.expected()
    assert (forward(layer, case, metadata).double() - exact).abs().max() < 1e-5
    assert layer.kv_cache.any()
