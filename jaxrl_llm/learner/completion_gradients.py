"""The gradient of an update by completions: the norm of each completion's term, and its product with the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.learner.update import BALANCE, Learner, make_gradient
from jaxrl_llm.machine import sharding
from jaxrl_llm.machine.compilation import ROUND_AS_WRITTEN
from jaxrl_llm.structs import Array, Batch, PyTree

PROMPT_FIELDS = ("prompts", "prompt_mask", "images")  # fields of a `Batch` that the completions of a group share


def make_completion_gradients(
    policy: Learner, mesh: Mesh, microbatch: int
) -> Callable[..., tuple[Array, Array, Array]]:
    """Returns `gradients(params, batch, coefs, base)` -> norm of the whole gradient, norms and products [B, G].

    The norms are those of each completion's term of the gradient; the terms add up to the gradient. The products are
    the scalar products of terms and gradient. The terms are computed one after the other, so that memory holds one.
    """
    place = NamedSharding(mesh, sharding.BATCH)

    @partial(jax.jit, compiler_options=ROUND_AS_WRITTEN)
    def gradients(params: PyTree, batch: Batch, coefs: dict[str, Array], base: PyTree) -> tuple[Array, Array, Array]:
        """Returns the norm of the whole gradient, and the norms and products [B, G] of the completions' terms."""
        whole, _ = policy.gradient(microbatch)(params, batch, coefs, base)
        token_weights = policy.aggregate(batch.loss_mask)
        # The load-balance loss is a loss of the whole batch, and belongs to no completion.
        own_coefs = {name: coef for name, coef in coefs.items() if name != BALANCE}

        def term(index: tuple[Array, Array]) -> tuple[Array, Array]:
            """Returns the norm of a completion's term, and its product with the whole gradient.

            index: index of the prompt in the batch, and of the completion in its group.
            """
            alone, weights = jax.lax.with_sharding_constraint(
                select_completion(batch, token_weights, *index, copies=sharding.prompt_shards(mesh)), place
            )
            # The weights come from the whole update, because their denominators count all of its tokens.
            gradient = make_gradient(
                policy.objective, mesh, 0, aggregate=lambda mask: weights, dtype="float32", combine=policy.base.combine
            )
            grads, _ = gradient(params, alone, own_coefs, base)
            return optax.global_norm(grads), jnp.asarray(optax.tree.vdot(grads, whole))

        prompts, group_size, _ = batch.completions.shape
        prompt_and_member = jnp.divmod(jnp.arange(prompts * group_size), group_size)
        norms, products = jax.lax.map(term, prompt_and_member)
        shape = prompts, group_size
        return optax.global_norm(whole), norms.reshape(shape), products.reshape(shape)

    return gradients


def select_completion(
    batch: Batch, weights: Array, prompt: Array, member: Array, *, copies: int
) -> tuple[Batch, Array]:
    """Returns the batch with one completion alone, and its entries of the token weights.

    prompt: index of its prompt in the batch. member: index of the completion in its group. copies: number of prompts in
    the result, at least one per device; only the first has tokens that count.
    """

    def repeat(array: Array) -> Array:
        return jnp.broadcast_to(array, (copies, *array.shape[1:]))

    def select_prompt(array: Array) -> Array:
        return repeat(array[prompt][None])

    shared = {name: jax.tree.map(select_prompt, getattr(batch, name)) for name in PROMPT_FIELDS}
    own = replace(batch, **dict.fromkeys(PROMPT_FIELDS), packed_index=None)
    own, weights = jax.tree.map(lambda array: repeat(array[prompt, member][None, None]), (own, weights))
    is_first = jnp.arange(copies).reshape(-1, 1, 1) == 0
    masks = {name: getattr(own, name) & is_first for name in ("completion_mask", "loss_mask")}
    return replace(own, **shared, **masks), weights
