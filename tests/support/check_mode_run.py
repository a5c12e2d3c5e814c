"""A real engine in check mode that is handed faults: `python check_mode_run.py 0|1`; prints what it said and answered.

Each fault is put into a copy of a real step's metadata and offered to the real builder of the engine, which must
refuse it; then the step goes on as it was, so that the answers at the end are those of an untouched engine.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_ATTN_PLUGIN_CHECK"] = sys.argv[1] if len(sys.argv) > 1 else "1"

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 2,
    "vocab_size": 2000,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}
SAID: dict[str, str] = {}


def make_engine(folder: str) -> Any:
    """A small model without weights; CUDA graphs where there is a GPU."""
    from vllm import LLM

    (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
    return LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        attention_backend="CUSTOM",
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=64 << 20,
        gpu_memory_utilization=0.1,
        enforce_eager=not torch.cuda.is_available(),
        block_size=16,
    )


def give_weights(model: torch.nn.Module) -> None:
    """Weights that tell one answer from another; those of `load_format="dummy"` are too small for that."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        is_norm = parameter.dim() == 1
        random = torch.randn(parameter.shape, generator=generator) * 0.1
        parameter.data.copy_(torch.ones_like(random) if is_norm else random)


def page_past_the_end(common: Any, num_pages: int) -> dict[str, torch.Tensor]:
    """The first page of the second request is one that the cache does not have."""
    tables = common.block_table_tensor.clone()
    tables[1, 0] = num_pages
    return {"block_table_tensor": tables}


def length_beyond_the_row(common: Any, num_pages: int) -> dict[str, torch.Tensor]:
    """The second request is longer than its row of the table."""
    del num_pages
    seq_lens = common.seq_lens.clone()
    seq_lens[1] = common.block_table_tensor.shape[1] * 16 + 1
    return {"seq_lens": seq_lens}


def duplicate_slot(common: Any, num_pages: int) -> dict[str, torch.Tensor]:
    """The second token is written where the first is."""
    del num_pages
    slots = common.slot_mapping.clone()
    slots[1] = slots[0]
    return {"slot_mapping": slots}


FAULTS: dict[str, Callable[[Any, int], dict[str, torch.Tensor]]] = {
    "page": page_past_the_end,
    "length": length_beyond_the_row,
    "slot": duplicate_slot,
}


def offer_faults() -> None:
    """Wrap the checked builder: the first real step of several requests is offered with each fault, then as it is."""
    from vllm_attn_plugin.checked import CheckedMetadataBuilder, CheckError
    from vllm_attn_plugin.kernels.workspace import workspaces

    build = CheckedMetadataBuilder.build

    def offered(self: Any, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
        def try_step(fault: str, step: Any) -> None:
            try:
                build(self, common_prefix_len, step, fast_build)
            except CheckError as error:
                SAID[fault] = str(error)

        num_pages = self._layers[0].kv_cache.shape[0]
        if "page" not in SAID and common.num_reqs > 1 and num_pages and int(common.slot_mapping[:2].min()) >= 0:
            for fault, spoil in FAULTS.items():
                try_step(fault, replace(common, **spoil(common, num_pages)))
            counters = workspaces(self.device).trtllm
            if counters is not None:
                counters[7] = 1
                try_step("counter", common)
                counters[7] = 0
        return build(self, common_prefix_len, common, fast_build)

    CheckedMetadataBuilder.build = offered  # type: ignore[method-assign]


def main() -> None:
    """Serve a dozen requests; print the device, what was said of each fault, and the answers."""
    from vllm import SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        llm = make_engine(folder)
        llm.apply_model(give_weights)
        if os.environ["VLLM_ATTN_PLUGIN_CHECK"] == "1":
            offer_faults()
        prompts = [[(37 * i + 11 * j + i * j) % 1900 + 50 for j in range(5 + 29 * i)] for i in range(12)]
        sampling = SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)
    completions = [output.outputs[0] for output in outputs]
    answer = {
        "device": str(llm.llm_engine.vllm_config.device_config.device_type),
        "said": SAID,
        "tokens": [list(one.token_ids) for one in completions],
        "logprobs": [[s[t].logprob for s, t in zip(o.logprobs, o.token_ids, strict=True)] for o in completions],
    }
    print("answer " + json.dumps(answer), flush=True)
    # An engine may take minutes to shut down, and nothing more is wanted of it.
    os._exit(0)


if __name__ == "__main__":
    main()
