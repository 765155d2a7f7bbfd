"""Each operation against its reference: outputs and every gradient, on random shapes, empty experts included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lab.errors import ConfigError, RoutingError
from moe_lab.ops import grouped_gemm, permute, reference_only, rmsnorm, swiglu
from moe_lab.ops.gradient import GradientSlot, set_slot
from moe_lab.ops.linear import linear


def gradients(outputs: torch.Tensor, inputs: list[torch.Tensor], seed: int = 1) -> list[torch.Tensor]:
    """Gradients of a random projection of ``outputs``."""
    upstream = torch.randn(outputs.shape, dtype=outputs.dtype, generator=torch.Generator().manual_seed(seed))
    return list(torch.autograd.grad(outputs, inputs, upstream))


def routed(seed: int, tokens: int, top_k: int, experts: int, skewed: bool) -> torch.Tensor:
    """``[T, K]`` int32 distinct experts a token; skewed: mostly the first ones, so that some get none."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator)
    if skewed:
        scores += torch.linspace(5, 0, experts)
    return scores.topk(top_k).indices.int()


shapes = st.tuples(
    st.integers(0, 40), st.integers(1, 4), st.integers(4, 9), st.booleans(), st.integers(0, 999)
)


@settings(max_examples=40, deadline=None)
@given(shapes)
def test_permute_and_unpermute(shape: tuple[int, int, int, bool, int]) -> None:
    tokens, top_k, experts, skewed, seed = shape
    indices = routed(seed, tokens, top_k, experts, skewed)
    order, inverse, counts = permute.expert_order(indices, experts)
    assert counts.tolist() == [int((indices == e).sum()) for e in range(experts)]
    assert indices.reshape(-1)[order].tolist() == sorted(indices.reshape(-1).tolist())
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    weights = torch.rand(tokens, top_k, dtype=torch.float64, generator=generator, requires_grad=True)
    rows = permute.permute(x, order, inverse, top_k)
    expected = permute.permute_reference(x, order, top_k)
    assert torch.equal(rows, expected)
    torch.testing.assert_close(gradients(rows, [x]), gradients(expected, [x]))
    rows = rows.detach().requires_grad_()
    y = permute.unpermute(rows, order, inverse, weights)
    expected = permute.unpermute_reference(rows, inverse, weights)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(gradients(y, [rows, weights]), gradients(expected, [rows, weights]))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.integers(0, 5),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(0, 999),
)
def test_grouped_linear(sizes: list[int], tail: int, inputs: int, outputs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    x = torch.randn(sum(sizes) + tail, inputs, dtype=torch.float64, generator=generator, requires_grad=True)
    w = torch.randn(len(sizes), outputs, inputs, dtype=torch.float64, generator=generator, requires_grad=True)
    y, expected = grouped_gemm.grouped_linear(x, w, offsets), grouped_gemm.reference(x, w, offsets)
    torch.testing.assert_close(y, expected)
    assert not y[sum(sizes) :].any()
    grad_x, grad_w = gradients(y, [x, w])
    torch.testing.assert_close([grad_x, grad_w], gradients(expected, [x, w]))
    assert not grad_x[sum(sizes) :].any()
    for expert, size in enumerate(sizes):
        if size == 0:
            assert not grad_w[expert].any()


def test_grouped_linear_takes_an_expanded_gradient() -> None:
    x, w = torch.randn(4, 3, requires_grad=True), torch.randn(2, 5, 3, requires_grad=True)
    offsets = torch.tensor([1, 4], dtype=torch.int32)
    expected = torch.autograd.grad(grouped_gemm.reference(x, w, offsets).sum(), [x, w])
    torch.testing.assert_close(
        torch.autograd.grad(grouped_gemm.grouped_linear(x, w, offsets).sum(), [x, w]), expected
    )


@pytest.mark.parametrize("shape", [(0, 8), (5, 2), (2, 3, 16)])
def test_swiglu(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y, expected = swiglu.swiglu(x), swiglu.reference(x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(gradients(y, [x]), gradients(expected, [x]))


@pytest.mark.parametrize("shape", [(0, 8), (5, 2), (2, 3, 4, 16)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    gain = torch.rand(shape[-1:], dtype=torch.float64, requires_grad=True)
    y, expected = rmsnorm.rms_norm(x, gain, 1e-3), rmsnorm.reference(x, gain, 1e-3)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(gradients(y, [x, gain]), gradients(expected, [x, gain]))
    low = x.detach().bfloat16()
    assert torch.equal(
        rmsnorm.rms_norm(low, gain.bfloat16(), 1e-3), rmsnorm.reference(low, gain.bfloat16(), 1e-3)
    )


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, w = torch.randn(4, 3), torch.randn(2, 5, 3)
    with pytest.raises(RoutingError, match="int64 offsets of shape"):
        grouped_gemm.grouped_linear(x, w, torch.tensor([1, 4]))
    with pytest.raises(RoutingError, match=r"\(4, 2\).*\(2, 5, 3\)"):
        grouped_gemm.grouped_linear(x[:, :2], w, torch.tensor([1, 4], dtype=torch.int32))


def test_the_reference_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not reference_only()
    monkeypatch.setenv("MOE_LAB_OPS", "reference")
    assert reference_only()
    x, w = torch.randn(4, 3), torch.randn(2, 5, 3)
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    assert torch.equal(grouped_gemm.grouped_linear(x, w, offsets), grouped_gemm.reference(x, w, offsets))
    weight = torch.nn.Parameter(w[0].clone())
    set_slot(weight, GradientSlot(torch.zeros(5, 3), lambda: None))
    linear(x, weight).sum().backward()
    assert weight.grad is not None  # autograd's own backward, although there is a slot
    monkeypatch.setenv("MOE_LAB_OPS", "turbo")
    with pytest.raises(ConfigError, match="'turbo'"):
        reference_only()
