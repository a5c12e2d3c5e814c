"""Decode steps in a CUDA graph, as an engine captures them once and replays them with other batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from batch_specs import BatchSpec
from gpu_cases import CUDA, error_and_limit, to_gpu
from paged_cases import PagedCase, make_case

from vllm_attn_plugin.kernels import KVPages, LayerParams, Phase, split_kv_cache
from vllm_attn_plugin.kernels.dispatch import KERNELS
from vllm_attn_plugin.metadata import PagedBatch, PageListBuffers, make_device_batch

PAGE_SIZE = 16


@dataclass(frozen=True)
class DealtStep:
    """One step's content, padded to the captured size, on the GPU already: loading it waits for nothing.

    Attributes:
        seq_lens: of the real requests.
        lens_cpu, qo_indptr_cpu: as the host knows them, padded requests included.
        tensors: what goes into the captured step's tensors of the same names.
    """

    seq_lens: tuple[int, ...]
    lens_cpu: torch.Tensor
    qo_indptr_cpu: torch.Tensor
    tensors: dict[str, torch.Tensor]


class CapturedDecode:
    """Decode steps of one or more kinds of layer in one graph, at the addresses where an engine keeps its tensors.

    Each kind of layer has a cache of its own; all share the block table. After the last layer the graph takes the
    largest number of each output, as a quantization with one scale for the batch does.
    """

    def __init__(
        self, name: str, layers: Sequence[LayerParams], size: int, width: int, q_len: int = 1, cached_tokens: int = 256
    ) -> None:
        """Set the kernels up.

        Args:
            name: the kernel that serves every layer.
            layers: a kind of layer each, with the same heads.
            size: requests of the captured step.
            width: pages a row of the block table.
            q_len: query tokens a request.
            cached_tokens: tokens a request that the caches have room for; tables may name a page more than once.
        """
        self.size, self.width, self.q_len, self.layers = size, width, q_len, layers
        # Whole pages: a table may name any of them for the middle of a request.
        whole = -(-cached_tokens // PAGE_SIZE) * PAGE_SIZE
        room = BatchSpec("room", (1,) * size, (whole,) * size, is_full=True)
        self.cases = [make_case(room, layer, freed=False, seed=seed) for seed, layer in enumerate(layers)]
        gpus = [to_gpu(case) for case in self.cases]
        self.engine = replace(
            gpus[0].engine,
            max_seq_len=width * PAGE_SIZE,
            max_num_tokens=size * q_len,
            max_decode_q_len=q_len,
            decode_graph_sizes=(size * q_len,),
        )
        self.inputs = [gpu.inputs for gpu in gpus]
        self.pages: list[KVPages] = [
            split_kv_cache(gpu.kv_cache, layer.kv_dtype) for gpu, layer in zip(gpus, layers, strict=True)
        ]
        self.kernels = [KERNELS[name](Phase.DECODE, layer, self.engine) for layer in layers]
        windows = {layer.window_left for layer in layers}
        self.page_lists = {window: PageListBuffers(size, width, CUDA) for window in windows}
        self.tensors = self.deal((q_len,) * size, seed=0).tensors
        self.outs = [torch.empty_like(self.tensors["q"]) for _ in layers]
        self.largest = torch.zeros(len(layers), dtype=self.outs[0].dtype, device=CUDA)
        self.replay_graph: Callable[[], None] | None = None

    def deal(
        self, seq_lens: tuple[int, ...], seed: int, sharpness: float = 1.0, padding: float | None = None
    ) -> DealtStep:
        """A step of some requests, padded to all, with a table of its own.

        Args:
            seq_lens: of the requests, the new tokens included.
            seed: of the random numbers.
            sharpness: factor on the query; above 1 a request with many keys still sees few of them.
            padding: what the padded requests' query holds; random numbers where None.
        """
        generator = torch.Generator().manual_seed(seed)
        num_real, layer = len(seq_lens), self.layers[0]
        shape = (self.size * self.q_len, layer.num_qo_heads, layer.head_dim)
        q = (sharpness * torch.randn(shape, generator=generator)).to(layer.q_dtype)
        if padding is not None:
            q[num_real * self.q_len :] = padding
        lens = torch.tensor([*seq_lens, *[0] * (self.size - num_real)], dtype=torch.int32)
        starts = torch.tensor([self.q_len * min(row, num_real) for row in range(self.size + 1)], dtype=torch.int32)
        tables = torch.randint(self.cases[0].num_pages, (self.size, self.width), generator=generator).int()
        host = {"q": q, "seq_lens": lens, "qo_indptr": starts, "tables": tables}
        return DealtStep(seq_lens, lens, starts, {name: tensor.to(CUDA) for name, tensor in host.items()})

    def plan(self, step: DealtStep) -> list[Any]:
        """Load a step into the captured tensors and plan it for every layer; the host waits for nothing."""
        for name, tensor in step.tensors.items():
            self.tensors[name].copy_(tensor)
        batches = {window: self._batch(step, window) for window in self.page_lists}
        return [kernel.plan(batches[kernel.layer.window_left]) for kernel in self.kernels]

    def capture(self) -> None:
        """Capture a dummy step, whose requests hold their query tokens alone."""
        plans = self.plan(self.deal((self.q_len,) * self.size, seed=0))
        self._run(plans)  # compiles
        self.replay_graph = captured(lambda: self._run(plans))

    def replay(self, step: DealtStep) -> None:
        """Plan a step for every layer anew and replay the graph over it; outputs hold NaN before."""
        assert self.replay_graph is not None
        self.plan(step)
        for out in self.outs:
            out.fill_(float("nan"))
        self.largest.fill_(float("nan"))
        self.replay_graph()

    def case(self, step: DealtStep, which: int) -> PagedCase:
        """The step's real requests as one layer sees them, for the formula."""
        rows = len(step.seq_lens) * self.q_len
        spec = BatchSpec("dealt", (self.q_len,) * len(step.seq_lens), step.seq_lens)
        keys, values = (
            [
                side[row[: -(-length // PAGE_SIZE)].long()].transpose(1, 2).flatten(0, 1)[:length]
                for row, length in zip(step.tensors["tables"], step.seq_lens, strict=False)
            ]
            for side in self.pages[which]
        )
        return replace(self.cases[which], spec=spec, q=step.tensors["q"][:rows], keys=keys, values=values)

    def errors(self, step: DealtStep, outs: Sequence[torch.Tensor] | None = None) -> list[tuple[float, float]]:
        """The error of each layer's real rows, and its limit; see `error_and_limit`."""
        rows = len(step.seq_lens) * self.q_len
        return [
            error_and_limit(self.case(step, which), out[:rows])
            for which, out in enumerate(self.outs if outs is None else outs)
        ]

    def _batch(self, step: DealtStep, window_left: int) -> PagedBatch:
        batch = make_device_batch(
            qo_indptr=self.tensors["qo_indptr"],
            qo_indptr_cpu=step.qo_indptr_cpu,
            seq_lens=self.tensors["seq_lens"],
            seq_lens_cpu=step.lens_cpu,
            block_tables=self.tensors["tables"],
            page_size=PAGE_SIZE,
            max_seq_len=self.engine.max_seq_len,
            num_rows=self.size * self.q_len,
            window_left=window_left,
        )
        return batch.list_on_device(self.page_lists[window_left])

    def _run(self, plans: list[Any]) -> None:
        for which, (kernel, plan) in enumerate(zip(self.kernels, plans, strict=True)):
            kernel.run(plan, self.tensors["q"], self.pages[which], self.outs[which], self.inputs[which])
            self.largest[which].copy_(self.outs[which].abs().amax())


def captured(work: Callable[[], None]) -> Callable[[], None]:
    """Capture GPU work in a graph; what replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    replay: Callable[[], None] = graph.replay
    return replay
