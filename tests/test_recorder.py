"""The routing recorder: on our models and on those of transformers, outputs unchanged, hooks gone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from interop_models import FAMILIES, VOCAB, ours, theirs
from torch import Tensor, nn

from moe_lab.errors import RoutingError
from moe_lab.routing import metrics, record

TOKENS = torch.randint(0, VOCAB, (3, 10), generator=torch.Generator().manual_seed(8))
MASK = torch.tensor([[1] * 10, [1] * 7 + [0] * 3, [0] * 4 + [1] * 6])
pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_both_libraries_record_the_same(family: str, tmp_path: Path) -> None:
    reference = theirs(family)
    model = ours(reference, tmp_path)
    top_k = 2
    plain = [reference(TOKENS).logits, model(TOKENS)]
    seen = []
    for each in (reference, model):
        with record(each, indices=True, probabilities=True) as recorder:
            out = each(TOKENS)
        assert torch.equal(getattr(out, "logits", out), plain[len(seen)])
        assert hooks(each) == 0
        seen.append(recorder)
    left, right = seen
    assert left.layers == right.layers == ((1,) if family == "afmoe" else (0, 1))
    layers = len(left.layers)
    assert torch.equal(left.counts, right.counts)
    assert left.counts.shape == (layers, 8)
    assert left.counts.dtype == torch.int64
    assert left.tokens == right.tokens == 30
    assert left.counts.sum(1).tolist() == [30 * top_k] * layers
    assert left.indices().shape == (layers, 30, top_k)
    assert torch.equal(left.indices().sort(-1).values, right.indices().sort(-1).values)
    assert left.probabilities().shape == (layers, 30, 8)
    torch.testing.assert_close(left.probabilities(), right.probabilities())
    assert metrics(left.counts).dead == int((left.counts.sum(0) == 0).sum())
    counted = torch.stack([torch.bincount(i.flatten().long(), minlength=8) for i in left.indices()])
    assert torch.equal(counted, left.counts)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_is_left_out(family: str, tmp_path: Path) -> None:
    reference = theirs(family)
    model = ours(reference, tmp_path)
    documents = torch.where(MASK.bool(), 0, -1)
    calls: list[tuple[nn.Module, Callable[[], object], Tensor | None]] = [
        (reference, lambda: reference(TOKENS, attention_mask=MASK), None),
        (reference, lambda: reference(TOKENS, MASK), None),
        (reference, lambda: reference(TOKENS, attention_mask=MASK), MASK),
        (model, lambda: model(TOKENS, documents), None),
        (model, lambda: model(TOKENS, documents_BS=documents), MASK.bool()),
    ]
    seen = []
    for each, call, mask in calls:
        with record(each, indices=True, mask=mask) as recorder:
            call()
        assert recorder.tokens == 23
        assert recorder.indices().shape[1] == 23
        seen.append(recorder.counts)
    assert all(torch.equal(counts, seen[0]) for counts in seen)
    with record(model) as recorder:
        model(TOKENS)
    assert recorder.tokens == 30


def test_passes_add_up_and_can_be_forgotten(tmp_path: Path) -> None:
    model = ours(theirs("olmoe"), tmp_path)
    with record(model, probabilities=True) as recorder:
        model(TOKENS)
        once = recorder.counts.clone()
        model(TOKENS[:1])
        assert recorder.tokens == 40
        assert recorder.probabilities().shape == (2, 40, 8)
        assert int(recorder.counts.sum()) == 2 * 40 * 2
        recorder.clear()
        recorder.mask = MASK
        model(TOKENS)
        assert recorder.tokens == 23
        recorder.mask = None
        recorder.clear()
        model(TOKENS)
    assert torch.equal(recorder.counts, once)
    model(TOKENS)
    assert recorder.tokens == 30


def test_generation_with_a_cache_and_left_padding() -> None:
    reference = theirs("mixtral")
    with record(reference) as recorder:
        reference.generate(
            TOKENS, attention_mask=MASK.flip(1), max_new_tokens=4, do_sample=False, pad_token_id=0
        )
    assert recorder.tokens == 23 + 3 * 3


def test_gradients_are_unchanged(tmp_path: Path) -> None:
    model = ours(theirs("qwen3_moe"), tmp_path).train()
    model(TOKENS).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with record(model, indices=True, probabilities=True):
        model(TOKENS).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters()))


def test_errors(tmp_path: Path) -> None:
    model = ours(theirs("olmoe"), tmp_path)
    with pytest.raises(RoutingError, match="Linear holds no router that can be recorded"):
        record(nn.Linear(2, 2))
    with pytest.raises(IndexError), record(model):
        model(torch.tensor([[VOCAB + 1]]))
    assert hooks(model) == 0
    message = r"the mask is \[3, 9\], but the router was given 30 tokens"
    with pytest.raises(RoutingError, match=message), record(model, mask=MASK[:, :9]):
        model(TOKENS)
    assert hooks(model) == 0
    with record(model) as recorder:
        pass
    with pytest.raises(RoutingError, match="2 of 2 routers have not run"):
        _ = recorder.counts
    with pytest.raises(RoutingError, match="no indices were kept: use record"):
        recorder.indices()
