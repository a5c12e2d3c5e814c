"""A model's attention layers as vLLM will hand them over, read from its configuration alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

# What vLLM's code for these does with window, soft cap, sinks and scale is the same as below; a test holds each against
# that code.
CHECKED_TYPES = (
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "llama",
    "mistral",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)
FULL, SLIDING = "full_attention", "sliding_attention"
# Kinds of layers that keep a state of their own instead of keys and values.
WITHOUT_KEYS = ("linear_attention", "mamba", "conv", "recurrent")


class ModelError(ValueError):
    """A model's configuration cannot be read, or its attention is none that CUSTOM serves; the message says why."""


@dataclass(frozen=True)
class ModelLayer:
    """What vLLM hands one attention layer, all of the model's heads counted.

    Attributes:
        num_heads, num_kv_heads, head_size: before they are split over GPUs.
        scale: factor on the logits.
        sliding_window: tokens that a query sees, itself included; None for all.
        logits_soft_cap: None for none.
        has_sinks, has_alibi: whether it has attention sinks, and slopes.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None
    logits_soft_cap: float | None
    has_sinks: bool
    has_alibi: bool


@dataclass(frozen=True)
class Model:
    """A model's attention.

    Attributes:
        architecture: its class.
        dtype: of its activations, as its configuration says.
        kv_cache_dtype: what "auto" stands for: "auto", or what a quantized checkpoint asks for.
        max_model_len: longest sequence.
        layers: by their index; layers without attention are left out.
        refusals: why vLLM would not serve it with CUSTOM as it stands, a sentence each.
        notes: what a reader should know, a sentence each.
    """

    architecture: str
    dtype: torch.dtype
    kv_cache_dtype: str
    max_model_len: int
    layers: dict[int, ModelLayer]
    refusals: tuple[str, ...]
    notes: tuple[str, ...]


def read_model(name: str) -> Model:
    """Read a model's configuration.

    Args:
        name: a folder with a `config.json`, or a model's name on the Hugging Face hub.

    Raises:
        ModelError: it cannot be read, or CUSTOM cannot serve its attention.
    """
    config = _read_config(name)
    text = config.get_text_config()
    arch = _architecture(config, text)
    architecture = (arch.architectures or [text.model_type])[0]
    _check_served(architecture, config, arch)
    kinds = _layer_kinds(architecture, text, arch.total_num_hidden_layers)
    layers = {index: _layer(text, arch[index], kind) for index, kind in enumerate(kinds) if kind not in WITHOUT_KEYS}
    return Model(
        architecture=architecture,
        dtype=_dtype(config, text),
        kv_cache_dtype=_checkpoint_cache_dtype(config),
        max_model_len=int(min(arch.derived_max_model_len_and_key[0], 1 << 31)),
        layers=layers,
        refusals=_refusals(arch),
        notes=_notes(text, kinds),
    )


def _read_config(name: str) -> Any:
    from vllm.transformers_utils.config import get_config

    folder = Path(name).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelError(f"the folder {folder} has no config.json; give a model's folder.")
    try:
        return get_config(str(folder) if folder.is_dir() else name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        first = " ".join(str(error).split())[:200].rstrip(".")
        raise ModelError(
            f"the configuration of {name} cannot be read ({first}); give a folder with a config.json, or the name of a "
            "model on the Hugging Face hub that can be reached from here."
        ) from error


def _architecture(config: Any, text: Any) -> Any:
    """What vLLM reads of the configuration: heads, sizes, layers."""
    from vllm.transformers_utils.model_arch_config_convertor import (
        MODEL_ARCH_CONFIG_CONVERTORS,
        ModelArchConfigConvertorBase,
    )

    convertor = MODEL_ARCH_CONFIG_CONVERTORS.get(config.model_type, ModelArchConfigConvertorBase)
    return convertor(config, text).convert()


def _check_served(architecture: str, config: Any, arch: Any) -> None:
    without = "serve it without --attention-backend, so that vLLM picks one that can"
    if arch.is_deepseek_mla:
        raise ModelError(
            f"{architecture} uses multi-head latent attention (MLA), which CUSTOM does not serve; {without}."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{architecture} has an encoder, and CUSTOM serves decoders alone; {without}.")
    if getattr(config.get_text_config(), "is_causal", True) is False:
        raise ModelError(f"{architecture} is an encoder, and CUSTOM serves decoders alone; {without}.")
    if not arch.total_num_attention_heads:
        raise ModelError(f"{architecture} has no attention heads in its configuration; give a model with attention.")


def _layer_kinds(architecture: str, text: Any, num_layers: int) -> list[str]:
    """Each layer's kind, as transformers names them."""
    given: Sequence[str] | None = getattr(text, "layer_types", None)
    if text.model_type == "gpt_oss":
        return [SLIDING if index % 2 == 0 else FULL for index in range(num_layers)]  # whatever the list says
    if given is None:
        # Of such a model every layer has the window that it has at all.
        return [SLIDING] * num_layers
    unknown = sorted(set(given) - {FULL, SLIDING, *WITHOUT_KEYS})
    if unknown:
        raise ModelError(
            f"{architecture} has layers of the kind {', '.join(unknown)}, which explain does not know; start vLLM with "
            "CUSTOM, and its log says what serves them."
        )
    return list(given[:num_layers])


