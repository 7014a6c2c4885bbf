"""A reward model: its score is that of transformers, whatever the layout of the batch, and enters the reward."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from ml_collections import ConfigDict
from safetensors.numpy import load_file, save_file

import jaxrl_llm
from jaxrl_llm import recipe as recipes
from jaxrl_llm.algorithms import credit, losses
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.config import load as config
from jaxrl_llm.errors import UserError
from jaxrl_llm.learner import critic, scorers
from jaxrl_llm.learner.packing import pack
from jaxrl_llm.machine import sharding, transfers
from jaxrl_llm.models import hf
from jaxrl_llm.models.decoder import Decoder, last_state
from jaxrl_llm.structs import Batch, Prompt, PyTree, Rewards
from jaxrl_llm.train import steps

ROOT = Path(__file__).parents[2]
ARITHMETIC = Path(jaxrl_llm.__file__).parent / "assets" / "arithmetic"


def last_score(scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return np.where(credit.last_tokens(mask), scores, 0).sum(axis=-1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The model of the package, with a random head for one label."""
    made = tmp_path_factory.mktemp("reward_model") / "folder"
    shutil.copytree(ARITHMETIC, made)
    tensors = load_file(made / "model.safetensors")
    noise = np.random.default_rng(0).normal(size=(1, 128)).astype(np.float32)
    save_file(tensors | {"score.weight": noise}, made / "model.safetensors")
    return made


def expected_scores(batch: Batch, prefill: Callable[..., Any], decoder: PyTree, kernel: np.ndarray) -> np.ndarray:
    """Scores [B, G] of each text by itself, as a plain sequence."""
    texts = np.zeros((tiny.B * tiny.G, tiny.P + tiny.C), np.int32)
    mask = np.zeros(texts.shape, bool)
    for i, (b, g) in enumerate(np.ndindex(tiny.B, tiny.G)):
        completion = batch.completions[b, g][batch.completion_mask[b, g]]
        text = np.concatenate([batch.prompts[b][batch.prompt_mask[b]], completion])
        texts[i, : len(text)], mask[i, : len(text)] = text, True
    hidden, _ = prefill(decoder, Prompt(texts, mask))
    return (np.asarray(last_state(hidden, mask)) @ kernel).reshape(tiny.B, tiny.G)


