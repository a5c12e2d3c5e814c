"""What the backend class answers before a model is built."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionType, MultipleOf
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheLayout
from vllm_doubles import engine_config

from vllm_attn_plugin import backend
from vllm_attn_plugin.backend import AttnPluginBackend
from vllm_attn_plugin.builder import AttnPluginMetadataBuilder
from vllm_attn_plugin.impl import AttnPluginImpl
from vllm_attn_plugin.kernels import SHIPPED, EngineParams, LayerParams, Phase, Shelf, Toolchain
from vllm_attn_plugin.settings import settings

GOOD: dict[str, Any] = {
    "head_size": 64,
    "dtype": torch.float32,
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": None,
    "attn_type": AttentionType.DECODER,
}


def reasons(**changes: Any) -> list[str]:
    return AttnPluginBackend.validate_configuration(**{**GOOD, **changes})


def test_names_and_classes() -> None:
    assert AttnPluginBackend.get_name() in AttentionBackendEnum.__members__
    assert AttnPluginBackend.get_name() == "CUSTOM"
    assert AttnPluginBackend.get_impl_cls() is AttnPluginImpl
    assert AttnPluginBackend.get_builder_cls() is AttnPluginMetadataBuilder
    assert not AttnPluginBackend.forward_includes_kv_cache_update


def test_layouts_are_all_there_are_head_major_first() -> None:
    layouts = AttnPluginBackend.supported_kv_cache_layouts()
    assert layouts[0] == KVCacheLayout.LBHNC
    assert set(layouts) == set(KVCacheLayout)
    assert len(layouts) == len(set(layouts))


@pytest.mark.parametrize(
    "changes",
    [
        *({"dtype": dtype} for dtype in (torch.float32, torch.float16, torch.bfloat16)),
        *({"head_size": size} for size in (1, 64, 80, 96, 128, 256)),
        *({"block_size": size} for size in (None, 16, 32, 48, 64, 128, 544)),
        *({"kv_cache_dtype": name} for name in (None, "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")),
        {"has_sink": True},
        {"has_sliding_window": True},
        {"use_non_causal": True},
        {"use_kv_connector": True},
    ],
    ids=str,
)
def test_served(changes: dict[str, Any]) -> None:
    assert reasons(**changes) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dtype": torch.float64}, "dtype torch.float64 not supported; use one of: float32, float16, bfloat16"),
        ({"head_size": 0}, "head_size 0 not supported; it must be 1 or more"),
        ({"block_size": 8}, "block_size 8 not supported; use a multiple of 16"),
        ({"block_size": 100}, "block_size 100 not supported; use a multiple of 16"),
        (
            {"kv_cache_dtype": "nvfp4"},
            "kv_cache_dtype 'nvfp4' needs a GPU of compute capability 10.x; use one of: auto, float16, bfloat16, fp8, "
            "fp8_e4m3, fp8_e5m2",
        ),
    ],
    ids=["dtype", "head_size", "block_size_8", "block_size_100", "kv_cache_dtype"],
)
def test_refused_in_one_sentence_with_value_and_limit(changes: dict[str, Any], expected: str) -> None:
    assert reasons(**changes) == [expected]


@pytest.mark.parametrize(
    "changes",
    [
        {"use_mla": True},
        {"use_sparse": True},
        {"use_mm_prefix": True},
        {"use_per_head_quant_scales": True},
        {"attn_type": AttentionType.ENCODER_ONLY},
        {"use_rswa": True},
        {"use_batch_invariant": True},
        {"use_pcp": True},
        {"use_dcp": True},
        # Drafts trimmed on the device: the host's query lengths, which plans are made of, are then too long.
        {"use_adaptive_verification": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_refused_because_nothing_here_implements_it(changes: dict[str, Any]) -> None:
    (reason,) = reasons(**changes)
    assert "not supported" in reason


def test_several_reasons_come_together() -> None:
    assert len(reasons(dtype=torch.float64, head_size=0, block_size=3, kv_cache_dtype="int3")) == 4


def test_answers_one_by_one() -> None:
    assert AttnPluginBackend.supports_sink()
    assert AttnPluginBackend.supports_sliding_window()
    assert AttnPluginBackend.supports_non_causal()
    assert AttnPluginBackend.supports_attn_type(AttentionType.DECODER)
    assert not AttnPluginBackend.supports_attn_type(AttentionType.ENCODER)
    assert not AttnPluginBackend.is_mla()
    assert not AttnPluginBackend.supports_mm_prefix()
    assert not AttnPluginBackend.supports_alibi_sqrt()
    assert AttnPluginBackend.get_supported_kernel_block_sizes() == [MultipleOf(16)]
    assert AttnPluginBackend.get_supported_kernel_block_sizes(None) == [MultipleOf(16)]


def test_kernel_that_cannot_serve_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_attn_plugin.kernels import dispatch
    from vllm_attn_plugin.kernels.reference import ReferenceKernel

    class Picky(ReferenceKernel):
        name = "picky"

        @classmethod
        def reasons_against(cls, phase: Any, layer: Any, engine: Any) -> list[str]:
            return [f"head_dim {layer.head_dim} is above 32"]

    monkeypatch.setitem(dispatch.KERNELS, "picky", Picky)
    monkeypatch.setenv("VLLM_ATTN_PLUGIN_DECODE_KERNEL", "picky")
    settings.cache_clear()
    assert reasons() == [
        "no decode kernel can serve this layer: picky (head_dim 64 is above 32); "
        "unset VLLM_ATTN_PLUGIN_DECODE_KERNEL or set it to auto"
    ]


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a GPU, as far as the backend asks."""
    platform = SimpleNamespace(
        is_cuda=lambda: True, device_type="cuda", get_device_capability=lambda: DeviceCapability(9, 0)
    )
    monkeypatch.setattr(backend, "current_platform", platform)
    monkeypatch.setattr(backend, "find_toolchain", Toolchain)


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("block_size", [None, 16, 32, 48, 64, 128, 544])
def test_block_that_splits_into_a_page_of_the_kernels_is_served(block_size: int | None) -> None:
    on_hopper = {"dtype": torch.bfloat16, "device_capability": DeviceCapability(9, 0)}
    assert reasons(block_size=block_size, **on_hopper) == []


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.usefixtures("without_triton_decode")
def test_both_phases_are_refused_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Toolchain(has_flashinfer=False, flash_attention3_problem="FlashAttention 3 is not here")
    monkeypatch.setattr(backend, "find_toolchain", lambda: machine)
    found = reasons(dtype=torch.bfloat16, device_capability=DeviceCapability(9, 0))
    assert len(found) == 2
    assert all("flashinfer-python is not installed, install vllm-attn-plugin[gpu]" in reason for reason in found)


