"""LLaVA's pictures on the CPU: SGLang loads its vision tower in fp16, whatever the model's dtype is.

``models/llava.py`` (SGLang 0.5.23, ``LlavaBaseForCausalLM.load_weights``) fixes fp16 for the tower and gives its
features to a projector in the server's dtype; with ``--dtype bfloat16``, which a CPU server needs for speed, the
projector's first matrix product fails ("mat1 and mat2 must have the same dtype"). The projector outlives updates of the
weights, the tower does not; so the features are converted right before it.
"""

from __future__ import annotations

from typing import Any

import torch


def convert_features(model: Any) -> None:
    """Let a LLaVA model's projector take features of any dtype; other models stay as they are."""
    projector = getattr(model, "multi_modal_projector", None)
    if not isinstance(projector, torch.nn.Module):
        return
    dtype = next(projector.parameters()).dtype
    projector.register_forward_pre_hook(lambda module, args: (args[0].to(dtype), *args[1:]))