def test_the_score_is_that_of_the_last_token_of_the_text_in_every_layout():
    model, decoder = tiny.model_and_params()
    kernel = np.random.default_rng(3).normal(size=(32, 1)).astype(np.float32)
    params = {"decoder": decoder, "readout": {"kernel": kernel, "bias": np.zeros(1, np.float32)}}
    prefill = jax.jit(model.prefill)
    for pad, shape, parts, packed in (
        ("left", (1, 1, 1), 1, False), ("right", (2, 2, 2), 2, True),
    ):  # fmt: skip
        mesh, batch = tiny.mesh_of(shape), tiny.batch(pad)
        expected = expected_scores(batch, prefill, decoder, kernel)
        if packed:
            batch = replace(batch, packed_index=pack(batch.completion_mask.sum(axis=-1), tiny.C, (2, 10)))
        placed = jax.device_put(params, sharding.shardings(params, mesh))
        frozen = scorers.FrozenModel(Decoder(replace(tiny.CONFIG, row_parts=parts), mesh), placed)
        scorer = scorers.make_frozen_scorer("reward_model", frozen, 0, Sampling(), mesh)
        found = np.asarray(scorer.score({}, transfers.shard_batch(batch, mesh))["reward_model_scores"])
        np.testing.assert_allclose(last_score(found, batch.completion_mask), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parity
@pytest.mark.needs("torch")
@pytest.mark.parametrize(("family", "tied"), [("Qwen2", True), ("Qwen2", False), ("Qwen3", False)])
def test_the_score_is_that_of_transformers(family, tied, tmp_path):
    import torch
    import transformers

    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    more = dict(intermediate_size=48, vocab_size=32, max_position_embeddings=64, pad_token_id=0, num_labels=1)
    made = getattr(transformers, f"{family}Config")(**sizes, **more, tie_word_embeddings=tied)
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{family}ForSequenceClassification")(made).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.0 if parameter.dim() > 1 else 1.0, 0.2)
    theirs.save_pretrained(tmp_path)
    mesh, batch = tiny.mesh_of((1, 1, 1)), tiny.batch()
    batch = replace(batch, prompts=np.maximum(batch.prompts, 1), completions=np.maximum(batch.completions, 1))
    model = scorers.frozen_model("reward_model", tmp_path, recipes.read(config.load("grpo")).model, mesh)
    decoder = hf.load_params(tmp_path, model, mesh, learns=False, unused=("score.weight",))
    params = {"decoder": decoder, "readout": jax.tree.map(jnp.asarray, hf.load_readout(tmp_path, model))}
    scorer = scorers.make_frozen_scorer("reward_model", scorers.FrozenModel(model, params), 0, Sampling(), mesh)
    found = last_score(np.asarray(scorer.score({}, batch)["reward_model_scores"]), batch.completion_mask)
    for b, g in np.ndindex(found.shape):
        text = [*batch.prompts[b][batch.prompt_mask[b]], *batch.completions[b, g][batch.completion_mask[b, g]]]
        for padding in (0, 3):  # on the right, which transformers skips by pad_token_id
            ids = torch.tensor([[*map(int, text), *[0] * padding]])
            mask = (torch.arange(ids.shape[1]) < len(text)).long()[None]
            with torch.no_grad():
                score = theirs(input_ids=ids, attention_mask=mask).logits[0, 0].item()
            assert found[b, g] == pytest.approx(score, abs=2e-4)


def test_a_critic_starts_as_the_reward_model_whose_folder_it_gets(folder):
    recipe, mesh = recipes.read(config.load(ROOT / "configs" / "ppo.py")), tiny.mesh_of((1, 1, 1))
    assert recipe.critic
    for start, score in ((folder, load_file(folder / "model.safetensors")["score.weight"]), (ARITHMETIC, 0.0)):
        aggregate = partial(losses.aggregation_weights, mode="token_mean")
        learner, _ = critic.make_critic(recipe.critic, recipe.model, start, mesh, aggregate, sizes=recipe.sizes)
        params = learner.init().params
        np.testing.assert_array_equal(params["readout"]["kernel"], np.broadcast_to(score, (1, 128)).T)
        assert params["decoder"].keys() == {"layers", "embed", "norm"}


def small(folder: Path | str, **changes: object):
    c = config.load(ROOT / "configs" / "grpo.py")
    c.reward_model = ConfigDict(dict(path=str(folder), weight=0.5))
    fields = dict(
        num_steps=1, prompts_per_step=8, prompts_per_update=8, group_size=4, eval=None, optim__warmup_steps=0,
        mesh__fsdp=1, log__to=(), health__self_test=True, checkpoint__keep_best=0, log__completions_every=1,
    )  # fmt: skip
    for field, value in (fields | changes).items():
        config.override(c, field.replace("__", "."), str(value))
    return c.lock()


@pytest.mark.slow
def test_its_score_enters_the_reward_of_a_run(folder, tmp_path):
    [record] = list(steps(small(folder, reward__weights="(1.0, 0.0)"), tmp_path / "run"))
    parts = record["reward/arithmetic.accuracy"] + 0.5 * record["reward/reward_model"]
    assert record["reward/mean"] == pytest.approx(parts, rel=1e-5)
    assert abs(record["reward/reward_model"]) > 0.1 and record["grad_norm"] > 0


def test_a_reward_model_alone_is_enough_and_none_of_a_function_is_filled_by_it():
    mask, scores = np.ones((1, 2, 3), bool), np.array([[[9.0, 9.0, 2.0], [9.0, 9.0, 4.0]]], np.float32)
    c = small("x", reward__functions="()", reward__weights="()", kl=None)
    c.advantage = ConfigDict(dict(name="gdpo", epsilon=1e-4))
    assign = credit.make_credit(recipes.read(c).credit, tiny.mesh_of((1, 1, 1)))
    rewards = Rewards(np.full((1, 2), np.nan, np.float32), {})
    batch, metrics = assign(Batch(None, None, mask, mask, mask), {"reward_model_scores": scores}, rewards, {})
    np.testing.assert_allclose(batch.rewards, [[1.0, 2.0]])
    assert batch.loss_mask.all() and batch.advantages[0, 1, 0] > 0 > batch.advantages[0, 0, 0]
    assert metrics["reward/reward_model"] == 3.0
    recipes.read(small("x", reward__functions="()", reward__weights="()"))


@pytest.mark.parametrize(
    ("field", "path", "changes"),
    [
        ("resample_rounds", "x", dict(rollout__resample_rounds=1)),
        ("config.data.curriculum", "x", dict(data__curriculum__skip=0.9)),
        ("reward", "x", dict(reward__functions="()", reward__weights="(1.0,)")),
        ("config.reward_model.path", "", {}),
    ],
)
def test_a_run_with_a_reward_model_is_refused_for(field, path, changes, refused):
    with refused(field):
        recipes.read(small(path, **changes))


@pytest.mark.parametrize("name", ["remax", "distillation"])
def test_a_reward_model_is_refused_beside_the_advantage(name, refused):
    c = small("x").unlock()
    c.advantage, c.loss = ConfigDict(dict(name=name)), ConfigDict(dict(name="reinforce"))
    if name == "distillation":
        c.teachers = ConfigDict(dict(teacher=dict(path="y")))
    with refused("reward"):
        recipes.read(c.lock())


def test_a_folder_that_is_no_reward_model_of_the_policy_is_refused(folder, tmp_path, refused):
    mesh, two = tiny.mesh_of((1, 1, 1)), tmp_path / "two"
    with refused("score.weight"):
        hf.load_readout(ARITHMETIC, hf.load_model(ARITHMETIC))
    shutil.copytree(folder, two)
    tensors = load_file(two / "model.safetensors")
    save_file(tensors | {"score.weight": np.zeros((2, 128), np.float32)}, two / "model.safetensors")
    with refused("(2, 128)", "(1, 128)"):
        hf.load_readout(two, hf.load_model(two))
    with refused("score.weight"):  # no policy
        hf.load_params(two, hf.load_model(two), mesh)
    tokens = json.loads((two / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (two / "tokenizer.json").write_text(json.dumps(tokens))
    with pytest.raises(UserError, match=r"config\.reward_model\.path"):  # which token it names varies
        scorers.load_frozen(
            "reward_model", two, recipes.read(small(two)).model, hf.load_tokenizer(folder), mesh, on_host=False
        )
