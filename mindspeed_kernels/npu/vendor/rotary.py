"""npu_rotary_mul: ``x * r1 + partner(x) * r2``, partner being (-second, first) of halves or of neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_kernels.npu.vendor._common import computable

_MAX_DIM = 896
_MAX_SIZE = 1000  # of the batch and of the heads; of their product where pairs are neighbours


def takes(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> bool:
    if not (q.dim() == k.dim() == 4 and cos.dim() == 3 and cos.shape == sin.shape):
        return False
    batch, _, seq, head_dim = q.shape
    angles, positions, rotary_dim = cos.shape
    heads = max(q.shape[1], k.shape[1])
    # Neighbouring pairs have angles that are the same for all sequences.
    few = (batch * heads if interleaved else max(batch, heads)) < _MAX_SIZE and (angles == 1 or not interleaved)
    fits = (k.shape[0], *k.shape[2:]) == (batch, seq, head_dim) and positions == seq and angles in (1, batch)
    sizes = rotary_dim % 2 == 0 and rotary_dim <= head_dim and rotary_dim < _MAX_DIM
    return few and fits and sizes and computable(q, k) and computable(cos, sin)


def takes_backward(
    grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, q_dtype: torch.dtype
) -> bool:
    return takes(grad_q, grad_k, cos, sin, interleaved)


def forward(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, cos.dtype)
    r1, r2 = (_of_pairs(angle, interleaved).to(dtype) for angle in (cos, sin))
    return _rotate(q.to(dtype), r1, r2, interleaved), _rotate(k.to(dtype), r1, r2, interleaved)


def backward(
    grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, q_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The transposed rotation: by the opposite angles, with those of the two elements of a pair exchanged."""
    r1, r2 = (_of_pairs(angle, interleaved).to(grad_q.dtype) for angle in (cos, sin))
    if not interleaved:  # neighbours have one angle
        r2 = torch.cat(r2.chunk(2, dim=-1)[::-1], dim=-1)
    grads = (_rotate(grad, r1, -r2, interleaved) for grad in (grad_q, grad_k))
    grad_q, grad_k = (grad.to(q_dtype) for grad in grads)
    return grad_q, grad_k


def _of_pairs(angle: Tensor, interleaved: bool) -> Tensor:
    """An angle for every element of a pair; ours has those of neighbours once, in the first half."""
    return angle[..., : angle.shape[-1] // 2].repeat_interleave(2, dim=-1) if interleaved else angle


def _rotate(x: Tensor, r1: Tensor, r2: Tensor, interleaved: bool) -> Tensor:
    """``x [batch, heads, seq, head_dim]``, angles ``[batch | 1, seq, rotary_dim]``, all of one dtype.

    Models pass views of ``[batch, seq, heads, head_dim]``, a layout that the vendor's operator has too.
    """
    viewed = x.transpose(1, 2).is_contiguous()
    if viewed:
        x = x.transpose(1, 2)
    heads = 2 if viewed else 1
    rotary_dim = r1.shape[-1]
    mode = "interleave" if interleaved else "half"
    angles = r1.unsqueeze(heads).contiguous(), r2.unsqueeze(heads).contiguous()
    out = torch.ops.npu.npu_rotary_mul(x[..., :rotary_dim], *angles, mode)
    if rotary_dim < x.shape[-1]:
        out = torch.cat((out, x[..., rotary_dim:]), dim=-1)
    return out.transpose(1, 2) if viewed else out
