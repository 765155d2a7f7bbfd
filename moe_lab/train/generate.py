"""Text from a model, a token at a time. Lesson: 00_start_here."""

from __future__ import annotations

import torch

from moe_lab.model import Transformer


@torch.no_grad()
def generate(
    model: Transformer,
    prompt: list[int],
    tokens: int,
    *,
    context: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> list[int]:
    """``prompt`` continued by ``tokens`` sampled ids; the model sees at most the last ``context`` of them.

    ``temperature`` 0 takes the most likely token. The same seed on the same machine gives the same text.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    was_training = model.training
    model.eval()
    ids = list(prompt)
    for _ in range(tokens):
        window = torch.tensor([ids[-context:]], device=device)
        logits = model(window)[0, -1].float()
        if temperature == 0:
            ids.append(int(logits.argmax()))
        else:
            probabilities = torch.softmax(logits / temperature, -1)
            ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    model.train(was_training)
    return ids
