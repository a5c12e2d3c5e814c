"""Attention written down as its formula, one request at a time: dense keys, no pages, no batching.

It shares no code with the kernels, the reference among them, so that each can be held against it on the user's machine.
"""

import torch

from vllm_attn_plugin.kernels.interface import KernelInputs, LayerParams

# How far a result may be off for its own dtype alone; in float32 the order of a sum counts for more than its last bit.
ROUNDING: dict[torch.dtype, float] = {torch.float32: 2**-20, torch.float16: 2**-11, torch.bfloat16: 2**-8}
ALLOWED = 2.0  # times the error of the same formula in the query's dtype


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layer: LayerParams,
    inputs: KernelInputs,
    dtype: torch.dtype,
    weights_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Attention of one request, causal.

    Args:
        q: `[q_len, num_qo_heads, head_dim]`; the last query stands at the last key.
        keys, values: `[seq_len, num_kv_heads, head_dim]`, as the cache stores them.
        layer: window, soft cap and scale.
        inputs: scales, sinks and slopes.
        dtype: of both products; the softmax between them is float32, or float64 where this is.
        weights_dtype: what the softmax's weights are rounded to before the second product, as some kernels do.

    Returns:
        `[q_len, num_qo_heads, head_dim]`, the softmax's dtype.
    """
    softmax_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    group = layer.num_qo_heads // layer.num_kv_heads
    k = (keys.to(dtype) * inputs.k_scale).repeat_interleave(group, 1)
    v = (values.to(dtype) * inputs.v_scale).repeat_interleave(group, 1)
    logits = torch.einsum("qhd,khd->hqk", q.to(dtype), k).to(softmax_dtype) * layer.sm_scale
    first = len(keys) - len(q)
    positions = torch.arange(len(keys), device=q.device)
    offset = positions[None, :] - positions[first:, None]
    if layer.logits_soft_cap:
        logits = layer.logits_soft_cap * torch.tanh(logits / layer.logits_soft_cap)
    if inputs.alibi_slopes is not None:
        logits = logits + inputs.alibi_slopes.to(softmax_dtype)[:, None, None] * offset
    hidden = offset > 0
    if layer.window_left >= 0:
        hidden |= offset < -layer.window_left
    logits = logits.masked_fill(hidden, float("-inf"))
    top = logits.amax(-1, keepdim=True)
    weights = (logits - top).exp()
    total = weights.sum(-1, keepdim=True)
    if inputs.sinks is not None:
        total = total + (inputs.sinks.to(softmax_dtype)[:, None, None] - top).exp()
    if weights_dtype is not None:
        weights = weights.to(weights_dtype)
    out = torch.einsum("hqk,khd->hqd", weights.to(dtype), v).to(softmax_dtype) / total
    return out.transpose(0, 1)
