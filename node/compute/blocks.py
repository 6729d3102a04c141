"""The two halves of a transformer layer, and what stands before and after all layers: plain functions of weights.

Shapes: B samples, T tokens (context), D hidden width, H query heads, K key/value heads, E head width, F feed-forward
width, V vocabulary. Halves are separate functions because they are the unit of partition.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from node.compute.attention import attend
from protocol.run.run import ModelSection


def rotary_table(model: ModelSection, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of the rotary angles, [T, E] each, in the half-split layout of Hugging Face's LLaMA.

    Rotary positions: Su et al., arXiv:2104.09864. The sine of the first half carries the minus of "rotate half", so
    that applying it is two products and a sum.
    """
    width = model.hidden // model.heads
    # The same fp32 operations, in the same order, as transformers' LlamaRotaryEmbedding: an export then agrees.
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    frequencies = 1.0 / (model.rope_theta**exponents)
    angles = torch.arange(tokens, dtype=torch.float32)[:, None] * frequencies
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat((cosine, cosine), dim=-1).to(device), torch.cat((-sine, sine), dim=-1).to(device)


def rotate(x_BHTE: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turns each pair (i, i + E/2) of a head by its position's angle."""
    cosine, signed_sine = rotary
    return x_BHTE * cosine + x_BHTE.roll(x_BHTE.shape[-1] // 2, dims=-1) * signed_sine


def norm(x: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    """RMSNorm (Zhang and Sennrich, arXiv:1910.07467)."""
    return functional.rms_norm(x, gain_D.shape, gain_D, eps)


def attention_half(
    x_BTD: Tensor, gain_D: Tensor, qkv_ND: Tensor, out_DD: Tensor, rotary: tuple[Tensor, Tensor], model: ModelSection
) -> Tensor:
    """Residual plus causal grouped-query attention; `qkv_ND` holds the rows of query, key and value, N = D + 2KE."""
    query, key, value = _query_key_value(x_BTD, gain_D, qkv_ND, rotary, model)
    return _with_residual(x_BTD, attend(query, key, value), out_DD)


def attention_segment(
    x_BTD: Tensor,
    gain_D: Tensor,
    qkv_ND: Tensor,
    out_DD: Tensor,
    rotary: tuple[Tensor, Tensor],
    model: ModelSection,
    past_BKPE: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of a segment of a sequence, whose T tokens see the P before them by their keys and values.

    Returns the segment's hidden states, and keys and values of all P + T tokens, which the next segment sees.
    `rotary` holds the angles of the segment's own places.
    """
    query, key, value = _query_key_value(x_BTD, gain_D, qkv_ND, rotary, model)
    mask = None
    if past_BKPE is not None:
        key, value = torch.cat((past_BKPE[0], key), dim=2), torch.cat((past_BKPE[1], value), dim=2)
        from torch.nn.attention.bias import causal_lower_right  # it brings torch's compiler along: three seconds

        mask = causal_lower_right(query.shape[2], key.shape[2])
    return _with_residual(x_BTD, attend(query, key, value, mask), out_DD), key, value


def _query_key_value(
    x_BTD: Tensor, gain_D: Tensor, qkv_ND: Tensor, rotary: tuple[Tensor, Tensor], model: ModelSection
) -> tuple[Tensor, Tensor, Tensor]:
    """[B, H, T, E] and twice [B, K, T, E]; query and key are turned to their places."""
    samples, tokens, hidden = x_BTD.shape
    width = hidden // model.heads
    heads_BTNE = functional.linear(norm(x_BTD, gain_D, model.norm_eps), qkv_ND).view(samples, tokens, -1, width)
    query, key, value = (
        part.transpose(1, 2) for part in torch.split(heads_BTNE, [model.heads, model.kv_heads, model.kv_heads], dim=2)
    )
    return rotate(query, rotary), rotate(key, rotary), value


def _with_residual(x_BTD: Tensor, mixed_BHTE: Tensor, out_DD: Tensor) -> Tensor:
    return x_BTD + functional.linear(mixed_BHTE.transpose(1, 2).reshape(x_BTD.shape), out_DD)


def feed_forward_half(
    x_BTD: Tensor, gain_D: Tensor, gate_up_ND: Tensor, down_DF: Tensor, model: ModelSection
) -> Tensor:
    """Residual plus SwiGLU (Shazeer, arXiv:2002.05202); `gate_up_ND` holds the rows of gate and up, N = 2F."""
    gate_BTF, up_BTF = functional.linear(norm(x_BTD, gain_D, model.norm_eps), gate_up_ND).chunk(2, dim=-1)
    return x_BTD + functional.linear(functional.silu(gate_BTF) * up_BTF, down_DF)
