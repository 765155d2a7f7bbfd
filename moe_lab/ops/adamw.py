"""One AdamW step over flat arrays: decoupled decay, a clipping factor and a switch, all read on the device.

With g = scale * gradient and the step count t (after this step),
    m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,
    master = master (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps),
and nothing at all where ``apply`` is 0 (a skipped step). The Triton kernel reads and writes each value once and also
writes the low-precision copy: 30 bytes a parameter with bf16 weights. On a CPU torch's fused kernel does the arithmetic.
Source: Loshchilov and Hutter, arXiv 1711.05101; Olmo-core 3.0.0 skip-step. Lesson: 04_data_parallel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_lab.ops import reference_only


@dataclass(frozen=True)
class Hyper:
    """Numbers of a step that do not change from one to the next."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def reference(
    master: Tensor,
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    step: Tensor,
    lr: float,
    hyper: Hyper,
    scale: Tensor,
    apply: Tensor,
) -> None:
    """In place on ``master``, ``m``, ``v`` ``[n]``; ``step``: this step's number. Plain PyTorch, nothing read by the host."""
    g = grad * scale
    new_m = hyper.beta1 * m + (1 - hyper.beta1) * g
    new_v = hyper.beta2 * v + (1 - hyper.beta2) * g * g
    t = step.double()  # beta^t loses what is 1 - beta^t in fp32; torch's fused kernel takes it in fp64, too
    correction1, correction2 = 1 - hyper.beta1**t, 1 - hyper.beta2**t
    update = (new_m / correction1) / ((new_v / correction2).sqrt() + hyper.eps)
    new_master = master * (1 - lr * hyper.weight_decay) - lr * update
    for old, new in ((m, new_m), (v, new_v), (master, new_master)):
        old.copy_(torch.where(apply > 0, new, old))


def adamw(
    master: Tensor,
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    weight: Tensor,
    step: Tensor,
    lr: float,
    hyper: Hyper,
    scale: Tensor,
    apply: Tensor,
) -> None:
    """One step in place on the flat arrays ``master``, ``m``, ``v`` ``[n]``, from ``grad [n]``; ``weight [n]`` gets the new values.

    ``weight`` may be ``master`` itself (then nothing is copied) or an array of a lower precision. ``step``, ``scale`` and
    ``apply`` are scalars on the device: the step's number counted from 1, what the gradient is multiplied by, and 0 to
    leave everything as it was. ``grad`` may be overwritten.
    """
    own = weight.data_ptr() == master.data_ptr()
    if not reference_only() and master.is_cuda and master.dtype == torch.float32:
        from moe_lab.ops.adamw_triton import launch

        launch(master, m, v, grad, None if own else weight, step, lr, hyper, scale, apply)
        return
    if not reference_only() and not master.is_cuda:
        # Here the host may read: nothing to do for a skipped step, and no pass over the gradient for a factor of 1.
        if not bool(apply):
            return
        if float(scale) != 1.0:
            grad.mul_(scale)
        torch._fused_adamw_(
            [master], [grad], [m], [v], [], [step.to(torch.float32)], amsgrad=False, maximize=False, lr=lr,
            beta1=hyper.beta1, beta2=hyper.beta2, weight_decay=hyper.weight_decay, eps=hyper.eps,
        )  # fmt: skip
    else:
        reference(master, m, v, grad, step, lr, hyper, scale, apply)
    if not own:
        weight.copy_(master)
