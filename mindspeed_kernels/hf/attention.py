"""`flash_attention` as an attention implementation of transformers: `attn_implementation="mindspeed"`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from mindspeed_kernels.hf.attention_mask import AttentionMask, make_mask, separate_documents
from mindspeed_kernels.ops.flash_attention import flash_attention

NAME = "mindspeed"


def register_attention() -> None:
    """Make `attn_implementation="mindspeed"` known to transformers, with the masks that go with it.

    Every model that uses transformers' attention interface can then be built with it, or switched to it by
    `model.set_attn_implementation("mindspeed")`. Padding (`attention_mask`), packing (`position_ids` that start again
    at 0, without an `attention_mask`), sliding windows, chunks, sinks and soft-caps are honoured without a matrix of
    `seq * seq` elements; what cannot be honoured raises a ValueError. Padding attends to nothing and gives 0.
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: AttentionMask | Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers' `AttentionInterface` calls.

    Args:
        query: `[batch, num_heads, seq_q, head_dim]`.
        key, value: `[batch, num_kv_heads, seq_k, head_dim or value_dim]`.
        attention_mask: what `make_mask` made. None where a model makes no mask: `is_causal`, by default the module's,
            and `cu_seq_lens_*`, of the flattened batch, then say what it would.
        s_aux: the sinks, `[num_heads]`.
        position_ids: `[batch or 1, seq]`; where they start again, a document starts, unless the batch had an
            `attention_mask`.

    Returns:
        `[batch, seq_q, num_heads, value_dim]`, and None for the probabilities, which do not exist.

    Raises:
        ValueError: for what `flash_attention` cannot honour: dropout, a matrix as a mask, a bias.
    """
    _refuse(attention_mask, dropout, kwargs)
    if not isinstance(attention_mask, AttentionMask):
        if sliding_window is not None and key.shape[2] > sliding_window:
            raise ValueError(f"{type(module).__name__} asks for a sliding window of {sliding_window} without a mask")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        attention_mask = AttentionMask(causal, cu_seqlens_q=cu_seq_lens_q, cu_seqlens_k=cu_seq_lens_k)
    batch, _, seq, _ = query.shape
    if (
        position_ids is not None
        and attention_mask.cu_seqlens_q is None
        and not attention_mask.unpacked
        and position_ids.dim() == 2
        and position_ids.shape[1] == seq == key.shape[2]
    ):
        attention_mask = separate_documents(attention_mask, position_ids, batch)
    # Under autocast, rotary embeddings make float32 of q and k; the products of eager attention round them as here.
    q, k, v = (t.to(value.dtype).transpose(1, 2) for t in (query, key, value))
    if attention_mask.cu_seqlens_q is not None:
        k, v = (_pack(t, attention_mask.key_index) for t in (k, v))
        q = _pack(q, attention_mask.query_index)
    out = flash_attention(
        q,
        k,
        v,
        causal=attention_mask.causal,
        scale=scaling,
        window=attention_mask.window,
        softcap=softcap,
        sinks=s_aux,
        cu_seqlens_q=attention_mask.cu_seqlens_q,
        cu_seqlens_k=attention_mask.cu_seqlens_k,
        query_offsets=attention_mask.query_offsets,
    )
    if attention_mask.cu_seqlens_q is not None:
        out = _unpack(out, attention_mask.query_index, batch, seq)
    return out, None


def _pack(tensor: Tensor, index: Tensor | None) -> Tensor:
    """`[batch, seq, heads, dim]` to `[tokens, heads, dim]`."""
    tokens = tensor.flatten(0, 1)
    return tokens if index is None else tokens.index_select(0, index)


def _unpack(tokens: Tensor, index: Tensor | None, batch: int, seq: int) -> Tensor:
    """`[tokens, heads, dim]` to `[batch, seq, heads, dim]`, 0 where no token is."""
    if index is not None:
        tokens = tokens.new_zeros(batch * seq, *tokens.shape[1:]).index_copy(0, index, tokens)
    return tokens.unflatten(0, (batch, seq))


def _refuse(attention_mask: Any, dropout: float, kwargs: dict[str, Any]) -> None:
    instead = "; use attn_implementation='sdpa' or 'eager'"
    if dropout:
        raise ValueError(f"attention 'mindspeed' has no dropout, but attention_dropout is {dropout}{instead}")
    if isinstance(attention_mask, torch.Tensor):
        raise ValueError(
            f"attention 'mindspeed' takes no ready-made mask, but got one of shape {list(attention_mask.shape)}: give "
            f"the model an attention_mask [batch, seq], or position_ids of packed documents{instead}"
        )
    unknown = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
    if unknown:
        raise ValueError(f"attention 'mindspeed' does not know what to do with {', '.join(unknown)}{instead}")
