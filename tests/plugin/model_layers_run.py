"""What vLLM's own code hands our attention layers, and what the dispatch then chooses: `FOLDER CACHE_DTYPE...`.

Builds each model of a folder without memory (torch's meta device), as an engine does, with the machine replaced by one
of each GPU family, and prints per layer what the impl made of its arguments and the kernels of both phases. A process
of its own: vLLM sets its parallel groups up once.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_attn_plugin import backend, block_sizes, impl
from vllm_attn_plugin.builder import engine_params
from vllm_attn_plugin.kernels import NoKernelError, Phase, choose
from vllm_attn_plugin.machine import Machine, named_machine
from vllm_attn_plugin.settings import settings

GPUS = ("SM80", "SM90", "SM100", "SM120")


def vllm_config(folder: Path, cache_dtype: str, drafts: int) -> VllmConfig:
    """The configuration of an engine that has not started."""
    speculation: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 2}
    arguments = EngineArgs(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        kv_cache_dtype=cache_dtype,  # type: ignore[arg-type]
        max_num_seqs=200,
        max_model_len=4096,
        speculative_config=speculation if drafts else None,
    )
    config = arguments.create_engine_config()
    config.attention_config.backend = AttentionBackendEnum.CUSTOM
    return config


def layers_on(machine: Machine, config: VllmConfig) -> list[dict[str, Any]]:
    """Every layer of the model as the impl and the builder see it on a machine."""
    original = impl.engine_to_be
    impl.engine_to_be = lambda: backend.engine_to_be(machine, config)
    try:
        with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
            initialize_model(vllm_config=config)
    finally:
        impl.engine_to_be = original
    found = []
    for name, layer in config.compilation_config.static_forward_context.items():
        if not isinstance(getattr(layer, "impl", None), impl.AttnPluginImpl):
            continue
        block_size = block_sizes.preferred_block_size(machine.compute_capability)
        page_size = block_sizes.kernel_page_size(block_size, machine.compute_capability)
        engine = engine_params(config, SimpleNamespace(block_size=page_size), machine.device, machine)
        kernels = {phase.value: chosen(phase, layer.impl.params, engine) for phase in Phase}
        found.append({"name": name, "params": repr(layer.impl.params), **kernels})
    config.compilation_config.static_forward_context.clear()
    return found


def chosen(phase: Phase, params: Any, engine: Any) -> str:
    """The kernels as the log names them, or the refusal."""
    try:
        return str(choose(phase, params, engine, settings().forced_kernel(phase)))
    except NoKernelError as error:
        return str(error)


def main() -> None:
    """Print one JSON document: by model, cache dtype and drafts, and GPU."""
    folder, cases = Path(sys.argv[1]), [case.split(",") for case in sys.argv[2:]]
    found: dict[str, Any] = {}
    for name, cache_dtype, drafts in cases:
        config = vllm_config(folder / name, cache_dtype, int(drafts))
        if not found:
            with set_current_vllm_config(config):
                init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
                initialize_model_parallel(1, 1)
        for gpu in GPUS:
            found[f"{name},{cache_dtype},{drafts},{gpu}"] = layers_on(named_machine(gpu), config)
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main()
