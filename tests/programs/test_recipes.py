"""The recipes for real models, end to end on a small model of the same architecture and hand-made data."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from ml_collections import ConfigDict
from PIL import Image
from safetensors import safe_open
from test_judge import serving
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jaxrl_llm import sft, train
from jaxrl_llm.config.load import flatten, load
from jaxrl_llm.configs.recipes import gemma3_1b_rubric_grpo, qwen2_0_5b_tldr, qwen2_5_3b_tinyzero, qwen2_5_7b_math
from jaxrl_llm.models import new_model

ROOT = Path(__file__).parents[2]
PROBLEMS = [
    ("Tom has 3 apples and buys 4 more. How many has he?", "He has 3 + 4 = <<3+4=7>>7 apples.\n#### 7"),
    ("A box holds 12 eggs. How many eggs are in 5 boxes?", "12 * 5 = <<12*5=60>>60\n#### 60"),
    ("Ann earns $1,200 a month. What does she earn in a year?", "1200 * 12 = 14400\n#### 14,400"),
    ("Half of 18 birds fly off. How many stay?", "18 / 2 = <<18/2=9>>9\n#### 9"),
]
# Qwen's own form of chat, as its chat_template writes it.
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


SMALL = {
    "num_steps": 1, "prompts_per_step": 4, "prompts_per_update": 2, "microbatch": 2, "group_size": 2,
    "eval.problems": 4, "rollout.max_completion_tokens": 8, "optim.warmup_steps": 0, "mesh.fsdp": 2, "mesh.tensor": 1,
    "log.to": (), "log.completions_every": 1,
    "health.self_test": False,  # tests/selftest/test_self_test_configs.py has that
}  # fmt: skip


def train_recipe(name: str, model: Path, rows: Path, workdir: Path, **changes: object) -> list[dict]:
    """Returns the records of a small run of a recipe, with a small model and a file of rows."""
    c = load(ROOT / "configs" / "recipes" / f"{name}.py")
    files = {"model.path": str(model), "data.source": str(rows), "eval.source": str(rows)}
    c.update_from_flattened_dict(SMALL | files | changes)
    return list(train.steps(c, workdir))


def write_parquet(folder: Path, rows: list[dict]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    return folder / "rows.parquet"


def write_qwen(folder: Path) -> None:
    """Qwen2.5-0.5B-Instruct's config.json but for its size, and a byte-level BPE tokenizer; no weights yet."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=specials, initial_alphabet=alphabet)
    core.train_from_iterator([text for pair in PROBLEMS for text in pair], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(str(folder))
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 56,
        "intermediate_size": 128, "max_position_embeddings": 32768, "max_window_layers": 21, "num_attention_heads": 14,
        "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False,
        "vocab_size": 416, "bos_token_id": 0, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "pad_token_id": 0}))


def write_weights(folder: Path) -> None:
    import jax

    from jaxrl_llm.models import hf, hf_export

    model = hf.load_model(folder)
    hf_export.save(folder.with_name("qwen"), model.init(jax.random.key(0)), folder)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "bare"
    folder.mkdir()
    write_qwen(folder)
    write_weights(folder)
    return folder.with_name("qwen")


@pytest.mark.slow
def test_the_gsm8k_recipe_runs_end_to_end(qwen, tmp_path):
    rows = write_parquet(tmp_path, [{"question": q, "answer": a} for q, a in PROBLEMS])
    changes = {"prompts_per_update": 4, "rollout.max_completion_tokens": 16}
    steps = train_recipe("qwen2_5_0_5b_gsm8k", qwen, rows, tmp_path / "run", **changes)
    assert [s["step"] for s in steps] == [0, 1]
    assert {"reward/math.accuracy", "reward/math.is_boxed", "eval/accuracy"} <= set(steps[-1])
    assert steps[1]["ratio/mean"] == pytest.approx(1, abs=1e-3)
    assert steps[1]["sampler/gap_mean"] < 0.02  # bfloat16 in sampler and trainer alike
    saved = json.loads((tmp_path / "run" / "hf" / "config.json").read_text())
    assert saved["torch_dtype"] == "bfloat16"
    weights = safe_open(tmp_path / "run" / "hf" / "model.safetensors", "np")
    assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118


