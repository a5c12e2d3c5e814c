"""The command `explain`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_attn_plugin.cli.options import AsJson, console, print_json

if TYPE_CHECKING:
    from vllm_attn_plugin.explain import Explained, Group, Served
    from vllm_attn_plugin.kernels import LayerParams

FIRST_CHOICE = "first choice that can serve it"


def explain(
    model: Annotated[str, typer.Argument(help="A model's folder, or its name on the Hugging Face hub.")],
    kv_cache_dtype: Annotated[str, typer.Option(help="As vLLM's: auto, fp8, fp8_e5m2, nvfp4.")] = "auto",
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens a block; default vLLM's.")] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs that share the heads.")] = 1,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest sequence; default the model's.")] = None,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Most requests in a step; vLLM itself takes 256 or 1024, by the GPU.")
    ] = 256,
    speculative: Annotated[int, typer.Option(min=0, metavar="TOKENS", help="Drafts a step.")] = 0,
    dtype: Annotated[str, typer.Option(help="Of the activations: auto, bfloat16, float16, float32.")] = "auto",
    gpu: Annotated[
        str | None, typer.Option(metavar="SM|NAME", help="SM80, SM90, SM100, H200, ...; default this machine.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Say which kernel serves each kind of layer of a model, and why each other one does not.

    Reads the model's configuration alone, and needs no GPU for one that is named. The exit status is 1 where something
    is refused.
    """
    from vllm_attn_plugin.explain import Asked
    from vllm_attn_plugin.explain import explain as ask
    from vllm_attn_plugin.machine import named_machine
    from vllm_attn_plugin.model import read_model
    from vllm_attn_plugin.settings import settings

    asked = Asked(kv_cache_dtype, block_size, tensor_parallel_size, max_model_len, max_num_seqs, speculative, dtype)
    machine = None if gpu is None else named_machine(gpu)
    explained = ask(read_model(model), asked, settings(), machine)
    if as_json:
        print_json(document(explained, model, gpu))
    else:
        show(explained, model, gpu)
    return 0 if explained.is_served else 1


def document(explained: "Explained", model: str, gpu: str | None) -> dict[str, Any]:
    """The answer for programs."""
    engine = explained.engine
    return {
        "model": model,
        "architecture": explained.model.architecture,
        "gpu": gpu,
        "compute_capability": engine.compute_capability,
        "page_size": engine.page_size,
        "max_num_seqs": engine.max_batch_size,
        "max_model_len": engine.max_seq_len,
        "max_decode_q_len": engine.max_decode_q_len,
        "served": explained.is_served,
        "refusals": explained.model.refusals,
        "notes": explained.model.notes,
        "groups": [_group(group) for group in explained.groups],
    }


def _group(group: "Group") -> dict[str, Any]:
    params = group.params
    return {
        "layers": group.layers,
        "query_heads": params.num_qo_heads,
        "kv_heads": params.num_kv_heads,
        "head_dim": params.head_dim,
        "query_dtype": str(params.q_dtype).removeprefix("torch."),
        "kv_cache_dtype": str(params.kv_dtype).removeprefix("torch."),
        "sliding_window": params.window_left + 1 if params.window_left >= 0 else None,
        "logits_soft_cap": params.logits_soft_cap or None,
        "sinks": params.has_sinks,
        "alibi": params.has_alibi,
        **{phase.value: _phase(served) for phase, served in group.phases.items()},
    }


def _phase(served: "Served") -> dict[str, Any]:
    from vllm_attn_plugin.explain import ranges

    if served.choice is None:
        return {"kernels": [], "refusal": served.refusal, "others": served.others}
    return {
        "kernels": [{"kernel": name, "up_to_requests": limit} for name, limit in ranges(served.choice)],
        "why": served.choice.reason or FIRST_CHOICE,
        "table": served.choice.table,
        "others": served.others,
    }


def show(explained: "Explained", model: str, gpu: str | None) -> None:
    """The answer for a reader."""
    from rich.table import Table

    from vllm_attn_plugin.kernels.reasons import describe

    engine, out = explained.engine, console()
    named = "" if gpu is None else " with all that FlashInfer needs to compile"
    out.print(
        f"{explained.model.architecture} of {model} on {describe(engine)}{named}: pages of {engine.page_size} tokens, "
        f"up to {engine.max_batch_size} requests of up to {engine.max_seq_len} tokens.",
        markup=False,
    )
    for group in explained.groups:
        out.print(f"\n{_title(group.layers, group.params)}", markup=False)
        table = Table("phase", "served by", "why")
        for phase, served in group.phases.items():
            why = served.refusal if served.choice is None else served.choice.reason or FIRST_CHOICE
            table.add_row(phase.value, "[bold red]nothing[/]" if served.choice is None else str(served.choice), why)
        out.print(table)
        others = Table("kernel", *(f"not {phase.value}, because" for phase in group.phases), show_edge=False)
        names = dict.fromkeys(name for served in group.phases.values() for name in served.others)
        for name in names:
            reasons = ("; ".join(served.others.get(name, ["(serves)"])) for served in group.phases.values())
            others.add_row(name, *reasons)
        out.print(others)
    for line in (*explained.model.refusals, *explained.model.notes):
        out.print(line, markup=False)


def _title(layers: list[int], params: "LayerParams") -> str:
    """A group's layers in words: `layers 0, 2, 4 to 9: 32 query heads over 8 KV heads of 128, no window`."""
    words = [f"{params.num_qo_heads} query heads over {params.num_kv_heads} KV heads of {params.head_dim}"]
    words.append(f"window {params.window_left + 1}" if params.window_left >= 0 else "no window")
    dtypes = (str(dtype).removeprefix("torch.") for dtype in (params.q_dtype, params.kv_dtype))
    words.append(" over ".join(dict.fromkeys(dtypes)))
    if params.logits_soft_cap:
        words.append(f"soft cap {params.logits_soft_cap:g}")
    words += [name for name, has in (("sinks", params.has_sinks), ("ALiBi", params.has_alibi)) if has]
    return f"{len(layers)} layers ({spans(layers)}): {', '.join(words)}"


def spans(numbers: list[int]) -> str:
    """Rising numbers with runs of three and more shortened: `0, 2, 4-9`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    long = 3
    parts = [f"{run[0]}-{run[-1]}" if len(run) >= long else ", ".join(map(str, run)) for run in runs]
    return ", ".join(parts)
