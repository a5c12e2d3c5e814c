"""What the documents may state about their batch, by the names that they use."""

from dataclasses import replace
from enum import Enum
from typing import Any

import contract
import torch
from paged_cases import PagedCase
from worked_batch import (
    MAX_MODEL_LEN,
    NUM_PAGES,
    PAGE_SIZE,
    doubles,
    engine,
    run_on_gpus,
    serve,
    whole_batch,
    worked_case,
)

from vllm_attn_plugin.kernels import AttentionKernel, GraphSupport, Phase
from vllm_attn_plugin.kernels.dispatch import KERNELS
from vllm_attn_plugin.metadata import (
    PagedBatch,
    make_device_batch,
    make_paged_batch,
    make_uncached_batch,
    split_decode_prefill,
)

# More numbers than a document would list.
MOST_LISTED = 64


def plain(value: Any) -> Any:
    """A value as a document writes it down: tensors as lists, enumerations and dtypes by name."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, torch.Size):
        return list(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, torch.dtype | torch.device):
        return str(value).removeprefix("torch.")
    return value


class Told:
    """An object whose values are as a document writes them down: `told.kv_cache.shape`, `told.seq_lens`."""

    def __init__(self, told: Any) -> None:
        self._told = told

    def __getattr__(self, name: str) -> Any:
        told = self.__dict__["_told"]
        value = told[name] if isinstance(told, dict) else getattr(told, name)
        if isinstance(value, torch.Tensor) and value.numel() > MOST_LISTED:
            return Told(value)  # of large tensors a document gives shapes and strides
        return plain(value)


def spans(first: int, *lengths: int) -> list[int]:
    """Rising numbers in runs: a first number and a length, then the next first and its length."""
    pairs = (first, *lengths)
    return [n for start, length in zip(pairs[::2], pairs[1::2], strict=True) for n in range(start, start + length)]


def split(told: Told, max_decode_q_len: int) -> list[int]:
    """How many requests of a batch are decodes, and how many prefills."""
    return [part.batch_size if part else 0 for part in split_decode_prefill(told._told, max_decode_q_len)]


def facts() -> dict[str, Any]:
    """Everything that the two documents may state, by the names that they use."""
    served = serve()
    reached, _ = run_on_gpus()
    plans = next(iter(served.metadata.plans.values()))
    return {
        "layer": Told(served.case.layer),
        "engine": Told(served.builder._engine),
        "common": Told(served.common),
        "kv_cache": Told(served.case.kv_cache),
        "batch": Told(whole_batch(served.case)),
        "decode": Told(served.parts[Phase.DECODE]),
        "prefill": Told(served.parts[Phase.PREFILL]),
        "num_layers": len(served.builder._layers),
        "metadata": served.metadata,
        "plans": plans,
        "decode_tile": Told(plans.decode.plan.tiles[0]) if plans.decode else None,
        "decode_run": Told(served.calls[0]),
        "prefill_run": Told(served.calls[1]),
        **{name: Told(arguments) for name, arguments in reached.items()},
        **{name: Told(batch) for name, batch in examples(served.case).items()},
        "spans": spans,
        "split": lambda told, longest: [
            part.batch_size if part else 0 for part in split_decode_prefill(told._told, longest)
        ],
        "len": len,
    }


def examples(case: PagedCase) -> dict[str, PagedBatch]:
    """The batches that docs/metadata.md shows beside the whole one."""
    int32 = torch.int32
    return {
        # Three decodes in a graph of four: the fourth is nobody's, and its length is what stood there.
        "padded": make_device_batch(
            qo_indptr=torch.tensor([0, 1, 2, 3, 3], dtype=int32),
            qo_indptr_cpu=torch.tensor([0, 1, 2, 3, 3], dtype=int32),
            seq_lens=torch.tensor([40, 48, 17, 0], dtype=int32),
            seq_lens_cpu=torch.tensor([40, 48, 17, 33], dtype=int32),
            block_tables=case.block_tables,
            page_size=PAGE_SIZE,
            max_seq_len=MAX_MODEL_LEN,
            num_rows=4,
        ),
        "keyless": whole_batch(case, seq_lens=torch.tensor([40, 0, 50, 20], dtype=int32)),
        "windowed": whole_batch(case, window_left=15),
        "profile": make_uncached_batch(qo_indptr=case.qo_indptr, page_size=PAGE_SIZE, max_seq_len=MAX_MODEL_LEN),
        "drafts": make_paged_batch(
            qo_indptr=torch.tensor([0, 4, 5, 8], dtype=int32),
            seq_lens=torch.tensor([43, 48, 50], dtype=int32),
            block_tables=case.block_tables[:3],
            page_size=PAGE_SIZE,
            max_seq_len=MAX_MODEL_LEN,
            num_pages=NUM_PAGES,
        ),
    }


class Watched(PagedBatch):
    """A batch that notes which of its fields and properties are asked for, by others than itself."""

    def __getattribute__(self, name: str) -> Any:
        get = object.__getattribute__
        inner = get(self, "__dict__")
        if name.startswith("_") or inner.get("_is_inside"):
            return get(self, name)
        inner.setdefault("_asked", set()).add(name)
        inner["_is_inside"] = True
        try:
            return get(self, name)
        finally:
            inner["_is_inside"] = False


def fields_read(name: str) -> set[str]:
    """What a kernel's `plan` asks of this batch's decodes, in a graph if it can be, of its prefills, and of drafts."""
    kernel: type[AttentionKernel] = KERNELS[name]
    gpu = {"trtllm-gen": {"compute_capability": (10, 0), "num_sms": 148}}.get(name, {})
    case = worked_case(torch.bfloat16)
    layer = replace(case.layer, has_sinks=name == "flashinfer-sinks")
    decode, prefill = split_decode_prefill(whole_batch(case), 1)
    steps = ((Phase.DECODE, decode, 1), (Phase.PREFILL, prefill, 1), (Phase.DECODE, examples(case)["drafts"], 4))
    found: set[str] = set()
    for phase, part, q_len in steps:
        assert part is not None
        graphs = (part.batch_size,) if kernel.graph_support is not GraphSupport.NEVER else ()
        params = engine(**gpu, max_decode_q_len=q_len, decode_graph_sizes=graphs)
        if kernel.reasons_against(phase, layer, params):
            continue
        with doubles(), contract.fresh_workspaces():
            watched = Watched(**contract.in_buffers(part).__dict__)
            kernel(phase, layer, params).plan(watched)
        found |= watched.__dict__["_asked"]
    return found