GEMMA = {  # a small model with Gemma 3 1B's kinds of layers
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 1, "query_pre_attn_scalar": 8, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_theta": 1000000, "sliding_window": 8, "sliding_window_pattern": 2, "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16", "vocab_size": 416, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.slow
def test_the_recipes_of_gemma_go_from_demonstrations_to_pairs_to_a_rubric(tmp_path):
    (tmp_path / "bare").mkdir()
    write_qwen(tmp_path / "bare")
    (tmp_path / "bare" / "config.json").write_text(json.dumps(GEMMA))
    write_weights(tmp_path / "bare")
    chat = lambda question, answer: [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]  # noqa: E731
    rows = [{"chosen": chat(q, a), "rejected": chat(q, "No."), "score_chosen": 9.0} for q, a in PROBLEMS * 4]
    write_parquet(tmp_path, rows)
    small = {
        "num_steps": 2, "prompts_per_step": 8, "microbatch": 4, "optim.warmup_ratio": 0.0, "optim.warmup_steps": 0,
        "data.source": f"{tmp_path}/rows.parquet", "rollout.max_completion_tokens": 48, "mesh.fsdp": 2, "log.to": (),
    }  # fmt: skip
    graded = {"eval.source": f"{tmp_path}/rows.parquet", "eval.problems": 4, "eval.every": 2}

    def config_of(name: str, path: Path, **changes: object) -> ConfigDict:
        c = load(ROOT / "configs" / "recipes" / f"gemma3_1b_{name}.py")
        c.update_from_flattened_dict(small | {"model.path": str(path)} | changes)
        return c

    *_, last = sft.steps(config_of("sft", tmp_path / "qwen"), tmp_path / "sft")
    assert last["loss/sft"] > 0
    *_, last = sft.steps(config_of("simpo", tmp_path / "sft" / "hf", **graded), tmp_path / "simpo")
    assert 0 <= last["reward/accuracy"] <= 1 and last["eval/problems"] == 4
    scores = {each["name"]: 10 for each in gemma3_1b_rubric_grpo.CRITERIA}
    with serving(lambda *_: (200, json.dumps(scores))) as server:
        judge = gemma3_1b_rubric_grpo.JUDGE.replace(gemma3_1b_rubric_grpo.URL, server.url)
        changes = {"prompts_per_update": 8, "group_size": 2, "rollout.max_completion_tokens": 8}
        changes |= {"health.self_test": False}
        c = config_of("rubric_grpo", tmp_path / "simpo" / "hf", **graded | changes)
        c.reward.functions, c.eval.function = (judge,), judge
        *_, last = train.steps(c, tmp_path / "grpo")
    # Of 5 points, of which the padding takes one.
    assert [last["reward/judge.score"], last["eval/accuracy"]] == pytest.approx([0.8, 0.8])
    assert last["judge.score/rubric/padding"] == 1 and last["judge.score/unparsed"] == 0
    assert (tmp_path / "grpo" / "hf" / "model.safetensors").is_file()


def test_the_rewards_of_the_recipes_by_hand():
    texts = ["<think>a</think> so \\boxed{7}", "\\boxed{7}", "<think>a</think> 7"]
    assert qwen2_5_7b_math.has_form([[{"content": text}] for text in texts]) == [1, 0, 0]
    assert qwen2_0_5b_tldr.length(["x" * 20, "x" * 5]) == [0, -15]
    assert qwen2_0_5b_tldr.is_near(["x" * 15, "x" * 26]) == [1, 0]
    assert qwen2_0_5b_tldr.unique_characters(["aba", ""]) == [2, 0]
    said = [
        "<answer>(1+2)/3</answer>",
        "<answer>1+2+3</answer>",
        "<answer>6/2/0</answer>",
        "(1+2)/3",
        "<answer>1</answer>",
    ]
    judged = qwen2_5_3b_tinyzero.accuracy(said, [[3, 1, 2]] * 5, [1] * 5)
    assert judged == [1, 0, 0, 0, 0]
    assert qwen2_5_3b_tinyzero.has_answer(said) == [1, 1, 1, 0, 1]
    rows = [{"nums": [i, j], "target": i + j} for i in range(30) for j in range(30)]
    held_out = [row for row in rows if qwen2_5_3b_tinyzero.held_out_row(row)]
    assert [row for row in rows if not qwen2_5_3b_tinyzero.train_row(row)] == held_out
    assert 0 < len(held_out) < 100
    turned = [{"nums": row["nums"][::-1], "target": row["target"]} for row in held_out]
    assert all(map(qwen2_5_3b_tinyzero.held_out_row, turned))  # the same numbers are on one side


@pytest.mark.parametrize(
    ("recipe", "other", "fields"),
    [
        ("qwen2_5_7b_gsm8k", "qwen2_5_0_5b_gsm8k", {"model.path", "microbatch", "mesh.tensor"}),
        ("qwen2_5_1_5b_gsm8k", "qwen2_5_0_5b_gsm8k", {"model.path", "microbatch"}),
        ("qwen2_5_vl_3b_geo3k", "qwen2_5_vl_7b_geo3k", {"model.path", "microbatch"}),
    ],
)
def test_a_recipe_differs_from_another_by_its_sizes_alone(recipe, other, fields):
    """So the run of one of them, which sets these fields anyway, is that of both."""
    one, two = (flatten(load(ROOT / "configs" / "recipes" / f"{name}.py")) for name in (recipe, other))
    assert {name for name in one | two if one.get(name) != two.get(name)} == fields


TOWER = {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24}
# What Qwen3-VL's config.json says in other words than Qwen2.5-VL's.
QWEN3_VL = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"}
QWEN3_TOWER = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0], "hidden_act": "gelu_pytorch_tanh"}


