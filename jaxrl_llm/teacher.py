"""A teacher whose log-probabilities of the policy's own samples the policy learns from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm import checks, update
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf
from jaxrl_llm.models.blocks import DecoderConfig
from jaxrl_llm.sampling import Sampling
from jaxrl_llm.structs import Batch, Config


def make_teacher(
    config: Config, folder: Path, policy: DecoderConfig, tokenizer: Any, sampling: Sampling, mesh: Mesh
) -> Callable[[Batch], jax.Array]:
    """`score(batch) -> [B, G, C]`, of the model in `folder`.

    Raises: UserError, for a model that cannot be loaded, or that means something else by the policy's tokens.
    """
    model = hf.load_model(folder, mesh, dtype=config.model.dtype, remat="none")
    checks.check_other_model("teacher.path", model.cfg, policy)
    theirs = hf.load_tokenizer(folder).get_vocab()
    other = next((token for token, number in tokenizer.get_vocab().items() if theirs.get(token) != number), None)
    if other is not None:
        raise UserError(f"config.teacher.path: its tokenizer knows {other!r} by another number: give one of the kind")
    params = hf.load_params(folder, model, mesh)
    score = update.make_score(model, sampling, mesh, config.microbatch)
    return lambda batch: score(params, batch)