def _layer(text: Any, arch: Any, kind: str) -> ModelLayer:
    scalar = getattr(text, "query_pre_attn_scalar", None)
    multiplier = getattr(text, "attention_multiplier", None)
    has_cap = text.model_type != "gemma3_text"  # vLLM passes none there, whatever the configuration says
    return ModelLayer(
        num_heads=arch.total_num_attention_heads,
        num_kv_heads=arch.total_num_kv_heads,
        head_size=arch.head_size,
        scale=float(multiplier or (scalar or arch.head_size) ** -0.5),
        sliding_window=getattr(text, "sliding_window", None) if kind == SLIDING else None,
        logits_soft_cap=getattr(text, "attn_logit_softcapping", None) if has_cap else None,
        has_sinks=text.model_type == "gpt_oss",
        has_alibi=_has_alibi(text),
    )


def _has_alibi(text: Any) -> bool:
    attention = getattr(text, "attn_config", None) or {}
    in_mpt = attention.get("alibi", False) if isinstance(attention, dict) else getattr(attention, "alibi", False)
    return text.model_type == "bloom" or bool(in_mpt or getattr(text, "alibi", False))


def _dtype(config: Any, text: Any) -> torch.dtype:
    found = getattr(config, "dtype", None) or getattr(text, "dtype", None) or torch.float32
    return found if isinstance(found, torch.dtype) else getattr(torch, str(found).removeprefix("torch."))


def _checkpoint_cache_dtype(config: Any) -> str:
    from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

    return str(resolve_kv_cache_dtype_string("auto", SimpleNamespace(hf_config=config)))


def _refusals(arch: Any) -> tuple[str, ...]:
    if not arch.is_mm_prefix_lm:
        return ()
    return (
        "The tokens of an image see each other, which CUSTOM does not serve: start vLLM with --limit-mm-per-prompt "
        "'{\"image\": 0}', for text alone, or with another --attention-backend.",
    )


def _notes(text: Any, kinds: list[str]) -> tuple[str, ...]:
    notes = []
    without = [kind for kind in kinds if kind in WITHOUT_KEYS]
    if without:
        notes.append(f"{len(without)} layers have no attention ({', '.join(sorted(set(without)))}).")
    if text.model_type not in CHECKED_TYPES:
        notes.append(
            f"Windows, soft caps and sinks of {text.model_type} are taken from its configuration as most models use "
            "them; what vLLM's code for it does was not compared."
        )
    return tuple(notes)
