"""A teacher whose log-probabilities of the policy's own samples the policy learns from."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import Mesh

from jaxrl_llm import update
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.sampling import Sampling
from jaxrl_llm.structs import Batch, Config


def make_teacher(config: Config, student: Decoder, sampling: Sampling, mesh: Mesh) -> Callable[[Batch], jax.Array]:
    """`score(batch) -> [B, G, C]`, of the model in `teacher.path`.

    Raises: UserError, for a folder that cannot be loaded, and one with another vocabulary.
    """
    folder = hf.find(config.teacher.path)
    model = hf.load_model(folder, mesh, dtype=config.model.dtype, remat="none")
    if model.cfg.vocab_size != student.cfg.vocab_size:
        raise UserError(
            f"config.teacher.path = {config.teacher.path!r} has a vocabulary of {model.cfg.vocab_size}, the policy one "
            f"of {student.cfg.vocab_size}: a teacher must know the policy's tokens"
        )
    params = hf.load_params(folder, model, mesh)
    score = update.make_score(model, sampling, mesh, config.microbatch)
    return lambda batch: score(params, batch)
