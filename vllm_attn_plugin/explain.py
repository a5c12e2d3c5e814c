"""What would serve a model here, or on a GPU that is named, and why: asked of the dispatch as an engine asks it."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from vllm_attn_plugin.backend import (
    CACHE_DTYPES,
    engine_to_be,
    this_machine,
)
from vllm_attn_plugin.block_sizes import DEFAULT_PAGE_SIZE, kernel_page_size, preferred_block_size
from vllm_attn_plugin.builder import engine_params
from vllm_attn_plugin.impl import layer_params
from vllm_attn_plugin.kernels import EngineParams, KernelChoice, LayerParams, NoKernelError, Phase, choose
from vllm_attn_plugin.kernels.passed_over import why_not
from vllm_attn_plugin.kernels.timed_batch import dtype_named
from vllm_attn_plugin.machine import Machine
from vllm_attn_plugin.model import Model, ModelError, ModelLayer
from vllm_attn_plugin.settings import Settings

CPU_BLOCK_SIZE = 128  # vLLM's own default on a CPU
# vLLM takes more on GPUs with 70 GiB and more; what serves is the same for every number above the largest limit.
DEFAULT_MAX_NUM_SEQS = 256
FIRST_WITH_BFLOAT16 = (8, 0)


@dataclass(frozen=True)
class Asked:
    """What the engine would be started with.

    Attributes:
        kv_cache_dtype, block_size, tensor_parallel_size, max_model_len, max_num_seqs: vLLM's options of these names;
            None for vLLM's default.
        speculative_tokens: drafts a step.
        dtype: of the activations, torch's name, or "auto".
    """

    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    speculative_tokens: int = 0
    dtype: str = "auto"


@dataclass(frozen=True)
class Served:
    """One phase of a group of layers.

    Attributes:
        choice: what serves; None where nothing does.
        refusal: why nothing does, a sentence; empty where something does.
        others: the reasons against each kernel that does not serve.
    """

    choice: KernelChoice | None
    refusal: str
    others: dict[str, list[str]]


@dataclass(frozen=True)
class Group:
    """Layers that are alike.

    Attributes:
        layers: their indices.
        params: what each asks of its kernels.
        phases: what serves it.
    """

    layers: list[int]
    params: LayerParams
    phases: dict[Phase, Served]


@dataclass(frozen=True)
class Explained:
    """What would serve a model."""

    model: Model
    engine: EngineParams
    groups: list[Group]

    @property
    def is_served(self) -> bool:
        """Whether every layer has a kernel for both phases, and vLLM would start."""
        served = [one.choice is not None for group in self.groups for one in group.phases.values()]
        return all(served) and not self.model.refusals


def explain(model: Model, asked: Asked, settings: Settings, machine: Machine | None = None) -> Explained:
    """Ask the dispatch for every kind of layer of a model, as the attention layers and their builder do in an engine.

    Args:
        model: its layers.
        asked: the engine's options.
        settings: this environment's, which may force kernels.
        machine: where it would run; default this machine.

    Raises:
        ModelError: an option does not fit the model.
    """
    machine = machine or this_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    config = _engine_config(model, asked)
    page_size = _page_size(asked, machine)
    engine = engine_params(config, SimpleNamespace(block_size=page_size), machine.device, machine)
    groups: dict[LayerParams, list[int]] = {}
    for index, layer in model.layers.items():
        params = _layer_params(layer, model, asked, machine, engine_to_be(machine, config))
        groups.setdefault(params, []).append(index)
    return Explained(
        model,
        engine,
        [
            Group(layers, params, {phase: _served(phase, params, engine, settings) for phase in Phase})
            for params, layers in groups.items()
        ],
    )


def _served(phase: Phase, params: LayerParams, engine: EngineParams, settings: Settings) -> Served:
    forced = settings.forced_kernel(phase)
    try:
        choice = choose(phase, params, engine, forced)
    except NoKernelError as error:
        return Served(None, str(error), why_not(phase, params, engine, None, forced))
    return Served(choice, "", why_not(phase, params, engine, choice, forced))


def ranges(choice: KernelChoice) -> Iterator[tuple[str, int | None]]:
    """The kernels of a phase, each with the largest batch that it serves; None for the last."""
    limits = [*choice.kernels.limits, None]
    return ((kernel.name, limit) for kernel, limit in zip(choice.kernels, limits, strict=True))


def _engine_config(model: Model, asked: Asked) -> Any:
    """What the builder reads of vLLM's configuration, with vLLM's defaults."""
    drafts = SimpleNamespace(num_speculative_tokens=asked.speculative_tokens, parallel_drafting=False)
    max_model_len = asked.max_model_len or model.max_model_len
    return SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=None, cudagraph_capture_sizes=None),
        cache_config=SimpleNamespace(kv_cache_layout=None),
        scheduler_config=SimpleNamespace(max_num_seqs=asked.max_num_seqs, max_num_batched_tokens=max_model_len),
        model_config=SimpleNamespace(max_model_len=max_model_len),
        attention_config=SimpleNamespace(use_trtllm_attention=None),
        speculative_config=drafts if asked.speculative_tokens else None,
        use_v2_model_runner=True,
    )


def _page_size(asked: Asked, machine: Machine) -> int:
    is_gpu = machine.device.type == "cuda"
    block_size = asked.block_size or (preferred_block_size(machine.compute_capability) if is_gpu else CPU_BLOCK_SIZE)
    if block_size % DEFAULT_PAGE_SIZE:
        raise ModelError(f"--block-size {block_size} is no multiple of {DEFAULT_PAGE_SIZE}; give one that is.")
    return kernel_page_size(block_size, machine.compute_capability)


def _layer_params(layer: ModelLayer, model: Model, asked: Asked, machine: Machine, engine: EngineParams) -> LayerParams:
    """What a layer asks of its kernels on one of the GPUs that share its heads."""
    num_gpus = asked.tensor_parallel_size
    if layer.num_heads % num_gpus or (layer.num_kv_heads % num_gpus and num_gpus % layer.num_kv_heads):
        raise ModelError(
            f"{layer.num_heads} query heads over {layer.num_kv_heads} KV heads cannot be split over "
            f"--tensor-parallel-size {num_gpus}; it must divide the query heads, and divide or be a multiple of the KV "
            "heads."
        )
    named = asked.kv_cache_dtype
    cache_name = model.kv_cache_dtype if named == "auto" else named
    dtype = _model_dtype(model, asked, machine)
    if cache_name not in ("auto", *CACHE_DTYPES):
        raise ModelError(f"--kv-cache-dtype {cache_name} is not served; use auto or one of: {', '.join(CACHE_DTYPES)}.")
    return layer_params(
        num_heads=layer.num_heads // num_gpus,
        head_size=layer.head_size,
        scale=layer.scale,
        num_kv_heads=max(1, layer.num_kv_heads // num_gpus),
        model_dtype=dtype,
        sliding_window=layer.sliding_window,
        kv_cache_dtype=cache_name,
        logits_soft_cap=layer.logits_soft_cap,
        has_sinks=layer.has_sinks,
        has_alibi=layer.has_alibi,
        engine=engine,
    )


def _model_dtype(model: Model, asked: Asked, machine: Machine) -> torch.dtype:
    """The dtype that vLLM takes: a float32 model becomes the first half dtype that the machine has."""
    if asked.dtype != "auto":
        try:
            return dtype_named(asked.dtype)
        except ValueError as error:
            raise ModelError(str(error)) from error
    if model.dtype != torch.float32:
        return model.dtype
    is_old = machine.compute_capability is not None and machine.compute_capability < FIRST_WITH_BFLOAT16
    return torch.float16 if is_old else torch.bfloat16
