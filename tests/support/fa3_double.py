"""vLLM's FlashAttention 3 on a CPU: its public calls, checked argument by argument; the answer by the formula."""

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import contract
import torch
from fp64_attention import attend
from paged_cases import PagedCase
from raw_memory import dense_strides

from vllm_attn_plugin.kernels import EngineParams, KernelInputs, Phase, split_kv_cache
from vllm_attn_plugin.kernels.flash_attention3 import VllmFA3Kernel

# The arguments that a schedule depends on, by the names of the two calls (vLLM 0.33).
SHARED = ("max_seqlen_q", "max_seqlen_k", "cu_seqlens_q", "causal", "window_size", "num_splits")
SCHEDULE_OPTIONS = {
    "batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim", "cache_seqlens",
    "qkv_dtype", "headdim_v", "cu_seqlens_q", "cu_seqlens_k_new", "cache_leftpad", "page_size", "max_seqlen_k_new",
    "causal", "window_size", "has_softcap", "num_splits", "pack_gqa", "sm_margin",
}  # fmt: skip


@dataclass
class FA3Double:
    """Stands in for the module `vllm.vllm_flash_attn`.

    Attributes:
        schedules: the arguments of each `get_scheduler_metadata`, by the address of what it returned.
        calls: the arguments of each `flash_attn_varlen_func`.
    """

    schedules: dict[int, dict[str, Any]] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    _made: list[torch.Tensor] = field(default_factory=list)

    def module(self) -> ModuleType:
        """The module to put in its place."""
        module = ModuleType("vllm.vllm_flash_attn")
        module.get_scheduler_metadata = self.get_scheduler_metadata  # type: ignore[attr-defined]
        module.flash_attn_varlen_func = self.flash_attn_varlen_func  # type: ignore[attr-defined]
        return module

    def get_scheduler_metadata(self, **arguments: Any) -> torch.Tensor:
        """A schedule that only this step's calls may use."""
        assert set(arguments) <= SCHEDULE_OPTIONS
        made = torch.zeros(1 + 4 * -(-arguments["batch_size"] // 4), dtype=torch.int32)
        self._made.append(made)  # so that its address stays its own
        self.schedules[made.data_ptr()] = arguments
        return made

    def flash_attn_varlen_func(self, **arguments: Any) -> Any:
        """Check what the library's C++ relies on, and compute."""
        self.calls.append(arguments)
        self._check_tensors(**arguments)
        self._check_page_tails(**arguments)
        self._check_schedule(arguments)
        lse = self._compute(**arguments)
        return (arguments["out"], lse) if arguments["return_softmax_lse"] else arguments["out"]

    @staticmethod
    def _check_tensors(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seqused_k: torch.Tensor,
        block_table: torch.Tensor,
        s_aux: torch.Tensor | None,
        v_descale: torch.Tensor | None,
        fa_version: int,
        **_: Any,
    ) -> None:
        assert fa_version == 3
        assert q.dtype == k.dtype == v.dtype
        assert out.dtype == (torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype)
        assert out.shape == q.shape
        assert all(tensor.stride(-1) == 1 for tensor in (q, k, v, out))
        _, page_size, num_kv_heads, head_dim = k.shape
        assert v.shape == k.shape
        assert page_size % 16 == 0
        assert head_dim % 8 == 0
        if num_kv_heads == 1:
            assert k.stride(2) == dense_strides(k.shape)[2], "a tensor descriptor takes this stride as it is"
        batch_size = len(seqused_k)
        for tensor, shape in ((cu_seqlens_q, (batch_size + 1,)), (seqused_k, (batch_size,))):
            assert tensor.dtype == torch.int32
            assert tensor.is_contiguous()
            assert tensor.shape == shape
        assert block_table.dtype == torch.int32
        assert block_table.stride(-1) == 1
        assert len(block_table) == batch_size
        assert s_aux is None or (s_aux.dtype == torch.bfloat16 and s_aux.shape == (q.shape[1],))
        if v_descale is not None:
            assert v_descale.dtype == torch.float32
            assert v_descale.shape == (batch_size, num_kv_heads)

    @staticmethod
    def _check_page_tails(
        q: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seqused_k: torch.Tensor,
        block_table: torch.Tensor,
        max_seqlen_q: int,
        **_: Any,
    ) -> None:
        """Pages that hold whole tiles are fetched whole, and 0 times what lies behind the end goes into the result."""
        _, page_size, num_kv_heads, _ = v.shape
        if page_size % 64 or max_seqlen_q * (q.shape[1] // num_kv_heads) <= 128:
            return
        q_lens = cu_seqlens_q.diff().tolist()
        for q_len, length, row in zip(q_lens, seqused_k.tolist(), block_table.tolist(), strict=True):
            if q_len and length % page_size:
                tail = v[row[length // page_size], length % page_size :]
                assert tail.float().isfinite().all(), f"behind token {length}"

    def _check_schedule(self, arguments: dict[str, Any]) -> None:
        """The library lays work out by the schedule and then trusts it: both calls must describe one problem."""
        made_for = self.schedules[arguments["scheduler_metadata"].data_ptr()]
        for name in SHARED:
            given, scheduled = arguments[name], made_for[name]
            assert given is scheduled or given == scheduled, name
        q, k = arguments["q"], arguments["k"]
        assert made_for["cache_seqlens"] is arguments["seqused_k"]
        assert made_for["batch_size"] == len(arguments["seqused_k"])
        assert (made_for["num_heads_q"], made_for["num_heads_kv"]) == (q.shape[1], k.shape[2])
        assert (made_for["headdim"], made_for["page_size"]) == (q.shape[2], k.shape[1])
        assert made_for["qkv_dtype"] == k.dtype
        assert made_for["has_softcap"] == (arguments["softcap"] > 0)

    @staticmethod
    def _compute(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seqused_k: torch.Tensor,
        block_table: torch.Tensor,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        s_aux: torch.Tensor | None,
        v_descale: torch.Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        **_: Any,
    ) -> torch.Tensor:
        """Write the result; the log-sum-exp, `[num_heads, num_rows]`."""
        assert window_size[1] in (-1, 0)
        assert causal or window_size[1] == -1
        lse = torch.full((q.shape[1], len(q)), float("-inf"))
        bounds = cu_seqlens_q.tolist()
        for request, (start, stop) in enumerate(pairwise(bounds)):
            length = int(seqused_k[request])
            assert length <= max_seqlen_k
            assert stop - start <= max_seqlen_q
            pages = block_table[request, : -(-length // k.shape[1])].long()
            # Pages wholly left of the window are gone: their entries are wild, and nothing there is read.
            pages = torch.where((pages >= 0) & (pages < len(k)), pages, 0)
            keys, values = (side[pages].double().flatten(0, 1)[:length].nan_to_num() for side in (k, v))
            result, of_rows = attend(
                q[start:stop].double(), keys, values, sm_scale=softmax_scale, causal=causal,
                window_left=window_size[0], soft_cap=softcap, sinks=s_aux,
            )  # fmt: skip
            factor = 1.0 if v_descale is None else float(v_descale[request, 0])
            out[start:stop] = (result * factor).to(out.dtype)
            lse[:, start:stop] = of_rows.T.float()
        return lse


def installed_signatures() -> dict[str, set[str]]:
    """The parameters of both calls in the installed vLLM, read from its source: a CPU build cannot import it."""
    vllm = find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    source = (Path(vllm.origin).parent / "vllm_flash_attn/flash_attn_interface.py").read_text(encoding="utf-8")
    functions = {node.name: node.args for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    return {
        name: {one.arg for one in (*functions[name].args, *functions[name].kwonlyargs)}
        for name in ("get_scheduler_metadata", "flash_attn_varlen_func")
    }


@contextmanager
def flash_attention3() -> Iterator[FA3Double]:
    """A machine with FlashAttention 3: the double in its place, and the kernels around it on the host."""
    double = FA3Double()
    quantize = ModuleType("vllm_attn_plugin.kernels.quantize_kernel")
    quantize.quantize_rows = _quantize_rows  # type: ignore[attr-defined]
    tails = ModuleType("vllm_attn_plugin.kernels.page_tail_kernel")
    tails.clear_page_tails = clear_page_tails  # type: ignore[attr-defined]
    modules = {"vllm.vllm_flash_attn": double.module(), quantize.__name__: quantize, tails.__name__: tails}
    with patch.dict(sys.modules, modules), contract.fresh_workspaces():
        yield double


def _quantize_rows(rows: torch.Tensor, quantized: torch.Tensor, scale: float) -> None:
    """As the Triton kernel does, which interpreted_kernels.py holds against this formula."""
    quantized.copy_((rows.float() / scale).clamp(-448, 448).to(quantized.dtype))


def clear_page_tails(
    pages: torch.Tensor, qo_indptr: torch.Tensor, seq_lens: torch.Tensor, block_tables: torch.Tensor
) -> None:
    """As the Triton kernel does, which interpreted_kernels.py holds against this."""
    page_size = pages.shape[2]
    for q_len, length, row in zip(qo_indptr.diff().tolist(), seq_lens.tolist(), block_tables.tolist(), strict=True):
        if q_len and length % page_size:
            pages[row[length // page_size], :, length % page_size :] = 0


def sm90(case: PagedCase, **changes: Any) -> EngineParams:
    """An engine on an H200 whose limits are this batch's."""
    return replace(case.engine(), compute_capability=(9, 0), num_sms=132, **changes)


def run_fa3(
    case: PagedCase, phase: Phase = Phase.PREFILL, inputs: KernelInputs | None = None, **changes: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of the kernel, both full of NaN before it."""
    engine = sm90(case, **changes)
    assert VllmFA3Kernel.reasons_against(phase, case.layer, engine) == []
    kernel = VllmFA3Kernel(phase, case.layer, engine)
    out = torch.full(case.q.shape, float("nan"), dtype=case.layer.q_dtype)
    lse = torch.full(case.q.shape[:2], float("nan"))
    pages = split_kv_cache(case.kv_cache, case.layer.kv_dtype)
    kernel.run(kernel.plan(case.batch()), case.q, pages, out, inputs or case.inputs, lse)
    return out, lse
