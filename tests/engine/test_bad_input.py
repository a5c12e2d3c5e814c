"""What cannot be served is refused when the engine starts, in one sentence with the value, the limit and the remedy."""

from pathlib import Path
from typing import Any

import pytest
from engine_harness.child import EngineChild
from engine_harness.jobs import Job, Refusal

pytestmark = pytest.mark.engine

SELECTED = "Selected backend CUSTOM cannot serve this model on a CPU: "
CACHE_DTYPES = "use one of: auto, float16, bfloat16, fp8, fp8_e4m3, fp8_e5m2."

REFUSED_BY_US: dict[str, tuple[dict[str, Any], dict[str, str], str, str]] = {
    "block_size": (
        {"block_size": 24},
        {},
        "ValueError",
        SELECTED + "block_size 24 not supported; use a multiple of 16.",
    ),
    "kv_cache_dtype": (
        {"kv_cache_dtype": "nvfp4"},
        {},
        "ValueError",
        SELECTED + "kv_cache_dtype 'nvfp4' needs a GPU of compute capability 10.x; " + CACHE_DTYPES,
    ),
    "kv_cache_dtype_of_one_byte": (
        {"kv_cache_dtype": "int8_per_token_head"},
        {},
        "ValueError",
        SELECTED + "kv_cache_dtype 'int8_per_token_head' not supported; " + CACHE_DTYPES,
    ),
    "unknown_kernel": (
        {},
        {"VLLM_ATTN_PLUGIN_DECODE_KERNEL": "warp"},
        "SettingsError",
        "VLLM_ATTN_PLUGIN_DECODE_KERNEL is 'warp'; set it to one of: auto, ",
    ),
    "kernel_that_cannot_serve": (
        {},
        {"VLLM_ATTN_PLUGIN_DECODE_KERNEL": "xqa"},
        "ValueError",
        SELECTED + "no decode kernel can serve this layer: xqa (it needs SM90 or SM120 or SM121, this is a CPU; "
        "query dtype torch.float32 is none of float16, bfloat16); "
        "unset VLLM_ATTN_PLUGIN_DECODE_KERNEL or set it to auto.",
    ),
    "use_trtllm_attention": (
        {"attention_config": {"use_trtllm_attention": True}},
        {},
        "ValueError",
        SELECTED + "use_trtllm_attention=True asks for a TensorRT-LLM decode kernel, and there is none for a CPU; "
        "leave use_trtllm_attention unset.",
    ),
    "misspelt_variable": (
        {},
        {"VLLM_ATTN_PLUGIN_DECODE_KERNAL": "reference"},
        "SettingsError",
        "VLLM_ATTN_PLUGIN_DECODE_KERNAL is no setting of vllm-attn-plugin; the settings are: ",
    ),
}

# vLLM looks at these before it asks a backend anything; what it says must be in the message that a user sees.
REFUSED_BY_VLLM: dict[str, tuple[dict[str, Any], dict[str, str], str, tuple[str, ...]]] = {
    "dtype_float64": (
        {"dtype": "float64"},
        {},
        "ValidationError",
        ("Input should be 'auto', 'half', 'float16', 'bfloat16', 'float' or 'float32'", "input_value='float64'"),
    ),
    "dtype_int8": (
        {"dtype": "int8"},
        {},
        "ValidationError",
        ("Input should be 'auto', 'half', 'float16', 'bfloat16', 'float' or 'float32'", "input_value='int8'"),
    ),
    "kv_cache_dtype_nobody_knows": (
        {"kv_cache_dtype": "float3"},
        {},
        "ValidationError",
        ("Input should be 'auto', 'float16', 'bfloat16', 'fp8', 'fp8_e4m3', 'fp8_e5m2'", "input_value='float3'"),
    ),
    "layout_nobody_knows": (
        {},
        {"VLLM_KV_CACHE_LAYOUT": "XYZ"},
        "ValueError",
        ("Invalid value 'XYZ' for VLLM_KV_CACHE_LAYOUT. Valid options: ", "'LBHNC'"),
    ),
}


def _refuse(child: EngineChild, model: Path, engine: dict[str, Any], variables: dict[str, str]) -> Refusal:
    refusal = child.refuse(Job(model, "CUSTOM", [], engine, variables))
    assert refusal is not None, "the engine started"
    # No other exception underneath: what a user reads is the first thing that went wrong.
    assert refusal.chain == []
    return refusal


@pytest.mark.parametrize(("engine", "variables", "kind", "message"), REFUSED_BY_US.values(), ids=REFUSED_BY_US)
def test_one_sentence_names_value_limit_and_remedy(
    child: EngineChild, short_smollm2: Path, engine: dict[str, Any], variables: dict[str, str], kind: str, message: str
) -> None:
    refusal = _refuse(child, short_smollm2, engine, variables)

    assert (refusal.kind, refusal.message[: len(message)]) == (kind, message)
    assert refusal.message.endswith(".")
    assert "\n" not in refusal.message
    assert ". " not in refusal.message
    assert refusal.ours, "the refusal should come from this package"


@pytest.mark.parametrize(("engine", "variables", "kind", "parts"), REFUSED_BY_VLLM.values(), ids=REFUSED_BY_VLLM)
def test_vllm_refuses_before_it_asks_us(
    child: EngineChild,
    short_smollm2: Path,
    engine: dict[str, Any],
    variables: dict[str, str],
    kind: str,
    parts: tuple[str, ...],
) -> None:
    refusal = _refuse(child, short_smollm2, engine, variables)

    assert refusal.kind == kind
    assert all(part in refusal.message for part in parts), refusal.message
    assert refusal.ours == []


def test_model_path_that_does_not_exist(child: EngineChild, tmp_path: Path) -> None:
    """VLLM takes a path that is not there for a repository's name, and says so with the path in it."""
    missing = tmp_path / "no-such-model"
    refusal = _refuse(child, missing, {}, {})

    assert refusal.kind == "HFValidationError"
    assert refusal.message.startswith("Repo id must be in the form 'repo_name' or 'namespace/repo_name'")
    assert str(missing) in refusal.message
    assert refusal.ours == []
