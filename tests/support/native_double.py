"""FlashInfer's compiled fa2/fa3 modules on a CPU: what they plan and run is recorded, checked and computed.

FlashInfer's wrappers run unchanged; what stands here is the module behind them. A plan is what the planner read on the
host, so that a run whose arrays on the device say something else is noticed.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from fp64_attention import attend
from raw_memory import names, require, require_dense

# What names the module that is compiled, then what its planner and its kernel take, in order.
MODULE = names(
    """
    q_dtype kv_dtype o_dtype index_dtype head_dim_qk head_dim_vo pos_encoding_mode use_sliding_window
    use_logits_soft_cap use_fp16_qk_reduction
    """
)
PLAN = names(
    """
    float_workspace int_workspace pinned_workspace qo_indptr kv_indptr kv_lens total_num_rows batch_size num_qo_heads
    num_kv_heads page_size uses_graph head_dim_qk head_dim_vo causal window_left
    """
)
PLAN_FA2 = names("fixed_split_size disable_split_kv num_colocated_ctas uniform_q_len")
RUN = names(
    """
    float_workspace int_workspace plan_info q k_cache v_cache qo_indptr kv_indptr kv_indices kv_last_page_len out lse
    mask_mode layout window_left enable_pdl
    """
)
RUN_PLAIN = names("custom_mask mask_indptr alibi_slopes prefix_len token_pos max_item_len logits_soft_cap sm_scale")
HND, NON_CAUSAL, CAUSAL = 1, 0, 1
NUM_SMS = 148
LOG_2 = 0.6931471805599453


@dataclass
class Module:
    """What a module was compiled for: by FlashInfer's names, or by a variant of ours."""

    backend: str
    parameters: dict[str, Any]
    takes_sinks: bool = False


