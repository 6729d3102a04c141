"""Fused attention, in the form that a device has a kernel for.

Without a fused kernel torch falls back to one that holds all T x T scores of every head, in silence: at 2,048 tokens
more than all that is counted of a layer. So torch is asked first, and what it has no kernel for is given another form.

B samples, T tokens (S of them seen), H query heads, K key/value heads, E head width.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn import functional

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

Kind = Literal["grouped", "repeated", "wide"]
"""How keys and values come to the kernel: as they are, K heads for H; each head as often as it is used; or like that
and all in fp32, for bf16 on cards that are older than it (below compute capability 8.0)."""


@cache
def attention_kind(device: torch.device, dtype: torch.dtype, width: int) -> Kind:
    """The form that a device has a kernel for, at a head width: the one that takes least memory.

    The processor's kernel takes groups. Of CUDA's the one that does, flash attention, wants half precision, a card of
    capability 8.0, a width that it knows, and a torch that was built with it; the other one wants as many key as query
    heads, and the same capability for bf16.
    """
    if device.type == "cpu":
        return "grouped"
    if device.type == "cuda":
        if flash_takes(device, dtype, width):
            return "grouped"
        if dtype == torch.bfloat16 and not efficient_takes(device, dtype, width):
            return "wide"
    return "repeated"


def flash_takes(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether flash attention does, forward and backward, with groups of heads."""
    return can_use_flash_attention(_asked(device, dtype, width, 2, 1))


def efficient_takes(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether memory-efficient attention does, without groups."""
    return can_use_efficient_attention(_asked(device, dtype, width, 1, 1))


def _asked(device: torch.device, dtype: torch.dtype, width: int, heads: int, kv_heads: int) -> Any:
    """Torch answers for tensors: these are the smallest."""
    query, key, value = (
        torch.zeros((1, count, 8, width), dtype=dtype, device=device, requires_grad=True)
        for count in (heads, kv_heads, kv_heads)
    )
    return SDPAParams(query, key, value, None, 0.0, True, heads != kv_heads)


def attend(query_BHTE: Tensor, key_BKSE: Tensor, value_BKSE: Tensor, mask: CausalBias | None = None) -> Tensor:
    """[B, H, T, E]: causal attention; without `mask` of T tokens that see each other."""
    dtype, groups = query_BHTE.dtype, query_BHTE.shape[1] // key_BKSE.shape[1]
    kind = attention_kind(query_BHTE.device, dtype, query_BHTE.shape[-1])
    query, key, value = query_BHTE, key_BKSE, value_BKSE
    if kind == "wide":
        query, key, value = query.float(), key.float(), value.float()
    if kind != "grouped" and groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    found = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=kind == "grouped" and groups > 1
    )
    return found.to(dtype)
