"""A real engine in this process, on a small model without weights: `python engine_run.py`; test_engine.py starts it.

Mixed steps run with torch's check for synchronisation on inside `build`, `do_kv_cache_update` and `forward`; then a
cached prefix must give what the same prompt gave without the cache.
"""

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 2,
    "vocab_size": 2000,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
CALLS: Counter[str] = Counter()


def make_engine(folder: str) -> Any:
    """An eager engine whose steps hold at most 256 tokens, so that prompts come in chunks beside decodes."""
    from vllm import LLM

    (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
    return LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        attention_backend="CUSTOM",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=1 << 30,
        gpu_memory_utilization=0.1,
        enable_prefix_caching=True,
    )


def without_waiting(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method with torch's check on: an operation that waits for the device raises."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return method(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            CALLS[method.__qualname__] += 1

    return checked


def check_everything() -> None:
    """Put the check around what runs in a step, and count the steps that hold both phases."""
    from vllm_attn_plugin.builder import AttnPluginMetadataBuilder
    from vllm_attn_plugin.impl import AttnPluginImpl

    build = without_waiting(AttnPluginMetadataBuilder.build)

    def counted(*args: Any, **kwargs: Any) -> Any:
        metadata = build(*args, **kwargs)
        plans = next(iter(metadata.plans.values()))
        CALLS["mixed steps"] += plans.decode is not None and plans.prefill is not None
        return metadata

    AttnPluginMetadataBuilder.build = counted  # type: ignore[method-assign]
    for name in ("forward", "do_kv_cache_update"):
        setattr(AttnPluginImpl, name, without_waiting(getattr(AttnPluginImpl, name)))


def generate(llm: Any, prompts: list[list[int]], max_tokens: int) -> list[Any]:
    """Requests with their greedy completions and the logprob of each token."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=1, ignore_eos=True, detokenize=False)
    outputs: list[Any] = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)
    return outputs


def prompt(number: int, length: int) -> list[int]:
    """Token ids that no other prompt starts with."""
    return [(number * 37 + 11 * j + number * j) % 1900 + 50 for j in range(length)]


def run_mixed_steps(llm: Any) -> None:
    """Many requests of many lengths, more than the engine holds at once."""
    prompts = [prompt(number, 5 + (number * number * 7) % 700) for number in range(40)]
    generate(llm, prompts, 2)  # compiles
    llm.reset_prefix_cache()
    check_everything()
    generate(llm, prompts, 30)


def run_over_cached_prefix(llm: Any) -> None:
    """The same prompts with the cache empty and with all but their last pages in it."""
    prompts = [prompt(number, 600 + 16 * number) for number in range(8)]
    llm.reset_prefix_cache()
    cold = generate(llm, prompts, 8)
    warm = generate(llm, prompts, 8)
    for first, second in zip(cold, warm, strict=True):
        assert not first.num_cached_tokens
        assert second.num_cached_tokens >= 500, "the prefix was not taken from the cache"
        pairs = zip(first.outputs[0].logprobs, second.outputs[0].logprobs, first.outputs[0].token_ids, strict=True)
        for a, b, token in pairs:
            assert abs(a[token].logprob - b[token].logprob) < 2e-2, "a cached prefix changed the answer"


def main() -> None:
    """Run both checks; an exception where one fails."""
    with tempfile.TemporaryDirectory() as folder:
        llm = make_engine(folder)
        run_mixed_steps(llm)
        run_over_cached_prefix(llm)
    calls = {name.rsplit(".", 1)[-1]: count for name, count in CALLS.items()}
    print("calls " + json.dumps(calls))


if __name__ == "__main__":
    sys.exit(main())
