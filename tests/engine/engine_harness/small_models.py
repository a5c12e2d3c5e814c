"""Small models in a folder: the first layers of a real one, and random ones with options that no real one here has."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

LAYER = re.compile(r"\blayers\.(\d+)\.")


def keep_first_layers(source: Path, target: Path, num_layers: int) -> Path:
    """Write a model's first layers, with its embedding and head: cheaper, and attention still works on real weights."""
    config = json.loads((source / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:num_layers]
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(config))
    shutil.copy(source / "tokenizer.json", target)
    with safe_open(source / "model.safetensors", framework="pt") as weights:
        names = [name for name in weights.keys() if _layer_of(name) < num_layers]  # noqa: SIM118  not a dict
        save_file({name: weights.get_tensor(name) for name in names}, target / "model.safetensors", {"format": "pt"})
    return target


def _layer_of(name: str) -> int:
    found = LAYER.search(name)
    return int(found.group(1)) if found else -1


# Options that neither real model has, on two to four layers each: heads of 64 are the narrowest that CPU_ATTN and every
# kernel here share, and windows are short so that prompts of some hundred tokens cross them often.
RANDOM_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "soft_cap_and_alternating_windows": (
        "Gemma2",
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "sliding_window": 48,
            "attn_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 64,
        },
    ),
    "sinks_and_alternating_windows": (
        "GptOss",
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "sliding_window": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "alibi": ("Bloom", {"n_layer": 3, "n_head": 4}),
    "groups_of_seven": ("Llama", {"num_hidden_layers": 3, "num_attention_heads": 14, "num_key_value_heads": 2}),
    "heads_of_40": (
        "Llama",
        {
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 40,
            "hidden_size": 240,
        },
    ),
}
VOCABULARY = 512


def make_random_model(kind: str, target: Path) -> Path:
    """Write one of `RANDOM_MODELS`, the same weights every time."""
    import torch
    import transformers

    family, options = RANDOM_MODELS[kind]
    heads = options["n_head"] if family == "Bloom" else options["num_attention_heads"]
    sizes = {"hidden_size": heads * 64, "intermediate_size": 256, "vocab_size": VOCABULARY}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{family}Config")(**sizes | special | options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        _fill(name, weight.data, generator)
    model.save_pretrained(target)
    return target


def transformers_logprobs(model_dir: Path, prompts: list[list[int]]) -> list[list[float]]:
    """What transformers says of each prompt's tokens after the first."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    return [_logprobs_of(model, torch.tensor([prompt])) for prompt in prompts]


def _logprobs_of(model: Any, prompt: Any) -> list[float]:
    import torch

    with torch.inference_mode():
        predicted = model(prompt).logits[0, :-1].log_softmax(-1)
    logprobs: list[float] = predicted.gather(1, prompt[0, 1:, None])[:, 0].tolist()
    return logprobs


def _fill(name: str, weight: Any, generator: Any) -> None:
    """Draw weights large enough that attention is uneven: what a mask, cap, sink or slope does then shows in logits."""
    if name.endswith(("post_feedforward_layernorm.weight", "word_embeddings_layernorm.weight")):
        # Gemma 2 and Bloom predict with their embedding. Unless the layers weigh more than the token they start from
        # (norm weights of 1 + 3 in one, of 1/4 in the other), every token predicts itself, and attention hardly counts.
        weight.fill_(3.0 if "feedforward" in name else 0.25)
    elif name.endswith("sinks"):
        weight.uniform_(0, 2, generator=generator)
    elif weight.dim() >= 2:
        gain = 2.0 if "q_proj" in name or "k_proj" in name or "query_key_value" in name else 1.0
        weight.normal_(0, gain / weight.shape[-1] ** 0.5, generator=generator)
