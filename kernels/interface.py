"""What every attention kernel offers: reasons why it cannot serve, `plan` once a step, `run` once a layer."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, ClassVar

import torch

from vllm_attn_plugin.kernels.kv_cache import KVPages, NewKV
from vllm_attn_plugin.kernels.toolchain import Toolchain
from vllm_attn_plugin.kernels.tuning import Configuration, Shelf
from vllm_attn_plugin.metadata import PagedBatch


class Phase(StrEnum):
    """The two kinds of rows of a batch. Decode rows include short speculative queries."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class LayerParams:
    """What one attention layer asks of a kernel. Layers with equal parameters share a kernel and its plans.

    Attributes:
        num_qo_heads: query heads on this device.
        num_kv_heads: key/value heads on this device; divides `num_qo_heads`.
        head_dim: size of a head, the same for keys and values.
        q_dtype: dtype of the query; the output has it too, but for an fp8 query, whose output may have any dtype.
        kv_dtype: dtype of the cached keys and values, whatever their storage: an fp8 dtype for an fp8 cache,
            `kv_cache.NVFP4` for an NVFP4 one.
        sm_scale: factor on the logits before the softmax.
        window_left: keys to the left of a query that it sees, itself excluded; -1 for no window.
        logits_soft_cap: logits become `cap * tanh(logits / cap)`; 0 for none.
        has_sinks: each query head has a learned logit that joins the softmax without a value.
        has_alibi: each query head has an ALiBi slope.
        returns_lse: `run` will be asked for the log-sum-exp too; some kernels need more memory for it.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    sm_scale: float
    window_left: int = -1
    logits_soft_cap: float = 0.0
    has_sinks: bool = False
    has_alibi: bool = False
    returns_lse: bool = False


@dataclass(frozen=True)
class EngineParams:
    """What is fixed for an engine's whole life.

    Attributes:
        device: where the cache lives.
        page_size: tokens a kernel page.
        max_batch_size: most requests in a batch.
        max_num_tokens: most query tokens in a batch.
        max_seq_len: longest sequence.
        max_decode_q_len: longest query that counts as a decode.
        compute_capability: (major, minor) of an NVIDIA GPU; None on any other device.
        num_sms: multiprocessors of an NVIDIA GPU.
        head_major_pages: whether a page's keys of one head lie side by side (the other way is token-major).
        decode_graph_sizes: query rows of the decode steps that may be captured in a full CUDA graph; as many requests
            where each has one query.
        use_trtllm: True for TensorRT-LLM's kernels alone where there are some, False for none of them, None for
            whichever is best.
        toolchain: where the code of FlashInfer's kernels can come from.
        tables: measured decode times.
    """

    device: torch.device
    page_size: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_decode_q_len: int = 1
    compute_capability: tuple[int, int] | None = None
    num_sms: int = 0
    head_major_pages: bool = True
    decode_graph_sizes: tuple[int, ...] = ()
    use_trtllm: bool | None = None
    toolchain: Toolchain = field(default_factory=Toolchain)
    tables: Shelf = field(default_factory=Shelf)

    def configuration(self, layer: LayerParams) -> Configuration:
        """What a layer's decode times depend on."""
        q, kv = (str(dtype).removeprefix("torch.") for dtype in (layer.q_dtype, layer.kv_dtype))
        heads = (layer.num_qo_heads, layer.num_kv_heads, layer.head_dim)
        return Configuration(*heads, self.page_size, q, kv, self.max_decode_q_len)

    @property
    def max_pages_per_request(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_seq_len // self.page_size)


@dataclass(frozen=True)
class KernelInputs:
    """What one layer's call takes besides query, cache and output.

    Attributes:
        k_scale, v_scale: dequantization factors of an fp8 or NVFP4 cache; 1 otherwise.
        v_scale_on_device: `v_scale` as float32 of one element, for kernels that read it there; None where it is 1.
        sinks: float32 `[num_qo_heads]`, or None.
        alibi_slopes: float32 `[num_qo_heads]`, or None.
        q_scale: dequantization factor of an fp8 query; 1 otherwise.
        o_scale: for an output that is quantized: an fp8 output holds `result / o_scale`; an NVFP4 output takes it as
            the factor of its block scales.
        o_block_scales: float8_e4m3fn `[rows rounded up to 128, num_qo_heads * head_dim / 16 rounded up to 4]`, written
            with an NVFP4 output, in the order that the next matrix product reads; None for any other output.
        o_first_row: the row of `o_block_scales` that belongs to the first row of `out`.
        new_kv: keys and values of the step's tokens that the kernel writes to the cache itself; None where they are
            there already. Only for one that `writes_kv`.
    """

    k_scale: float = 1.0
    v_scale: float = 1.0
    v_scale_on_device: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    q_scale: float = 1.0
    o_scale: float = 1.0
    o_block_scales: torch.Tensor | None = None
    o_first_row: int = 0
    new_kv: NewKV | None = None


class GraphSupport(Enum):
    """Which decode batches a kernel can serve from a full CUDA graph, its `plan` run before each replay."""

    NEVER = 0
    SINGLE_TOKEN = 1
    UNIFORM = 2


class AttentionKernel(ABC):
    """One kernel family, set up for one kind of layer and one phase.

    Attributes:
        name: what settings and logs call it.
        graph_support: which decode batches it can serve from a full CUDA graph.
        reads_page_lists: whether its plan reads the page lists on the device; where none does they are not made.
        serves_mixed: whether a step's decodes may go with its prefills in one call, as prefills.
        writes_kv: whether it takes `KernelInputs.new_kv`, which saves an engine a launch a layer.
        placed_before: for a kernel that another package registers, names of kernels: it is tried before the first of
            them that a GPU family's rule lists, and after all others where the rule lists none.
    """

    name: ClassVar[str]
    graph_support: ClassVar[GraphSupport] = GraphSupport.NEVER
    reads_page_lists: ClassVar[bool] = True
    serves_mixed: ClassVar[bool] = False
    placed_before: ClassVar[tuple[str, ...]] = ()
    writes_kv: bool = False

    def __init__(self, phase: Phase, layer: LayerParams, engine: EngineParams) -> None:
        self.phase = phase
        self.layer = layer
        self.engine = engine

    @classmethod
    @abstractmethod
    def reasons_against(cls, phase: Phase, layer: LayerParams, engine: EngineParams) -> list[str]:
        """Why this kernel cannot serve the layer: readable reasons with value and limit; empty if it can."""

    @classmethod
    def waits_for_lengths(cls, phase: Phase, engine: EngineParams) -> bool:
        """Whether its plan needs exact KV lengths on the host where the host knows an upper bound alone.

        So it is while drafts are checked on the device: the engine must then wait for the device in each step.
        """
        return False

    def zeroed_memory(self) -> dict[str, torch.Tensor]:
        """Memory that must be zero before each launch, by what to call it; each launch leaves it zero.

        Returns:
            uint8 `[num_bytes]` each, views of the workspaces.
        """
        return {}

    @abstractmethod
    def plan(self, batch: PagedBatch) -> Any:
        """Prepare one step on the host; the plan is good for every layer with this kernel's parameters."""

    def renewed(self, plan: Any) -> Any:
        """The plan for a step that differs from the plan's own in nothing but the KV lengths.

        None, as here, where it must be planned anew. The lengths are within the engine's limit and the block table's.
        """
        del plan
        return None

    @abstractmethod
    def run(
        self,
        plan: Any,
        q: torch.Tensor,
        kv_pages: KVPages,
        out: torch.Tensor,
        inputs: KernelInputs,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Compute attention of one layer.

        Args:
            plan: what `plan` returned for this step.
            q: `[num_rows, num_qo_heads, head_dim]`, `q_dtype`; any strides, 1 in the last dimension.
            kv_pages: the layer's cache; the step's own keys and values are in it already.
            out: written, the query's shape and dtype. A row that sees no key becomes 0. Where a kernel says that it can
                quantize its output it may be float8_e4m3fn, or uint8 of half the head_dim (NVFP4).
            inputs: the layer's scales, sinks and slopes.
            lse: written when given, float32 `[num_rows, num_qo_heads]`: natural logarithm of the softmax's
                denominator, sinks included; -inf for a row that sees no key.
        """


def check_window(batch: PagedBatch, layer: LayerParams) -> None:
    """Check that a batch's page lists hold every page that a layer's window shows.

    Raises:
        ValueError: they were trimmed to a narrower window.
    """
    is_trimmed = batch.window_left >= 0
    if is_trimmed and (layer.window_left < 0 or layer.window_left > batch.window_left):
        raise ValueError(
            f"the batch was trimmed to window_left {batch.window_left}, which leaves out keys that this layer's "
            f"window_left {layer.window_left} shows; make the batch with the layer's window."
        )


def checked_sinks(layer: LayerParams, inputs: KernelInputs) -> torch.Tensor | None:
    """The layer's sinks, float32 `[num_qo_heads]`, or None where it has none.

    Raises:
        ValueError: a layer with sinks got none, or not as the kernels read them: dense float32, one a query head.
    """
    sinks = inputs.sinks
    if sinks is None and not layer.has_sinks:
        return None
    if sinks is None:
        raise ValueError("this layer has attention sinks, but its inputs hold none.")
    if sinks.dtype != torch.float32 or sinks.shape != (layer.num_qo_heads,) or not sinks.is_contiguous():
        raise ValueError(
            f"sinks are {sinks.dtype} with shape {list(sinks.shape)} and strides {list(sinks.stride())}; the kernel "
            f"reads dense float32 of shape [{layer.num_qo_heads}]."
        )
    return sinks
