"""Runs of a few steps with environments of TRL and of an OpenEnv server. A token of the tiny model is a whole call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest
from test_episodes import config_with_turns
from test_openenv import answer, stand_in
from test_tools import TEMPLATE, call
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.models import hf, hf_export, new_model
from jaxrl_llm.train import steps

pytestmark = pytest.mark.slow
SIZES = dict(zip(new_model.SIZE_KEYS, (16, 1, 2, 2, 16), strict=True))


def write_model(folder: Path, calls: list[str]) -> Path:
    """A random model whose vocabulary is bytes, of which it writes few, and whole calls."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: i for i, token in enumerate([*specials, *letters])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(specials)
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in calls])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    bare = folder / "bare"
    tokenizer.save_pretrained(str(bare))
    ids = {"eos_token_id": core.token_to_id("<|im_end|>"), "pad_token_id": core.token_to_id("<|endoftext|>")}
    config = SIZES | new_model.ARCHITECTURE | {"vocab_size": len(tokenizer), "max_position_embeddings": 4096} | ids
    (bare / "config.json").write_text(json.dumps(config))
    (bare / "generation_config.json").write_text(json.dumps(ids))
    model = hf.load_model(bare)
    params = jax.jit(lambda: model.init(jax.random.key(0)))()
    # Calls and the end of a turn are likely, because their embeddings, which are tied to the head, are large.
    likely = [core.token_to_id(text) for text in (*calls, "<|im_end|>")]
    table = params["embed"]["embedding"]
    params["embed"]["embedding"] = table.at[jax.numpy.array(likely)].multiply(30.0)
    hf_export.save(folder / "model", params, bare)
    return folder / "model"


def run(tmp_path: Path, calls: list[str], rows: list[dict[str, Any]], **env: Any) -> dict[str, float]:
    """Trains for some steps. Returns the sums of the episode metrics."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_with_turns(**{
        "model.path": str(write_model(tmp_path, calls)), "num_steps": 3, "group_size": 4, "prompts_per_step": 4,
        "prompts_per_update": 4, "data.source": str(tmp_path / "rows.jsonl"), "data.max_prompt_tokens": 2000,
        "eval.source": str(tmp_path / "rows.jsonl"), "eval.function": "environment.reward", "eval.problems": 4,
        "reward.functions": ("environment.reward",), "rollout.max_completion_tokens": 600,
        "checkpoint.every": 3, "mesh.fsdp": 1,
    })  # fmt: skip
    config.env = type(config)(env)
    config.turns.update(dict(most=3, tokens=30, observation_tokens=400, timeout=20.0))
    records = list(steps(config, tmp_path / "run"))
    assert len(records) >= 3
    return {name: sum(r.get(name, 0.0) for r in records) for r in records for name in r if name.startswith("episode/")}


def chats(**columns: Any) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": "Play."}], **columns} for _ in range(8)]


def test_a_run_trains_with_an_environment_of_trl(tmp_path):
    calls = [call("guess", word="stone"), call("guess", word="cloud")]
    name = "tests.tasks.test_trl_environments.WordGame"
    sums = run(tmp_path, calls, chats(word="stone"), name="trl.Environments", factory=name)
    assert sums["episode/calls"] > 0 and sums["episode/reward"] > 0 and sums["episode/unscored"] == 0
    assert "episode/reset_differs" not in sums


@pytest.mark.needs("websockets")
def test_a_run_trains_with_an_openenv_server_that_fails_at_times(tmp_path):
    asked = iter(range(10**9))

    def step(peer: Any) -> None:
        if next(asked) % 5 == 4:
            peer.send("<html>")
        else:
            peer.send(answer({"result": "ok"}, reward=1.0))

    with stand_in(step) as url:
        sums = run(tmp_path, [call("add")], chats(), name="openenv.OpenEnv", url=url)
    assert sums["episode/reward"] > 0 and sums["episode/server_nonsense"] > 0 and sums["episode/unscored"] > 0