def write_vision(folder: Path, family: str) -> Path:
    """A small model with a tower, of the architecture of a recipe, and the folder it is in."""
    bare = folder / "bare"
    rows = [{"prompt": f"<image>{text}{qwen2_5_7b_math.FORM}", "answer": "0123456789"} for text, _ in PROBLEMS]
    sizes = dict(zip(new_model.SIZE_KEYS, (32, 2, 4, 2, 48), strict=True)) | {"vision_config": TOWER}
    new_model.write_folder(bare, sizes, rows, "answer")
    if family == "qwen3_vl":
        config = json.loads((bare / "config.json").read_text())
        rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
        text = config["text_config"] | {"model_type": "qwen3_vl_text", "head_dim": 8, "rope_parameters": rope}
        tower = config["vision_config"] | QWEN3_TOWER
        (bare / "config.json").write_text(json.dumps(config | QWEN3_VL | {"text_config": text, "vision_config": tower}))
    write_weights(bare)
    return folder / "qwen"


def write_geometry3k(folder: Path) -> Path:
    """A file of problems in the columns of geometry3k: images of several sizes, and one problem with two."""
    rows = []
    for i, (question, _) in enumerate(PROBLEMS):
        images = []
        for k in range(1 + (i == 1)):
            pixels = np.random.default_rng((i, k)).integers(0, 256, (56 + 28 * i, 84, 3), np.uint8)
            Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
            images.append({"bytes": file.getvalue(), "path": f"{i}_{k}.png"})
        rows.append({"images": images, "problem": "<image>" * len(images) + question, "answer": str(i)})
    return write_parquet(folder, rows)


@pytest.mark.slow
def test_the_recipe_of_geometry3k_with_adapters_runs_end_to_end(tmp_path, capsys):
    model, rows = write_vision(tmp_path, "qwen3_vl"), write_geometry3k(tmp_path)
    pixels = {"data.min_pixels": 3136, "data.max_pixels": 15680, "model.row_parts": 1}
    first, record = train_recipe("qwen3_vl_4b_geo3k_lora", model, rows, tmp_path / "run", **pixels)
    assert "5 images, up to" in capsys.readouterr().out  # images
    assert record["reward/easyr1.math"] == record["eval/accuracy"] == first["eval/accuracy"] == 0  # of random weights
    assert record["easyr1.math/accuracy"] == record["easyr1.math/format"] == 0
    assert record["kl/coef"] == pytest.approx(0.01) and record["sampler/gap_mean"] < 0.02
    (message,) = json.loads((tmp_path / "run" / "completions.jsonl").read_text().splitlines()[-1])["prompt"]
    assert message["content"][0]["type"] == "image"
    assert message["content"][-1]["text"].endswith(f"?\n\n{qwen2_5_7b_math.FORM}")
    assert {"hf", "adapter"} <= {path.name for path in (tmp_path / "run").iterdir()}
