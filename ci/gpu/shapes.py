"""Published architectures without weights: real heads, windows, soft caps and sinks; with few layers quick to start."""

import json
from pathlib import Path
from typing import Any

LAYERS = 4

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": _LLAMA,
    "qwen3-8b": {
        **_LLAMA,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 128,
        "intermediate_size": 12288,
    },
    "gemma-2-2b": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
        "sliding_window": 512,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
    },
}


def write_config(name: str, folder: Path, layers: int = LAYERS) -> Path:
    """Write a shape's `config.json` into `folder`, which then serves with `load_format="dummy"`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"num_hidden_layers": layers, "torch_dtype": "bfloat16", **SHAPES[name]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
