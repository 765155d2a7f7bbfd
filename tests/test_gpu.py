"""What only a CUDA device can show: kernels against their references, products that accumulate in fp32, real memory."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from moe_lab import presets  # noqa: E402
from moe_lab.config import OptimConfig, ParallelConfig  # noqa: E402
from moe_lab.model import build, cross_entropy  # noqa: E402
from moe_lab.ops import grouped_gemm  # noqa: E402
from moe_lab.ops.adamw import Hyper, adamw, reference  # noqa: E402
from moe_lab.ops.gradient import GradientSlot, set_slot  # noqa: E402
from moe_lab.ops.linear import linear  # noqa: E402
from moe_lab.parallel import Mesh, ShardedDataParallel, weight_decay_of  # noqa: E402
from moe_lab.plan import count_parameters  # noqa: E402
from moe_lab.train import Trainer  # noqa: E402

DEVICE = "cuda"


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, device=DEVICE)


@pytest.mark.parametrize("size", [1, 1000, 1024, 100_003])
@pytest.mark.parametrize("low", [True, False])
def test_adamw_kernel(size: int, low: bool) -> None:
    hyper = Hyper(0.9, 0.95, 1e-8, 0.1)
    start = torch.randn(size, device=DEVICE)
    ours, plain = ([start.clone(), torch.zeros_like(start), torch.zeros_like(start)] for _ in range(2))
    weight = start.bfloat16() if low else ours[0]
    for step in range(1, 5):
        grad = torch.randn_like(start)
        scale, apply, number = scalar(0.5), scalar(0.0 if step == 3 else 1.0), scalar(float(step))
        adamw(*ours, grad, weight, number, 0.01, hyper, scale, apply)
        reference(*plain, grad, number, 0.01, hyper, scale, apply)
        torch.testing.assert_close(ours, plain, rtol=2e-5, atol=1e-6)
        assert torch.equal(weight, ours[0].to(weight.dtype))


def test_weight_gradients_accumulate_in_fp32_inside_the_product() -> None:
    x = torch.randn(512, 96, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.nn.Parameter(torch.randn(64, 96, device=DEVICE, dtype=torch.bfloat16))
    slot = GradientSlot(torch.zeros(64, 96, device=DEVICE), lambda: None)
    set_slot(weight, slot)
    upstream = torch.randn(512, 64, device=DEVICE, dtype=torch.bfloat16)
    for _ in range(3):
        linear(x, weight).backward(upstream)
    exact = 3 * (upstream.double().T @ x.double())
    error = (slot.total.double() - exact).norm() / exact.norm()
    assert error < 1e-5  # a bf16 result would show 2e-3


@pytest.mark.parametrize("sizes", [[128, 0, 64, 320], [7, 9, 0, 48], [0, 0, 0, 64]])
@pytest.mark.parametrize("slotted", [False, True])
def test_grouped_linear_on_device_offsets(sizes: list[int], slotted: bool) -> None:
    offsets = torch.tensor(sizes, device=DEVICE).cumsum(0, dtype=torch.int32)
    x = torch.randn(sum(sizes), 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    w = torch.nn.Parameter(torch.randn(4, 96, 64, device=DEVICE, dtype=torch.bfloat16))
    total = torch.zeros(4, 96, 64, device=DEVICE)
    if slotted:
        set_slot(w, GradientSlot(total, lambda: None))
    upstream = torch.randn(sum(sizes), 96, device=DEVICE, dtype=torch.bfloat16)
    y = grouped_gemm.grouped_linear(x, w, offsets)
    y.backward(upstream)
    x64, w64 = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    expected = grouped_gemm.reference(x64, w64, offsets)
    grads = torch.autograd.grad(expected, [x64, w64], upstream.double())
    got_w = total if slotted else w.grad
    for mine, wanted in ((y, expected), (x.grad, grads[0]), (got_w, grads[1])):
        assert (mine.double() - wanted).norm() <= 1e-2 * wanted.norm()
    for expert, size in enumerate(sizes):
        if size == 0:
            assert not got_w[expert].any()


def test_static_memory_is_18_bytes_a_parameter_by_the_allocator() -> None:
    config = presets.get(
        "bench-8l",
        experts=8,
        layers=3,
        d_model=1024,
        n_heads=8,
        n_kv_heads=2,
        expert_hidden=1024,
        shared_hidden=1024,
        dense_hidden=5120,
    )
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = build(config.model, DEVICE, torch.bfloat16)
    parallel = ParallelConfig().resolve(1)
    engine = ShardedDataParallel(
        model, Mesh(parallel), parallel, OptimConfig(lr=1e-3), weight_decay_of(model, ())
    )
    torch.cuda.synchronize()
    used = torch.cuda.memory_allocated() - before
    total = count_parameters(config.model).total
    assert 18 * total <= used <= 18 * total * 1.002 + 2**20
    assert sum(engine.memory().values()) == pytest.approx(used, rel=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_laptop_preset_trains_on_the_device(precision: str) -> None:
    trainer = Trainer(
        presets.get("laptop", steps=40, warmup_steps=10, eval_every=40, precision=precision),
        device=DEVICE,
        show=False,
    )
    results = trainer.fit()
    assert results["final validation CE loss"] < 2.6


def test_a_training_step_waits_for_nothing() -> None:
    """bf16 on a device of capability 9: forward, backward, reduction and optimizer without one wait of the host."""
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("the grouped product runs a host loop on this device")
    trainer = Trainer(
        presets.get("laptop", precision="bf16", skip_sigma=6.0, steps=20, warmup_steps=5),
        device=DEVICE,
        show=False,
    )
    trainer.train_step()
    batches = [trainer._microbatch(i) for i in range(trainer.microbatches)]
    torch.cuda.synchronize()
    trainer._microbatch = lambda i: batches[i]  # type: ignore[method-assign]
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.train_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(trainer.metrics.fetch()) == 2


def test_gradients_equal_the_cpus() -> None:
    config = presets.get("laptop", n_layers=2).model
    cpu, gpu = build(config), build(config, DEVICE)
    gpu.load_state_dict(cpu.state_dict())
    tokens = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(0))
    for model, device in ((cpu, "cpu"), (gpu, DEVICE)):
        moved = tokens.to(device)
        cross_entropy(model(moved), moved.roll(-1, 1)).cross_entropy.backward()
    for (name, a), b in zip(cpu.named_parameters(), gpu.parameters()):
        assert (a.grad - b.grad.cpu()).norm() <= 2e-3 * a.grad.norm(), name