@pytest.mark.parametrize(("major", "default", "expected"), [(9, 16, 128), (9, 256, 256), (10, 16, 16), (8, 16, 16)])
@pytest.mark.usefixtures("on_cuda")
def test_blocks_of_128_are_preferred_where_kernels_gain_from_them(
    major: int, default: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend.current_platform, "get_device_capability", lambda: DeviceCapability(major, 0))
    assert AttnPluginBackend.get_preferred_block_size(default) == expected


@pytest.mark.parametrize(("major", "expected"), [(9, [16, 32, 64, 128]), (8, [16, 32, 64]), (10, [16, 32, 64])])
@pytest.mark.usefixtures("on_cuda")
def test_vllm_is_told_the_pages_of_the_gpu_s_kernels(
    major: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend.current_platform, "get_device_capability", lambda: DeviceCapability(major, 0))
    assert AttnPluginBackend.get_supported_kernel_block_sizes() == expected


def test_block_size_on_a_cpu_is_vllm_s() -> None:
    assert AttnPluginBackend.get_preferred_block_size(16) == 16


@pytest.mark.usefixtures("on_cuda")
def test_what_the_engine_fixes_reaches_the_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[LayerParams, EngineParams]] = []

    def record(phase: Phase, layer: LayerParams, engine: EngineParams, forced: str | None) -> None:
        asked.append((layer, engine))

    monkeypatch.setattr(backend, "choose", record)
    monkeypatch.setattr(
        backend, "get_current_vllm_config_or_none", lambda: engine_config(use_trtllm=False, speculation=True)
    )
    assert reasons(dtype=torch.bfloat16, block_size=128, device_capability=DeviceCapability(9, 0)) == []
    assert len(asked) == 2
    for layer, engine in asked:
        assert (layer.num_qo_heads, layer.num_kv_heads) == (16, 4)
        assert (engine.max_batch_size, engine.max_decode_q_len, engine.use_trtllm) == (64, 4, False)
        assert (engine.page_size, engine.compute_capability) == (128, (9, 0))


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("capability", "is_asked"), [((9, 0), False), ((10, 0), True), ((12, 0), False), (None, False)]
)
def test_binaries_are_asked_for_only_where_trtllm_gen_runs(
    capability: tuple[int, int] | None, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(backend, "has_nvidia_artifactory", lambda: bool(asked.append("asked")))
    assert backend.machine_toolchain(capability).has_cubins is not is_asked
    assert bool(asked) is is_asked


def test_use_trtllm_attention_on_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "get_current_vllm_config_or_none", lambda: engine_config(use_trtllm=True))
    (reason,) = reasons()
    assert reason == (
        "use_trtllm_attention=True asks for a TensorRT-LLM decode kernel, and there is none for a CPU; "
        "leave use_trtllm_attention unset"
    )


def test_tables_of_this_gpu_are_looked_for_here_and_in_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_ATTN_PLUGIN_CACHE", str(tmp_path))
    assert backend.machine_tables() == Shelf()
    gpu = SimpleNamespace(is_cuda=lambda: True, get_device_name=lambda: "NVIDIA H200")
    monkeypatch.setattr(backend, "current_platform", gpu)
    monkeypatch.setattr(backend, "find_toolchain", lambda: Toolchain(flashinfer_version="0.7.2.post1"))
    assert backend.machine_tables() == Shelf("NVIDIA H200", "0.7.2.post1", (tmp_path / "tables", SHIPPED))
