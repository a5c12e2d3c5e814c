"""Attention written down as its formula, one request and one head group at a time: what every kernel is held against.

It shares no code with the kernels: dense keys and values, no pages, no batching.
"""

import torch


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    sm_scale: float,
    causal: bool = True,
    window_left: int = -1,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one request.

    Args:
        q: `[q_len, num_qo_heads, head_dim]`; the last query stands at the last key.
        keys, values: `[seq_len, num_kv_heads, head_dim]`, dequantized.
        sm_scale: factor on the logits.
        causal, window_left, soft_cap, sinks, slopes: as a kernel's options.
        dtype: of both products; the softmax between them is float32, or float64 where this is.

    Returns:
        Output `[q_len, num_qo_heads, head_dim]` and LSE `[q_len, num_qo_heads]`, of the softmax's dtype; a query that
        sees nothing has output 0 and LSE -inf (with a sink: the sink's).
    """
    softmax_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    q_len, num_qo_heads, _ = q.shape
    seq_len, num_kv_heads, _ = keys.shape
    head_of = torch.arange(num_qo_heads) // (num_qo_heads // num_kv_heads)
    # [heads, q_len, seq_len]
    logits = (q.to(dtype).transpose(0, 1) @ keys.to(dtype)[:, head_of].permute(1, 2, 0)).to(softmax_dtype) * sm_scale
    offset = torch.arange(seq_len)[None, :] - torch.arange(seq_len - q_len, seq_len)[:, None]
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    if slopes is not None:
        logits = logits + slopes.to(softmax_dtype)[:, None, None] * offset
    seen = torch.ones(q_len, seq_len, dtype=torch.bool)
    if causal:
        seen &= offset <= 0
    if window_left >= 0:
        seen &= offset >= -window_left
    logits = logits.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks.to(softmax_dtype)[:, None, None].expand(-1, q_len, 1)], dim=-1)
    elif seq_len == 0:
        return torch.zeros_like(q, dtype=softmax_dtype), torch.full((q_len, num_qo_heads), float("-inf"))
    lse = logits.logsumexp(-1)
    weights = (logits - lse.masked_fill(lse == float("-inf"), 0)[..., None]).exp()[..., :seq_len]
    out = weights.to(dtype) @ values.to(dtype)[:, head_of].transpose(0, 1)
    return out.to(softmax_dtype).transpose(0, 1), lse.transpose(0, 1)
