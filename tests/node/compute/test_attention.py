"""Tests of `node.compute.attention`: which form a device computes attention in, and that all are the same attention."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from node.compute import attention
from node.compute.attention import Kind, attend, attention_kind, efficient_takes, flash_takes

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    attention_kind.cache_clear()
    yield
    attention_kind.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "flash", "efficient", "kind"),
    [
        (torch.bfloat16, True, True, "grouped"),
        (torch.bfloat16, False, True, "repeated"),
        (torch.bfloat16, False, False, "wide"),
        (torch.float32, False, True, "repeated"),
    ],
    ids=["a card of today", "a torch without flash attention", "a card before bf16", "fp32"],
)
def test_a_card_attends_in_a_form_that_it_has_a_kernel_for(
    dtype: torch.dtype, flash: bool, efficient: bool, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 groups were given to every card; without flash attention torch held all scores, which were not counted,
    and the card ran out of memory in each task."""
    monkeypatch.setattr(attention, "flash_takes", lambda *_: flash)
    monkeypatch.setattr(attention, "efficient_takes", lambda *_: efficient)
    assert attention_kind(CUDA, dtype, 64) == kind


def test_other_devices_are_not_asked_about_cudas_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor's kernel takes groups; of the others nothing is known."""
    monkeypatch.setattr(attention, "flash_takes", lambda *_: pytest.fail("it was asked"))
    assert attention_kind(torch.device("cpu"), torch.bfloat16, 64) == "grouped"
    assert attention_kind(torch.device("mps"), torch.float32, 64) == "repeated"


def test_torch_takes_the_question() -> None:
    """It answers for tensors, here of the processor, for which it has neither kernel."""
    here = torch.device("cpu")
    assert not flash_takes(here, torch.bfloat16, 64) and not efficient_takes(here, torch.float32, 64)


@pytest.mark.parametrize("kind", ["repeated", "wide"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_every_form_is_the_same_attention(kind: Kind, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and gradients, but for rounding; in the type that came in."""
    draw = torch.Generator().manual_seed(1)
    dtype = torch.bfloat16 if kind == "wide" else torch.float32

    def computed(form: Kind) -> list[torch.Tensor]:
        draw.manual_seed(1)
        monkeypatch.setattr(attention, "attention_kind", lambda *_: form)
        query, key, value = (
            torch.randn(2, heads, 8, 16, generator=draw).to(dtype).requires_grad_() for heads in (4, kv_heads, kv_heads)
        )
        found = attend(query, key, value)
        assert found.dtype == dtype
        return [found.detach(), *torch.autograd.grad(found.float().square().sum(), (query, key, value))]

    allowed = 5e-2 if kind == "wide" else 1e-5
    for one, other in zip(computed("grouped"), computed(kind), strict=True):
        assert one.shape == other.shape and float((one - other).norm() / one.norm()) < allowed
