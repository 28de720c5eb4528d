"""Rotary position embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864)."""

from __future__ import annotations

from torch import Tensor

from mindspeed_kernels import reference


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate the queries and keys of one attention layer by their positions' angles.

    Half-split (Llama, Qwen, …), with ``h = rotary_dim / 2``::

        out[i]     = x[i]     * cos[i]     - x[i + h] * sin[i]
        out[i + h] = x[i + h] * cos[i + h] + x[i]     * sin[i + h]

    Interleaved (GLM, …), using the first half of ``cos`` and ``sin``::

        out[2i]     = x[2i]     * cos[i] - x[2i + 1] * sin[i]
        out[2i + 1] = x[2i + 1] * cos[i] + x[2i]     * sin[i]

    Args:
        q: ``[batch, num_heads, seq, head_dim]``, any strides (transformers passes transposed views).
        k: ``[batch, num_key_value_heads, seq, head_dim]``, dtype of ``q``.
        cos, sin: ``[batch or 1, seq, rotary_dim]`` as transformers builds them (both halves alike), ``rotary_dim`` even
            and at most ``head_dim``. The remaining ``head_dim - rotary_dim`` elements pass through unchanged.
        interleaved: pairs are neighbours instead of halves.

    Returns:
        ``(q_out, k_out)`` with the shapes and memory layout of the inputs, in the promoted dtype of ``q`` and ``cos``.
        The sum is formed in float32 and rounded once.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit together.
    """
    return reference.rotary(q, k, cos, sin, interleaved=interleaved)
