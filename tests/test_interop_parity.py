"""Logits and every gradient equal to transformers' eager path, for all five families and their options."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from interop_models import (
    VARIANT_IDS,
    VARIANTS,
    VOCAB,
    DoubleStaysDouble,
    cast,
    gradients_as_ours,
    ours,
    relative,
    theirs,
)
from torch import Tensor

from moe_lab.model import cross_entropy
from moe_lab.routing import balance_loss, record

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
# Three tokens choose at most 6 of 8 experts (9 with top 3, but of three tokens): some expert gets no token.
SHAPES = [(2, 9), (1, 3), (3, 17)]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def check_equal(
    reference: torch.nn.Module, folder: Path, dtype: torch.dtype, tokens: Tensor, mask: Tensor | None = None
) -> None:
    """Logits at real positions, and all gradients of a random linear function of them."""
    reference = cast(reference, dtype)
    model = ours(reference, folder / "weights", dtype)
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
    documents = None if mask is None else torch.where(real, 0, -1)
    with DoubleStaysDouble():
        wanted = reference(tokens, attention_mask=mask).logits[real]
    got = model(tokens, documents)[real]
    assert wanted.dtype == got.dtype == dtype
    assert relative(got, wanted) < TOLERANCE[dtype]

    direction = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(7), dtype=dtype)
    reference.zero_grad()
    with DoubleStaysDouble():
        (wanted * direction).sum().backward()
    (got * direction).sum().backward()
    gradients = gradients_as_ours(reference, folder / "gradients")
    parameters = dict(model.named_parameters())
    assert parameters.keys() == gradients.keys()
    assert all(p.grad is not None for p in parameters.values())
    errors = {name: relative(p.grad, gradients[name]) for name, p in parameters.items()}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < TOLERANCE[dtype], f"{worst}: {errors[worst]:.2e}"


def random_tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize(("family", "name", "options"), VARIANTS, ids=VARIANT_IDS)
def test_logits_and_gradients(
    family: str, name: str, options: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    for number, shape in enumerate(SHAPES):
        check_equal(theirs(family, options), tmp_path / str(number), dtype, random_tokens(*shape))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize(
    ("family", "options"),
    [("olmoe", {}), ("mixtral", {"sliding_window": 4}), ("qwen3_moe", {"mlp_only_layers": [0]}), ("flex_olmo", {}),
     ("afmoe", {"sliding_window": 4, "global_attn_every_n_layers": 2})],
)  # fmt: skip
def test_padding(family: str, options: dict[str, Any], dtype: torch.dtype, side: str, tmp_path: Path) -> None:
    mask = torch.tensor([[1] * 9 + [0] * 2, [1] * 4 + [0] * 7, [1] * 11])
    if side == "left":
        mask = mask.flip(1)
    check_equal(theirs(family, options), tmp_path, dtype, random_tokens(3, 11), mask)


@pytest.mark.parametrize("family", ["olmoe", "mixtral", "qwen3_moe", "flex_olmo", "afmoe"])
def test_an_expert_without_tokens(family: str, tmp_path: Path) -> None:
    reference = theirs(family)
    tokens = random_tokens(1, 3)
    with record(reference) as recorder:
        reference(tokens)
    idle = recorder.counts == 0
    assert idle.any(1).all()
    check_equal(reference, tmp_path, torch.float64, tokens)
    model = ours(reference, tmp_path / "again")
    model(tokens).sum().backward()
    for row, (_, layer) in zip(idle, model.moe_layers()):
        assert torch.count_nonzero(layer.experts.gate_up.grad[row]) == 0
        assert torch.count_nonzero(layer.experts.down.grad[row]) == 0
        assert torch.count_nonzero(layer.experts.down.grad[~row]) > 0


def test_what_fp64_would_show_without_the_mode(tmp_path: Path) -> None:
    """The reference rounds to fp32 inside a fp64 model: that, not our model, is why the mode exists."""
    reference = cast(theirs("olmoe"), torch.float64)
    tokens = random_tokens(2, 9)
    got = ours(reference, tmp_path)(tokens)
    rounded = relative(got, reference(tokens).logits)
    with DoubleStaysDouble():
        exact = relative(got, reference(tokens).logits)
    assert exact < 1e-12 < 1e-8 < rounded < 1e-5


class TestBalanceLoss:
    """Theirs is K at balance, ours 1; theirs takes all layers together, ours each one."""

    MODULES = ("olmoe", "mixtral", "qwen3_moe", "flex_olmo")

    @staticmethod
    def function(family: str) -> Any:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        return module.load_balancing_loss_func

    @staticmethod
    def of_ours(logits_TE: Tensor, top_k: int) -> float:
        scores = torch.softmax(logits_TE, -1)
        counts = torch.bincount(scores.topk(top_k).indices.flatten(), minlength=scores.shape[1])
        return float(balance_loss(scores[None], counts[None], top_k))

    @pytest.mark.parametrize("family", MODULES)
    @pytest.mark.parametrize("top_k", [1, 2, 3])
    def test_k_times_ours_on_the_same_routing(self, family: str, top_k: int) -> None:
        logits = torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(top_k))
        theirs_of = self.function(family)
        assert float(theirs_of((logits[0],), 8, top_k)) == pytest.approx(
            top_k * self.of_ours(logits[0], top_k), rel=1e-5
        )
        layers = float(theirs_of(tuple(logits), 8, top_k))
        assert layers == pytest.approx(top_k * self.of_ours(logits.flatten(0, 1), top_k), rel=1e-5)

    @pytest.mark.parametrize("family", MODULES)
    def test_k_and_1_at_balance(self, family: str) -> None:
        token, expert = torch.arange(64)[:, None], torch.arange(8)[None, :]
        logits = 3.0 * ((expert - token) % 8 < 2)  # token t prefers experts t and t + 1
        assert float(self.function(family)((logits,), 8, 2)) == pytest.approx(2, abs=1e-5)
        assert self.of_ours(logits, 2) == pytest.approx(1, abs=1e-5)

    def test_padding_counts_for_neither(self) -> None:
        logits = torch.randn(12, 8, generator=torch.Generator().manual_seed(3))
        mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]])
        value = float(self.function("olmoe")((logits,), 8, 2, mask))
        assert value == pytest.approx(2 * self.of_ours(logits[mask.flatten().bool()], 2), rel=1e-5)

    @pytest.mark.parametrize("family", ["olmoe", "mixtral", "qwen3_moe"])
    def test_the_imported_weight_gives_their_training_gradient(self, family: str, tmp_path: Path) -> None:
        """Cross-entropy and balance loss together, one MoE layer, where the two definitions are K apart and no more."""
        options = {"num_hidden_layers": 1, "router_aux_loss_coef": 0.3}
        reference = cast(theirs(family, options), torch.float64)
        model = ours(reference, tmp_path / "weights").train()
        assert model.config.moe is not None
        assert model.config.moe.balance_loss == pytest.approx(0.3 * 2)
        tokens = random_tokens(2, 8)  # 16 tokens: counts over them are exact in fp32
        with DoubleStaysDouble():
            reference(tokens, labels=tokens, output_router_logits=True).loss.backward()
        logits = model(tokens)
        part = cross_entropy(logits[:, :-1], tokens[:, 1:])
        (part.cross_entropy / part.labels).backward()
        gradients = gradients_as_ours(reference, tmp_path / "gradients")
        for name, parameter in model.named_parameters():
            if name == "head.weight" or parameter.grad is not None:
                assert relative(parameter.grad, gradients[name]) < 1e-9, name
