"""Which expert every token of a running model chose. Lesson: 10_routing_analysis.

``with record(model) as recorder: model(tokens)`` works on our models and on Hugging Face's OLMoE, Mixtral, Qwen3-MoE,
FlexOlmo and AFMoE. It watches the routers by forward hooks: outputs stay as they are, and the hooks are gone when the
block ends, also by an error. Routers are told by the name of their class, so that nothing here needs either library.

Shapes: L MoE layers, E experts, K choices a token, T tokens counted.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moe_lab.errors import RoutingError

MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "attention_mask": lambda mask: mask != 0,  # transformers: 0 where there is padding
    "documents_BS": lambda documents: documents >= 0,  # ours: negative where there is padding
}


def _is_router(module: nn.Module) -> bool:
    name = type(module).__name__
    return name == "Router" or name.endswith(("TopKRouter", "TokenChoiceRouter"))


def _decision(module: nn.Module, output: Any) -> tuple[Tensor, Tensor]:
    """(indices ``[T, K]``, scores over all experts ``[T, E]``) of a router's output."""
    if hasattr(output, "indices") and hasattr(output, "scores"):  # our Routing
        return output.indices, output.scores
    logits, _, indices = output
    precise = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
    sigmoid = type(module).__name__.endswith("TokenChoiceRouter")
    return indices, torch.sigmoid(precise) if sigmoid else torch.softmax(precise, -1)


class Recorder:
    """What :func:`record` saw so far.

    ``layers``: index of each MoE layer in its model. ``counts [L, E]`` int64: slots each expert got. ``tokens``: T, the
    same for every layer. With ``indices``, ``indices()`` is ``[L, T, K]`` int32 on the CPU; with ``probabilities``,
    ``probabilities()`` is ``[L, T, E]`` fp32 on the CPU, the scores over all experts (softmax or sigmoid).
    """

    def __init__(self, model: nn.Module, *, indices: bool, probabilities: bool, mask: Tensor | None) -> None:
        found = [(name, module) for name, module in model.named_modules() if _is_router(module)]
        if not found:
            raise RoutingError(
                f"{type(model).__name__} holds no router that can be recorded: its modules must include ours or one of "
                "Hugging Face's OLMoE, Mixtral, Qwen3-MoE, FlexOlmo or AFMoE"
            )
        numbers = [re.search(r"(?:^|\.)(?:blocks|layers)\.(\d+)\.", name) for name, _ in found]
        self.layers = tuple(int(n[1]) if n else position for position, n in enumerate(numbers))
        self.mask = mask
        self._model, self._routers = model, [module for _, module in found]
        self._keep_indices, self._keep_probabilities = indices, probabilities
        self._parameters = list(inspect.signature(model.forward).parameters)
        self._call_mask: Tensor | None = None
        self._hooks: list[RemovableHandle] = []
        self.clear()

    def clear(self) -> None:
        """Forget what was seen."""
        layers = len(self.layers)
        self._counts: list[Tensor | None] = [None] * layers
        self._tokens = [0] * layers
        self._indices: list[list[Tensor]] = [[] for _ in range(layers)]
        self._probabilities: list[list[Tensor]] = [[] for _ in range(layers)]

    @property
    def counts(self) -> Tensor:
        """``[L, E]`` int64, on the device of the model."""
        seen = [count for count in self._counts if count is not None]
        if len(seen) < len(self._counts):
            raise RoutingError(
                f"{len(self._counts) - len(seen)} of {len(self._counts)} routers have not run: call the model first"
            )
        return torch.stack(seen)

    @property
    def tokens(self) -> int:
        """Tokens counted, T; padding is not."""
        return self._tokens[0]

    def indices(self) -> Tensor:
        """Chosen experts ``[L, T, K]``, int32, in order of the tokens; needs ``record(..., indices=True)``."""
        return self._joined(self._indices, "indices")

    def probabilities(self) -> Tensor:
        """Scores over all experts ``[L, T, E]``, fp32; needs ``record(..., probabilities=True)``."""
        return self._joined(self._probabilities, "probabilities")

    def _joined(self, parts: list[list[Tensor]], name: str) -> Tensor:
        if not all(parts):
            raise RoutingError(f"no {name} were kept: use record(model, {name}=True) and call the model")
        return torch.stack([torch.cat(part) for part in parts])

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(self._parameters, args)) | kwargs
        self._call_mask = None
        for name, real in MASKS.items():
            value = given.get(name)
            if isinstance(value, Tensor) and value.dim() == 2:
                self._call_mask = real(value)

    def _real(self, tokens: int) -> Tensor | None:
        mask = self.mask if self.mask is not None else self._call_mask
        if mask is None:
            return None
        if mask.dim() == 2 and tokens % mask.shape[0] == 0 and tokens <= mask.numel():
            # While text is generated with a cache the mask covers the past too; the tokens at hand are the last ones.
            return mask[:, mask.shape[1] - tokens // mask.shape[0] :].reshape(-1).bool()
        raise RoutingError(
            f"the mask is {list(mask.shape)}, but the router was given {tokens} tokens: a mask holds one value a token, [B, S]"
        )

    def _watch(self, layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            with torch.no_grad():
                indices_TK, scores_TE = _decision(module, output)
                real = self._real(indices_TK.shape[0])
                if real is not None:
                    real = real.to(indices_TK.device)
                    indices_TK, scores_TE = indices_TK[real], scores_TE[real]
                flat = indices_TK.reshape(-1).long()
                counts = torch.zeros(scores_TE.shape[1], dtype=torch.int64, device=flat.device)
                counts.scatter_add_(0, flat, torch.ones_like(flat))
                before = self._counts[layer]
                self._counts[layer] = counts if before is None else before + counts
                self._tokens[layer] += indices_TK.shape[0]
                if self._keep_indices:
                    self._indices[layer].append(indices_TK.to("cpu", torch.int32))
                if self._keep_probabilities:
                    self._probabilities[layer].append(scores_TE.to("cpu", torch.float32))

        return hook

    def __enter__(self) -> Recorder:
        self._hooks.append(self._model.register_forward_pre_hook(self._before, with_kwargs=True))
        for layer, router in enumerate(self._routers):
            self._hooks.append(router.register_forward_hook(self._watch(layer)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._hooks:
            self._hooks.pop().remove()


def record(
    model: nn.Module, *, indices: bool = False, probabilities: bool = False, mask: Tensor | None = None
) -> Recorder:
    """Count the experts' slots of every forward pass inside ``with record(model) as recorder:``.

    ``indices`` ``probabilities``: keep the choices and the scores too, which copies them to the CPU at each pass.
    Padding is left out: by ``mask [B, S]`` (true or 1 for real tokens), which may be changed as ``recorder.mask`` between
    passes; without it by what the model itself is called with, ``attention_mask`` or a negative ``documents_BS``.
    A layer that is computed twice, as recomputation in training does, is counted twice.

    Raises :class:`RoutingError` for a model without routers, and for a mask that does not fit the tokens.
    """
    return Recorder(model, indices=indices, probabilities=probabilities, mask=mask)
