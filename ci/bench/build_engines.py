"""Metadata builders as an engine makes them, without an engine: a real configuration, layers and cache spec of vLLM."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.worker.utils import select_common_block_size

from ci.bench.build_rows import BATCH_SIZES, CHUNK, DRAFTS, SEQ_LENS
from ci.bench.build_steps import StepFeed
from ci.bench.rows import BACKENDS, ngram_speculation

NUM_PAGES = 1 << 16
# Room for the longest request, the chunk and the tokens that come in the steps.
MAX_SEQ_LEN = SEQ_LENS[-1] + 4096
MAX_NUM_TOKENS = 8192
assert (1 + DRAFTS) * BATCH_SIZES[-1] + CHUNK <= MAX_NUM_TOKENS
# More than a builder keeps plans of, see `vllm_attn_plugin.recent_steps.MOST_KEPT`.
BUFFER_SETS = 12


@dataclass(frozen=True)
class BuilderSubject:
    """A builder, and what steps it is fed from.

    Attributes:
        builder: of the class that vLLM takes from the backend.
        feed: its engine's buffers.
        page_size: tokens a page, as vLLM gives it to the builder.
    """

    builder: Any
    feed: StepFeed
    page_size: int


def make_builder(name: str, model: Path, kv_dtype: str, drafts: int, device: torch.device) -> BuilderSubject:
    """The builder of an engine that serves a model with one of the backends.

    Args:
        name: of the backend, see `ci.bench.rows.BACKENDS`.
        model: folder with a Llama configuration; no weights.
        kv_dtype: "auto" or "fp8".
        drafts: n-gram draft tokens, 0 without speculation.
        device: where the cache would live.

    Raises:
        Exception: whatever vLLM, or the backend, refuses.
    """
    config = _engine_config(name, model, kv_dtype, drafts)
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype), device:
        layers = _make_layers(config)
        current_platform.update_block_size_for_backend(config)
        first = next(iter(layers.values()))
        backend, spec = first.get_attn_backend(), first.get_kv_cache_spec(config)
        layouts = [layout.name for layout in get_supported_kv_cache_layouts([backend])]
        resolve_kv_cache_layout(config, [layouts], [spec])
        page_size = select_common_block_size(spec.block_size, [backend], [spec])
        spec = spec.copy_with_new_block_size(page_size)
        for layer in layers.values():
            # A builder asks a cache for its pages at most, so that one number stands for all that it holds.
            layer.kv_cache = torch.zeros(1, 1, 1, 1, dtype=spec.dtype).expand(
                NUM_PAGES, spec.num_kv_heads, page_size, 2 * spec.head_size
            )
        builder = backend.get_builder_cls()(spec, list(layers), config, device)
    feed = StepFeed(device, page_size, NUM_PAGES, BATCH_SIZES[-1], MAX_SEQ_LEN, MAX_NUM_TOKENS, BUFFER_SETS)
    return BuilderSubject(builder, feed, page_size)


def _engine_config(name: str, model: Path, kv_dtype: str, drafts: int) -> VllmConfig:
    arguments: dict[str, Any] = {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "hf_overrides": {"max_position_embeddings": MAX_SEQ_LEN},
        "max_model_len": MAX_SEQ_LEN,
        "max_num_seqs": BATCH_SIZES[-1],
        "max_num_batched_tokens": MAX_NUM_TOKENS,
        "kv_cache_dtype": kv_dtype,
        "attention_backend": BACKENDS[name].selected,
        "speculative_config": ngram_speculation(drafts) if drafts else None,
        **BACKENDS[name].engine,
    }
    return EngineArgs(**arguments).create_engine_config()


def _make_layers(config: VllmConfig) -> dict[str, Any]:
    """The model's attention layers by name, as its own code makes them."""
    model = config.model_config
    head_size = model.get_head_size()
    return {
        name: Attention(
            model.get_num_attention_heads(config.parallel_config),
            head_size,
            scale=head_size**-0.5,
            num_kv_heads=model.get_num_kv_heads(config.parallel_config),
            cache_config=config.cache_config,
            prefix=name,
        )
        for name in (f"model.layers.{i}.self_attn.attn" for i in range(model.hf_config.num_hidden_layers))
    }
