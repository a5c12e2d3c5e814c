"""Configurations of published models: the numbers that attention depends on, as their authors give them.

Those that GPU runs serve without weights are taken from there, with what is smaller there at its published size.
"""

import json
from pathlib import Path
from typing import Any

from ci.gpu.shapes import SHAPES

_GEMMA3_TEXT = {
    "model_type": "gemma3_text",
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 131072,
    "vocab_size": 262208,
}
_GEMMA3_4B = {
    **_GEMMA3_TEXT,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 34,
    "sliding_window": 1024,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {**SHAPES["llama-3-8b"], "num_hidden_layers": 32, "vocab_size": 128256},
    "qwen3-8b": {
        **SHAPES["qwen3-8b"],
        "num_hidden_layers": 36,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 8,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
    "qwen2-7b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "num_hidden_layers": 28,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "sliding_window": 131072,
        "use_sliding_window": False,
    },
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_hidden_layers": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "sliding_window": None,
    },
    "phi-3-mini": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "num_hidden_layers": 32,
        "vocab_size": 32064,
        "max_position_embeddings": 4096,
        "sliding_window": 2047,
        "pad_token_id": 32000,
    },
    "gemma-2-2b": {
        **SHAPES["gemma-2-2b"],
        "num_hidden_layers": 26,
        "vocab_size": 256000,
        "sliding_window": 4096,
    },
    "gemma-3-1b": {
        **_GEMMA3_TEXT,
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "num_hidden_layers": 26,
        "sliding_window": 512,
        "max_position_embeddings": 32768,
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": _GEMMA3_4B,
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 27},
    },
    "gpt-oss-20b": {
        **SHAPES["gpt-oss-20b"],
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_hidden_layers": 27,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 102400,
        "max_position_embeddings": 163840,
    },
}


def write(name: str, folder: Path, **changes: Any) -> Path:
    """Write a model's `config.json` into a folder of its own below `folder`, which is returned."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps({"dtype": "bfloat16", **CONFIGS[name], **changes}))
    return target
