"""The AdamW step of ``adamw.py`` as one Triton kernel: each value read and written once, the bf16 copy written beside it."""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from moe_lab.ops.adamw import Hyper

BLOCK = 1024


@triton.jit
def _kernel(
    master, m, v, grad, weight, step, scale, apply, lr, beta1, beta2, eps, decay, n, COPY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    if tl.load(apply) > 0:
        t = tl.load(step)
        correction1 = 1 - tl.exp(t * tl.log(beta1))
        correction2 = 1 - tl.exp(t * tl.log(beta2))
        g = tl.load(grad + index, mask=inside).to(tl.float32) * tl.load(scale)
        new_m = beta1 * tl.load(m + index, mask=inside) + (1 - beta1) * g
        new_v = beta2 * tl.load(v + index, mask=inside) + (1 - beta2) * g * g
        update = (new_m / correction1) / (tl.sqrt(new_v / correction2) + eps)
        value = tl.load(master + index, mask=inside) * (1 - lr * decay) - lr * update
        tl.store(m + index, new_m, mask=inside)
        tl.store(v + index, new_v, mask=inside)
        tl.store(master + index, value, mask=inside)
        if COPY:
            tl.store(weight + index, value.to(weight.dtype.element_ty), mask=inside)


def launch(
    master: Tensor, m: Tensor, v: Tensor, grad: Tensor, weight: Tensor | None, step: Tensor, lr: float, hyper: "Hyper",
    scale: Tensor, apply: Tensor,
) -> None:  # fmt: skip
    """As :func:`moe_lab.ops.adamw.adamw`, for fp32 arrays on a CUDA device; ``weight`` None writes no copy."""
    n = master.numel()
    if n == 0:
        return
    with torch.cuda.device(master.device):
        _kernel[(triton.cdiv(n, BLOCK),)](
            master, m, v, grad, master if weight is None else weight, step, scale, apply, lr, hyper.beta1, hyper.beta2,
            hyper.eps, hyper.weight_decay, n, COPY=weight is not None, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
