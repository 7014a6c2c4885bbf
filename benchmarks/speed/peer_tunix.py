"""Time Tunix's GRPO step on one workload: python benchmarks/speed/peer_tunix.py MODEL_DIR --steps 5 --microbatch 16."""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from importlib.metadata import version

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors.numpy import load_file
from tunix.generate import sampler
from tunix.models.qwen2.model import ModelConfig, Qwen2
from tunix.models.qwen2.params import create_model_from_safe_tensors
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from benchmarks.speed.workloads import CLIP_NORM, KL_COEF, PAD, STOP, TEMPERATURE, Workload, read, reward


class Tokenizer:
    """Text is token ids with blanks between them, so that prompts are exactly the workload's."""

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> None:
        return None

    def eos_id(self) -> int:
        return STOP

    def pad_id(self) -> int:
        return PAD


def rewards(prompts: list[str], completions: list[str], **_) -> list[float]:
    return [reward(Tokenizer().encode(text)) for text in completions]


def forced_sampler(workload: Workload) -> type[sampler.Sampler]:
    """Tunix's sampler, whose rows stop exactly where the workload says."""

    class Forced(sampler.Sampler):
        rows = 0  # sampled so far; rows come in order, whatever the rollout's micro-batch

        def init_sample_state(self, all_input_ids: jax.Array, **kwargs) -> sampler._SamplingState:
            state = super().init_sample_state(all_input_ids, **kwargs)
            step, row = divmod(self.rows, workload.prompts * workload.group)
            self.rows += len(all_input_ids)
            lengths = np.ravel(workload.lengths(step))[row : row + len(all_input_ids)]
            stops = np.where(lengths < workload.completion_tokens, all_input_ids.shape[1] + lengths - 1, -1)
            # The stops travel with the noise key: the one field that the compiled loop hands on as it is.
            return state.replace(seed=(jax.random.fold_in(state.seed, self.rows), jnp.array(stops)))

        def _sample(self, logits, eos, cache, sampler_state) -> sampler._SamplingState:
            key, stops = sampler_state.seed
            state = super()._sample(logits, eos, cache, sampler_state.replace(seed=key))
            # One integer per row is replaced, which costs nothing; masking the logits would copy them. A padding
            # token would fall out of Tunix's masks, so it is not allowed either.
            column = state.decoding_step
            token = state.token_buffer[:, column]
            token = jnp.where((token == PAD) | (token == STOP), max(PAD, STOP) + 1, token)
            token = jnp.where(column == stops, STOP, token)
            return state.replace(
                seed=sampler_state.seed,
                token_buffer=state.token_buffer.at[:, column].set(token),
                done=sampler_state.done | (token == STOP),
            )

    return Forced


def model(folder: str, workload: Workload, mesh: jax.sharding.Mesh) -> Qwen2:
    config = ModelConfig(
        num_layers=workload.layers, vocab_size=workload.vocab_size, embed_dim=workload.width,
        hidden_dim=workload.mlp_width, num_heads=workload.heads, head_dim=workload.width // workload.heads,
        num_kv_heads=workload.kv_heads, rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=True,
    )  # fmt: skip
    return create_model_from_safe_tensors(folder, config, mesh, dtype=jnp.float32)


def build(folder: str, workload: Workload, steps: int, microbatch: int) -> GRPOLearner:
    groups, rest = divmod(microbatch, workload.group)
    assert rest == 0, "Tunix counts micro-batches in whole groups"
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    rollout = RolloutConfig(
        max_tokens_to_generate=workload.completion_tokens, max_prompt_length=workload.prompt_tokens,
        kv_cache_size=workload.prompt_tokens + workload.completion_tokens, temperature=TEMPERATURE, top_p=1.0,
    )  # fmt: skip
    training = RLTrainingConfig(
        actor_optimizer=optax.chain(optax.clip_by_global_norm(CLIP_NORM), optax.adamw(workload.learning_rate)),
        eval_every_n_steps=steps + 1, max_steps=steps, mini_batch_size=workload.prompts,
        train_micro_batch_size=groups, compute_logps_micro_batch_size=groups,
        rollout_micro_batch_size=workload.prompts,  # all at once: the fastest, for ragged rows as well
    )  # fmt: skip
    roles = dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh)
    sampler.Sampler = forced_sampler(workload)
    actor, reference = (model(folder, workload, mesh) for _ in range(2))
    config = ClusterConfig(role_to_mesh=roles, training_config=training, rollout_config=rollout)
    cluster = RLCluster(actor=actor, reference=reference, tokenizer=Tokenizer(), cluster_config=config)
    grpo = GRPOConfig(num_generations=workload.group, num_iterations=1, beta=KL_COEF, kl_loss_mode="low_var_kl")
    return GRPOLearner(cluster, grpo, rewards)


