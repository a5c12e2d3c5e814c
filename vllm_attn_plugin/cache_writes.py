"""When one layer's new keys and values go to the cache: at once, or with the launch of a decode kernel that does it."""

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available

from vllm_attn_plugin.builder import LayerPlans
from vllm_attn_plugin.kernels import LayerParams, NewKV


class CacheWrites:
    """Keys and values that vLLM gave one layer to cache and that its attention is still to see to."""

    def __init__(self, params: LayerParams) -> None:
        self._has_plain_cache = params.kv_dtype == params.q_dtype
        self._left: NewKV | None = None

    def leave(self, new_kv: NewKV) -> bool:
        """Leave a step's keys and values to its attention; False where they must be written at once.

        That is where CUDA graphs hold the pieces of a model between its attention layers: vLLM's call for the cache
        may then be in one, and be replayed, while attention runs outside.
        """
        if not new_kv.k.is_cuda or not self._has_plain_cache or not is_forward_context_available():
            return False
        if get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE:
            return False
        self._left = new_kv
        return True

    def take(self, key: torch.Tensor) -> NewKV | None:
        """Hand out what was left, once; None where nothing was.

        Args:
            key: what attention was called with.

        Raises:
            RuntimeError: what was left is another step's.
        """
        left, self._left = self._left, None
        if left is not None and left.k.data_ptr() != key.data_ptr():
            raise RuntimeError(
                f"vllm-attn-plugin was given keys of {len(left.k)} tokens to cache, and its attention comes with other "
                f"keys, of {len(key)} tokens; set VLLM_ATTN_PLUGIN_DECODE_KERNEL=vllm-fa3, which writes none, and "
                "report this."
            )
        return left


def writes_kv(plans: LayerPlans) -> bool:
    """Whether one decode kernel serves the whole step and writes its keys and values."""
    return plans.prefill is None and plans.decode is not None and plans.decode.kernel.writes_kv