@dataclass
class Run:
    """One run, with the plan that it goes by."""

    module: Module
    plan: dict[str, Any]
    arguments: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["arguments"][name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass
class NativeDouble:
    """The compiled modules; `plans` and `runs` hold what reached them."""

    plans: list[dict[str, Any]] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def get_module(self, backend: str, *parameters: Any) -> Any:
        return self._surface(Module(backend, dict(zip(MODULE, parameters, strict=True))))

    def get_sink_module(self, backend: str, *jit_arguments: Any, **options: Any) -> Any:
        """The variant with sinks: FlashInfer is handed its source and its parameters."""
        _, q_dtype, kv_dtype, o_dtype, index_dtype, dim_qk, dim_vo, tensors, _, scalars, *_ = jit_arguments
        require(tensors == ["sink"] and scalars == ["sm_scale"], f"the variant takes {tensors} and {scalars}")
        values = (
            q_dtype,
            kv_dtype,
            o_dtype,
            index_dtype,
            dim_qk,
            dim_vo,
            0,
            options["use_sliding_window"],
            False,
            False,
        )
        return Module(backend, dict(zip(MODULE, values, strict=True)), takes_sinks=True)

    def wrap_sink_module(self, _name: str, module: Module) -> Any:
        return self._surface(module)

    def _surface(self, module: Module) -> Any:
        def plan(*arguments: Any) -> dict[str, Any]:
            planned = dict(zip(PLAN + (PLAN_FA2 if module.backend == "fa2" else []), arguments, strict=True))
            check_plan(planned, module)
            self.plans.append(planned)
            return planned

        def paged_run(*arguments: Any) -> None:
            given = dict(zip(RUN, arguments, strict=False))
            rest = arguments[len(RUN) :]
            extra = ("sinks", "sm_scale") if module.takes_sinks else RUN_PLAIN
            given |= dict(zip(extra, rest, strict=module.takes_sinks))
            run = Run(module, given["plan_info"], given)
            self.runs.append(run)
            check_run(run)
            compute(run)
            # Partial results stay behind.
            run.float_workspace[:4096].fill_(0xFF)

        return SimpleNamespace(plan=plan, paged_run=paged_run, workspace_size=None)


def check_plan(planned: dict[str, Any], module: Module) -> None:
    """What the planner reads on the host."""
    batch_size = planned["batch_size"]
    for name, length in (("qo_indptr", batch_size + 1), ("kv_indptr", batch_size + 1), ("kv_lens", batch_size)):
        require_dense(name, planned[name], torch.int32, [length])
    require(planned["head_dim_qk"] == planned["head_dim_vo"] == module.parameters["head_dim_qk"], "head_dim")
    require((planned["window_left"] >= 0) == module.parameters["use_sliding_window"], "window")
    pages = planned["kv_indptr"].diff()
    needed = -(-planned["kv_lens"] // planned["page_size"])
    require(torch.equal(pages, needed.int()), f"{pages.tolist()} pages for {planned['kv_lens'].tolist()} keys")
    require(planned["num_qo_heads"] % planned["num_kv_heads"] == 0, "heads a group")
    if module.backend == "fa2":
        given, needed = planned["float_workspace"].numel(), planned_bytes(planned)
        require(given >= needed, f"batch_prefill_tmp_v needs {needed} bytes, the workspace has {given}")


def planned_bytes(planned: dict[str, Any], num_sms: int = NUM_SMS) -> int:
    """Bytes of partial results that the fa2 planner lays out at most, restated from its source."""
    heads, batch_size = planned["num_qo_heads"], planned["batch_size"]
    group, head_dim = heads // planned["num_kv_heads"], planned["head_dim_vo"]
    tiles = 2 * num_sms // planned["num_kv_heads"]
    rows = planned["total_num_rows"]
    if planned["uses_graph"]:
        tile = _tile((rows - batch_size + 1) * group, head_dim)
        tiles = max(tiles, -(-rows * group // tile) + batch_size - 1)
    else:
        tile = _tile(int(planned["qo_indptr"][-1]) * group // max(batch_size, 1), head_dim)
    return 4 * heads * -(-tiles * tile // group) * (head_dim + 1)


def _tile(packed_rows: int, head_dim: int) -> int:
    if packed_rows > 64 and head_dim < 256:
        return 128
    return 64 if packed_rows > 16 else 16


def check_run(run: Run) -> None:
    """What the kernel reads on the device must be what was planned."""
    planned = run.plan
    require(run.layout == HND and run.window_left == planned["window_left"], "layout or window")
    for name in ("qo_indptr", "kv_indptr"):
        require_dense(name, getattr(run, name), torch.int32, planned[name].shape)
        require(torch.equal(getattr(run, name), planned[name]), f"{name} is not what was planned")
    require(run.kv_indices.dtype == torch.int32 and run.kv_indices.is_contiguous(), "kv_indices")
    require_dense("kv_last_page_len", run.kv_last_page_len, torch.int32, [planned["batch_size"]])
    lens = (run.kv_indptr.diff() - 1).clamp(min=0) * planned["page_size"] + run.kv_last_page_len
    require(torch.equal(lens, planned["kv_lens"].to(lens.dtype)), f"last pages give {lens.tolist()} keys")
    rows = [int(planned["qo_indptr"][-1]), planned["num_qo_heads"], planned["head_dim_qk"]]
    require(list(run.q.shape) == list(run.out.shape) == rows, f"query {run.q.shape}, output {run.out.shape}: {rows}")
    parameters = run.module.parameters
    require(run.q.dtype == parameters["q_dtype"] and run.out.dtype == parameters["o_dtype"], "dtypes of query, output")
    for pages in (run.k_cache, run.v_cache):
        require(pages.dtype == parameters["kv_dtype"], f"cache {pages.dtype}, compiled for {parameters['kv_dtype']}")
        heads = [planned["num_kv_heads"], planned["page_size"], planned["head_dim_qk"]]
        require(list(pages.shape[1:]) == heads and pages.stride(-1) == 1, f"pages {pages.shape} {pages.stride()}")
    require(run.k_cache.stride() == run.v_cache.stride(), "strides of keys and values")
    require(run.q.stride(-1) == 1 and run.out.is_contiguous(), "strides of query and output")
    if run.module.takes_sinks:
        require_dense("sinks", run.sinks, torch.float32, [planned["num_qo_heads"]])
    else:
        require((run.logits_soft_cap > 0) == parameters["use_logits_soft_cap"], "soft cap")
        require(run.custom_mask is None and run.prefix_len is None, "masks")


def compute(run: Run) -> None:
    """Attention of every request, from the page lists."""
    planned = run.plan
    causal = run.mask_mode == CAUSAL
    require(run.mask_mode in (CAUSAL, NON_CAUSAL), f"mask_mode {run.mask_mode}")
    page_size = planned["page_size"]
    for request, seq_len in enumerate(planned["kv_lens"].tolist()):
        start, stop = run.qo_indptr[request : request + 2].tolist()
        pages = run.kv_indices[int(run.kv_indptr[request]) : int(run.kv_indptr[request + 1])].long()
        require(bool(((pages >= 0) & (pages < len(run.k_cache))).all()), f"request {request} reads pages {pages}")
        window = planned["window_left"]
        first = max(seq_len - (stop - start) - window, 0) if window >= 0 else 0
        positions = torch.arange(first, seq_len)
        where = (pages[positions // page_size], slice(None), positions % page_size)
        out, lse = attend(
            run.q[start:stop],
            run.k_cache.double()[where],
            run.v_cache.double()[where],
            sm_scale=run.sm_scale,
            causal=causal,
            window_left=window,
            soft_cap=0.0 if run.module.takes_sinks else run.logits_soft_cap,
            sinks=run.sinks if run.module.takes_sinks else None,
        )
        run.out[start:stop] = out.to(run.out.dtype)
        if run.lse is not None:
            run.lse[start:stop] = lse / LOG_2
