"""A tiny random model and a batch for it, shared by the tests."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxrl_llm.algorithms import losses
from jaxrl_llm.algorithms.kl import k3
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.config import records
from jaxrl_llm.learner import optim, update
from jaxrl_llm.learner.packing import pack
from jaxrl_llm.machine import meshes, sharding, transfers
from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.rope import default_rope
from jaxrl_llm.session.log import Log
from jaxrl_llm.session.sample_files import SampleFiles
from jaxrl_llm.session.settings import SamplesLogSettings
from jaxrl_llm.structs import Batch, PyTree

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# A model like that of configs/grpo.py with two layers of 64, for runs that a test makes:
# jaxrl sft --config configs/sft.py --config.model.hidden_size=64 --config.model.num_hidden_layers=2
#     --config.model.intermediate_size=192 --config.num_steps=500 --config.optim.learning_rate=3e-3
SMALL = Path(__file__).parent / "references" / "small"
CONFIG = DecoderConfig(
    family="qwen2",
    vocab_size=32, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_width=64, max_positions=64,
    rope=default_rope(1e4, 8), norm_eps=1e-6, tied_head=True, qkv_bias=True, qk_norm=False,
)  # fmt: skip
# All that the families have beside that. The window is shorter than prompts and completions.
GEMMA = replace(
    CONFIG, layers=3, qkv_bias=False, output_bias=True, mlp_bias=True, qk_norm=True, activation="gelu_pytorch_tanh",
    window=4, local=(True, False, True), local_rope=default_rope(10.0, 8), score_size=12, soft_cap=3.0,
    final_soft_cap=6.0, scaled_embedding=True, unit_offset_norm=True, post_norms=True,
)  # fmt: skip
CONFIGS = {"qwen2": CONFIG, "gemma": GEMMA}
B, G, P, C = 8, 4, 6, 5


def log_of(workdir: Path, config: ConfigDict) -> Log:
    """The log of a run of this config."""
    settings, files = records.read(SamplesLogSettings, config.to_dict()["log"]), SampleFiles(workdir / "samples")
    return Log(workdir, settings, config.num_steps, config.to_dict(), sample_files=files)


def mesh_of(shape: tuple[int, int, int]) -> jax.sharding.Mesh:
    """A mesh of these sizes of data, fsdp and tensor."""
    return meshes.make_mesh(**dict(zip(meshes.AXES, shape, strict=True)))


def alarmed(completions: list, **_: object) -> list[float]:
    """A reward that sets an alarm, as math-verify's time limit does; Python refuses that outside of the main thread."""
    signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
    return [1.0] * len(completions)


def model_and_params(config: DecoderConfig = CONFIG, scale: float = 5.0) -> tuple[Decoder, PyTree]:
    """Parameters large enough that the softmax is far from flat."""
    model = Decoder(config)
    return model, jax.jit(lambda: jax.tree.map(lambda x: x * scale, model.init(jax.random.key(0))))()


def prompts(pad: str = "left") -> tuple[np.ndarray, np.ndarray]:
    """Random prompts [B, P] of 2 to P tokens, and their mask."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, CONFIG.vocab_size, (B, P)).astype(np.int32)
    lengths = rng.integers(2, P + 1, B)
    at = np.arange(P)[None]
    mask = at >= P - lengths[:, None] if pad == "left" else at < lengths[:, None]
    return tokens, mask


def batch(pad: str = "left") -> Batch:
    """A batch with random completions of 1 to C tokens and random numbers for everything else."""
    rng = np.random.default_rng(2)
    tokens, mask = prompts(pad)
    completions = rng.integers(0, CONFIG.vocab_size, (B, G, C)).astype(np.int32)
    completion_mask = np.arange(C)[None, None] < rng.integers(1, C + 1, (B, G))[:, :, None]
    noise = lambda: np.where(completion_mask, rng.normal(-2, 0.3, (B, G, C)), 0).astype(np.float32)  # noqa: E731
    return Batch(
        tokens, mask, completions, completion_mask, completion_mask,
        advantages=np.where(completion_mask, rng.normal(0, 1, (B, G, 1)), 0).astype(np.float32),
        sampler_logprobs=noise(), old_logprobs=noise(), ref_logprobs=noise(),
    )  # fmt: skip


def optimizer(**changes) -> optim.Optimizer:
    """Ten steps of AdamW; eps at the size of the gradients: Adam's first step would blow rounding up to its sign."""
    usual = dict(
        learning_rate=1e-3, warmup_steps=0, warmup_ratio=0.0, decay="constant", end=0.0, clip_norm=1.0,
        weight_decay=0.0, b1=0.9, b2=0.95, eps=1e-3,
    )  # fmt: skip
    return optim.make_optimizer(10, **usual | changes)


def updater(
    objective: update.Objective,
    adamw: optim.Optimizer,
    params: PyTree,
    mesh: Mesh,
    *,
    microbatch: int = 0,
    aggregate: Callable = partial(losses.aggregation_weights, mode="token_mean"),  # noqa: B008
):
    """The first state of a learner with these parameters, and its update."""
    learner = update.make_learner(
        objective, adamw, params, lambda: params, mesh, microbatch=microbatch, aggregate=aggregate
    )
    return learner.init(), learner.update_step


def updated(
    whole: Batch,
    shape: tuple[int, int, int] = (1, 1, 1),
    microbatch: int = 0,
    mode: str = "token_mean",
    config: DecoderConfig = CONFIG,
):
    """Parameters and metrics after one optimizer step on a batch, on the host."""
    mesh = mesh_of(shape)
    _, params = model_and_params(config, scale=5.0 if config is CONFIG else 2.0)
    params = jax.device_put(params, sharding.shardings(params, mesh))
    adamw = optimizer(weight_decay=0.1, coefficients={"kl/coef": optim.constant(0.1)})
    model = Decoder(config, mesh)
    objective = update.policy_objective(model, losses.ppo_clip, Sampling(), kl=k3)
    aggregate = partial(losses.aggregation_weights, mode=mode, constant_length=C if mode == "constant" else 0)
    state, step = updater(objective, adamw, params, mesh, microbatch=microbatch, aggregate=aggregate)
    state, metrics = step(state, transfers.shard_batch(whole, mesh), jnp.arange(B))
    return transfers.to_host(state.params), transfers.to_host(metrics)


@cache
def one_update(
    shape: tuple[int, int, int] = (1, 1, 1),
    microbatch: int = 0,
    mode: str = "token_mean",
    packed: tuple = (),
    config: DecoderConfig = CONFIG,
):
    """`updated` on the whole `batch()`; packed: N, T of its rows."""
    whole = batch()
    if packed:
        whole = replace(whole, packed_index=pack(whole.completion_mask.sum(axis=-1), C, packed))
    return updated(whole, shape, microbatch, mode, config)


def byte_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are bytes and three special tokens, of which <|im_end|> ends a turn."""
    from transformers import PreTrainedTokenizerFast  # slow, and few tests need it

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: i for i, token in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    core = Tokenizer(models.BPE(vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(specials)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer


def collapsed(tokens: np.ndarray, grids: list[tuple[int, int]], image_token: int) -> list[int]:
    """The token ids of a prompt with one token for each image, of which `grids` are the rows and columns."""
    ids, rest = tokens.tolist(), [rows * columns for rows, columns in grids]
    short = []
    while ids:
        short.append(ids[0])
        ids = ids[rest.pop(0) if ids[0] == image_token else 1 :]
    return short