def clock(learner: GRPOLearner) -> tuple[dict[str, list[float]], list, list]:
    """Wrap the phases of a step: their seconds, and what rollout and scoring returned, step by step."""
    cluster = learner.rl_cluster
    seconds, rollouts, scores = {"rollout": [], "score": [], "update": [], "total": []}, [], []

    def wrap(owner: object, name: str, phase: str, keep: list | None = None) -> None:
        method = getattr(owner, name)

        def timed(*args, **kwargs):
            start, step = time.perf_counter(), len(seconds["total"])
            out = method(*args, **kwargs)
            jax.block_until_ready((out, nnx.state(cluster.actor_trainer.model)))
            seconds[phase] += [0.0] * (step + 1 - len(seconds[phase]))
            seconds[phase][step] += time.perf_counter() - start
            if keep is not None:
                keep.append(out)
            return out

        setattr(owner, name, timed)

    wrap(cluster, "generate", "rollout", rollouts)
    wrap(cluster, "get_ref_per_token_logps", "score", scores)
    wrap(cluster, "update_actor", "update")
    wrap(learner, "_run_global_step", "total")
    return seconds, rollouts, scores


def check(folder: str, workload: Workload, learner: GRPOLearner, rollouts: list, scores: list) -> dict:
    """Was it the work asked for? Lengths, reference, loss and weights, of every step."""
    cluster = learner.rl_cluster
    tokens = [row for out in rollouts for row in out.tokens]
    prompts = np.concatenate([out.left_padded_prompt_tokens for out in rollouts])
    steps = len(tokens) // (workload.prompts * workload.group)
    asked = np.ravel([workload.lengths(step) for step in range(steps)])
    # Tunix cuts the stop token off what it returns, and does not train on it.
    got = np.array([len(row) for row in tokens]) + (asked < workload.completion_tokens)
    assert (got == asked).all(), "completion lengths"
    assert all((row > max(PAD, STOP)).all() for row in tokens), "a stop or padding token inside a completion"
    ids = np.concatenate([workload.prompt_ids(step) for step in range(steps)])
    assert (prompts == ids.repeat(workload.group, axis=0)).all(), "prompts"
    reference = np.concatenate(scores)
    assert reference.shape == (len(asked), workload.completion_tokens) and np.isfinite(reference).all()
    history = cluster.actor_trainer.metrics_logger.get_metric_history
    kl, loss = history("actor", "kl", "train"), history("actor", "loss", "train")
    # The k3 estimator is 0 while policy and reference agree, as they do in the first step, and positive after it.
    assert len(kl) == steps and abs(kl[0]) < 1e-9 < kl[-1], f"KL {kl}"
    assert len(loss) == steps and np.isfinite(loss).all(), f"loss {loss}"
    actor, kept = cluster.actor_trainer.model, cluster.inference_worker.get_model("reference")
    end, sampled, start = (jax.tree.leaves(nnx.state(m)) for m in (actor, cluster.rollout.model(), kept))
    moved = max(float(abs(a - b).max()) for a, b in zip(start, end, strict=True))
    assert 0 < moved < 1, f"weights moved by {moved}"
    assert all((a == b).all() for a, b in zip(end, sampled, strict=True)), "the sampler has old weights"
    file = load_file(os.path.join(folder, "model.safetensors"))
    assert (kept.embedder.input_embedding[...] == file["model.embed_tokens.weight"]).all(), "the reference moved"
    return {
        "lengths": "as asked", "kl": [float(x) for x in kl], "loss": [float(x) for x in loss], "moved": moved,
        "reference_log_probability": float(reference.mean()), "dtypes": sorted({str(x.dtype) for x in end}),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--microbatch", type=int, default=16, help="sequences per gradient")
    args = parser.parse_args()
    workload = read(args.model)
    learner = build(args.model, workload, args.steps + 1, args.microbatch)
    seconds, rollouts, scores = clock(learner)
    steps = range(args.steps + 1)  # the first one warms up
    learner.train({"prompts": np.array([Tokenizer().decode(p) for p in workload.prompt_ids(step)])} for step in steps)
    versions = {name: version(name) for name in ("google-tunix", "jax", "flax", "optax")}
    tokens = [int(np.sum(workload.lengths(step))) for step in steps]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    checks = check(args.model, workload, learner, rollouts, scores)
    result = {"name": "Tunix", "version": versions, **{phase: times[1:] for phase, times in seconds.items()}}
    result |= {"warmup": seconds["total"][0], "peak_mb": peak, "tokens": tokens[1:], "checks": checks}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
