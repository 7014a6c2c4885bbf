"""`jaxrl translate` for runs with images: no key of them is lost, and the config is complete."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_translate import (
    differing,
    differing_kinds,
    hub_installed,  # noqa: F401 (a fixture)
    made_of,
    write,
    written,
)
from test_translated import FILES

from jaxrl_llm.tools.translate import __main__ as program
from jaxrl_llm.tools.translate import images

# The config that all of EasyR1's scripts begin with.
EASYR1 = (FILES / "launches" / "easyr1_geometry.yaml").read_text()
GEOMETRY = "data.train_files=hiyouga/geometry3k@train data.val_files=hiyouga/geometry3k@test"
ACTOR, MODEL, ROLLOUT = "worker.actor", "worker.actor.model", "worker.rollout"
R1V = "data.format_prompt=./p/r1v.jinja worker.reward.reward_function=./examples/reward_function/r1v.py:compute_score"
QWEN = "Qwen/Qwen2.5-VL-{}B-Instruct"
GEO3K_7B = {  # what its scripts for Qwen2.5-VL-7B change: arguments, and fields
    "dapo": (f"{ACTOR}.clip_ratio_high=0.28 algorithm.disable_kl=True algorithm.online_filtering=True", {"kl": None}),
    "gspo": (f"{ACTOR}.loss_type=gspo_token {ACTOR}.loss_avg_mode=seq {ACTOR}.clip_ratio_low=3e-4 "
             f"{ACTOR}.clip_ratio_high=4e-4 algorithm.disable_kl=True", {"loss.level": "token"}),
    "cispo": (f"{ACTOR}.loss_type=cispo", {"loss.name": "cispo"}),
    "sapo": (f"{ACTOR}.loss_type=sapo", {"loss.name": "sapo"}),
}  # fmt: skip
EASYR1_SCRIPTS = {  # forms of its scripts with images: the model, further arguments, and fields
    **{f"7b {name}": (QWEN.format(7), f"{GEOMETRY} {words}", fields) for name, (words, fields) in GEO3K_7B.items()},
    "clevr": (QWEN.format(3), f"data.train_files=b/clevr_count_70k@train {R1V}", {"reward.functions": ("easyr1.r1v",)}),
    "android": (QWEN.format(3), f"data.train_files=y/game@train data.filter_overlong_prompts=false "
                f"{ROLLOUT}.limit_images=1 worker.reward.reward_function=examples/reward_function/android_gui.py:score",
                {"reward.functions": ("my_rewards.score",)}),
    "frozen": (QWEN.format(7), f"{GEOMETRY} data.image_key=photos data.image_dir=/rows/photos data.min_pixels=3136 "
               f"data.max_pixels=1000000 {MODEL}.freeze_vision_tower=true",
               {"data.image_column": "photos", "data.image_folder": "/rows/photos", "data.min_pixels": 3136,
                "data.max_pixels": 1_000_000, "model.vision": "frozen"}),
    "qwen3 4b lora": ("Qwen/Qwen3-VL-4B-Instruct",
                      f"{GEOMETRY} {MODEL}.lora.rank=64 {MODEL}.lora.exclude_modules='.*visual.*'",
                      {"adapters.rank": 64, "adapters.targets": "_proj", "model.vision": "frozen"}),
}  # fmt: skip
VERL = (FILES / "verl06_pictures.sh").read_text()
LORA = "actor_rollout_ref.model.lora_rank=16 actor_rollout_ref.model.target_modules=all-linear"
VERL_SCRIPTS = {  # the model, further arguments, fields, and keys with their kind
    "qwen3": ("Qwen3-VL-8B-Instruct", "actor_rollout_ref.actor.megatron.context_parallel_size=2",
              {"model.vision": "learns", "data.image_column": "images"}, {"data.image_key": "mapped"}),
    "lora": ("Qwen2.5-VL-7B-Instruct", f"{LORA} actor_rollout_ref.model.exclude_modules='.*visual.*'",
             {"adapters.rank": 16, "model.vision": "frozen"},
             {"actor_rollout_ref.model.exclude_modules": "mapped", "actor_rollout_ref.model.target_modules": "mapped"}),
    "lora everywhere": ("Qwen2.5-VL-7B-Instruct", LORA, {"model.vision": "frozen"},
                        {"actor_rollout_ref.model.target_modules": "changed"}),
    "pixels": ("Qwen3-VL-8B-Instruct",
               "data.image_patch_size=16 +data.mm_processor_kwargs.max_pixels=1003520 "
               "+data.mm_processor_kwargs.size.shortest_edge=3136 actor_rollout_ref.actor.freeze_vision_tower=True "
               "actor_rollout_ref.rollout.limit_images=5 "
               "+actor_rollout_ref.rollout.engine_kwargs.vllm.limit_mm_per_prompt.image=5 "
               "+actor_rollout_ref.rollout.engine_kwargs.vllm.mm_processor_kwargs.max_pixels=200704",
               {"data.max_pixels": 1003520, "data.min_pixels": 3136, "model.vision": "frozen"},
               {"data.image_patch_size": "changed", "data.mm_processor_kwargs.max_pixels": "mapped",
                "data.mm_processor_kwargs.size.shortest_edge": "mapped",
                "actor_rollout_ref.actor.freeze_vision_tower": "changed",
                "actor_rollout_ref.rollout.limit_images": "changed",
                "actor_rollout_ref.rollout.engine_kwargs.vllm.limit_mm_per_prompt.image": "changed",
                "actor_rollout_ref.rollout.engine_kwargs.vllm.mm_processor_kwargs.max_pixels": "changed"}),
    "one mapping": ("Qwen3-VL-8B-Instruct",
                    "'data.mm_processor_kwargs={max_pixels: 1003520, size: {shortest_edge: 3136}}'",
                    {"data.max_pixels": 1003520, "data.min_pixels": 3136}, {"data.mm_processor_kwargs": "mapped"}),
}  # fmt: skip
TRL = """accelerate launch --config_file zero3.yaml --num_processes 8 examples/scripts/{script} \\
    --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct --output_dir out --learning_rate 1e-5 --dtype bfloat16 \\
    --max_prompt_length 2048 --max_completion_length 1024 --max_steps 100 --log_completions {more}
"""
TRL_LORA = '--use_peft --lora_target_modules "q_proj", "v_proj"'
TRL_PROGRAM = """
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward

dataset = load_dataset("lmms-lab/multimodal-open-r1-8k-verified", split="train")
dataset = dataset.train_test_split(test_size=100, seed=42)
dataset = dataset.map(lambda row: row).filter(lambda row: row["image"].size[0] < 512)
name = "Qwen/Qwen2.5-VL-3B-Instruct"
size = {"shortest_edge": 3136}
processor = AutoProcessor.from_pretrained(name, max_pixels=500 * 28 * 28, size=size, use_fast=True)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-VL-3B-Instruct",
    args=GRPOConfig("out", max_steps=50),
    reward_funcs=[think_format_reward, accuracy_reward],
    train_dataset=dataset["train"],
    processing_class=processor,
    peft_config=LoraConfig(r=8, target_modules="all-linear", exclude_modules=".*visual.*"),
)
"""


def easyr1_script(folder: Path, model: str, words: str) -> str:
    write(folder, "examples/config.yaml", EASYR1)
    return f"M={model}\npython3 -m verl.trainer.main config=examples/config.yaml {MODEL}.model_path=$M {words}\n"


@pytest.mark.parametrize("name", EASYR1_SCRIPTS)
def test_every_script_of_easyr1_with_images_is_a_complete_config(name, tmp_path):
    model, words, fields = EASYR1_SCRIPTS[name]
    made, c, _ = written(tmp_path, "run.sh", easyr1_script(tmp_path, model, words))
    expected = {
        "model.path": model, "data.image_column": "images", "data.min_pixels": 262_144, "data.max_pixels": 4_194_304,
        "model.vision": "learns", "data.prompt_column": "problem",
    }  # fmt: skip
    assert differing(expected | fields, c) == {}
    # Of the keys of images only those of video do nothing.
    silent = made.with_kind("no effect")
    assert {key for key, one in silent.items() if one.reason in (images.HAS_IMAGES[1], images.HAS_SOUND[1])} == {
        "data.video_key", "data.video_fps"
    }  # fmt: skip
    assert not {"data.image_key", "data.min_pixels", "data.max_pixels", f"{ROLLOUT}.limit_images"} & set(silent)
    assert made.outcomes[f"{ROLLOUT}.limit_images"].kind == ("changed" if "limit_images=" in words else "mapped")
    unsupported = [key for key, one in made.outcomes.items() if one.kind == "unsupported"]
    assert (f"{MODEL}.model_path" in unsupported) == (images.family_of(model) == "other")


def test_the_pixel_limits_of_easyr1_are_written_also_if_its_file_omits_them(tmp_path):
    keys = "algorithm: {adv_estimator: grpo}\nworker: {actor: {model: {model_path: %s}}, rollout: {n: 4}}\n"
    _, c, _ = written(tmp_path, "a.yaml", keys % QWEN.format(3))
    assert (c["data.min_pixels"], c["data.max_pixels"]) == (512 * 512, 2048 * 2048)
    # The tower of a run with adapters alone is frozen.
    _, c, _ = written(tmp_path, "lora.yaml", keys % f"{QWEN.format(3)}, lora: {{rank: 8}}")
    assert (c["model.vision"], c["adapters.rank"]) == ("frozen", 8)
    # In a run of text they would be fields that do nothing, which train refuses.
    _, c, _ = written(tmp_path, "b.yaml", keys % "Qwen/Qwen2.5-3B")
    assert (c["data.min_pixels"], c["data.max_pixels"]) == (0, 0)


@pytest.mark.parametrize("name", VERL_SCRIPTS)
def test_scripts_of_verl_with_images_are_configs_that_pass_the_checks(name, tmp_path):
    model, more, fields, kinds = VERL_SCRIPTS[name]
    # The folder of the model is a variable that the script does not set: its name shows the family all the same.
    text = VERL.replace("Qwen/Qwen2.5-VL-3B-Instruct", f"$HOME_OF_MODELS/{model}").replace("$@", more)
    made, c, _ = written(tmp_path, "run.sh", text)
    assert differing(fields, c) == {} and differing_kinds(kinds | {"model.path": "yours"}, made) == {}
    # The names of the rows say nothing of images, the key does; and a text model has no field of images.
    assert made_of(tmp_path, "rows.sh", text.replace("geo3k", "rows")).fields()["data.image_column"] == "images"
    text = text.replace("-VL", "").replace("geo3k", "gsm8k")
    for switch in ("freeze_vision_tower=True", "limit_images=5", "limit_mm_per_prompt.image=5"):
        text = text.replace(switch, f"{switch.partition('=')[0]}=0")
    _, c, _ = written(tmp_path, "text.sh", text)
    of_text = {"data.image_column": "", "data.max_pixels": 0, "data.min_pixels": 0, "model.vision": "learns"}
    assert differing(of_text, c) == {}


def test_commands_of_trl_with_images_are_configs_that_pass_the_checks(tmp_path, wording):
    write(tmp_path, "zero3.yaml", "num_processes: 8\n")
    sequences = "--importance_sampling_level sequence --loss_type grpo --epsilon 3e-4"
    text = TRL.format(script="gspo_vlm.py", more=f"{TRL_LORA} {sequences}")
    made, c, _ = written(tmp_path, "run.sh", text)
    fields = {
        "model.path": "Qwen/Qwen2.5-VL-3B-Instruct", "adapters.targets": "q_proj|v_proj", "model.vision": "frozen",
        "loss.name": "gspo",
    }  # fmt: skip
    # The command names neither rows nor rewards.
    assert differing(fields, c) == {} and program.run(tmp_path / "run.sh", None, 0, 0) == 1
    wording(made.outcomes["lora_target_modules"].reason)  # its comma, which argparse leaves at the name
    _, c, _ = written(tmp_path, "all.sh", TRL.format(script="grpo_vlm.py", more="--max_pixels 401408"))
    fields = {
        "model.vision": "learns", "data.max_pixels": 401_408, "data.min_pixels": 0, "loss.name": "ppo_clip",
    }  # fmt: skip
    assert differing(fields, c) == {}


def test_a_program_of_trl_with_images_has_its_rows_and_its_processor(tmp_path):
    made, c, _ = written(tmp_path, "grpo_vlm.py", TRL_PROGRAM)
    expected = {
        "data.source": "lmms-lab/multimodal-open-r1-8k-verified@train", "data.convert": "my_data.convert",
        "data.max_pixels": 392_000, "data.min_pixels": 3136, "model.vision": "frozen", "adapters.targets": "_proj",
    }  # fmt: skip
    assert differing(expected, c) == {}
    kinds = {"max_pixels": "mapped", "size": "mapped", "use_fast": "no effect"}
    kinds = {f"trainer.processing_class.{key}": kind for key, kind in kinds.items()}
    assert differing_kinds(kinds | {"trainer.peft_config.exclude_modules": "mapped"}, made) == {}
    made = made_of(tmp_path, "other.py", TRL_PROGRAM.replace("use_fast=", "do_rescale="))
    assert made.outcomes["trainer.processing_class.do_rescale"].kind == "unsupported"


def test_rloo_of_trl_is_told_from_grpo_by_the_name_of_its_program(tmp_path):
    more = "--num_iterations 2 --epsilon_high 0.3 --beta 0 --loss_type grpo --reward_clip_range 0 1"
    made, c, _ = written(tmp_path, "several.sh", TRL.format(script="rloo_vlm.py", more=more))
    assert differing({"kl": None, "loss.clip_high": 0.3, "epochs": 2}, c) == {}
    kinds = {"epsilon_high": "changed", "beta": "mapped", "loss_type": "unsupported"}
    assert differing_kinds(kinds | {"reward_clip_range": "unsupported"}, made) == {}
    program_of_rloo = TRL_PROGRAM.replace("GRPO", "RLOO").replace("max_steps=50", "mask_truncated_completions=True")
    made, c, _ = written(tmp_path, "rloo_vlm.py", program_of_rloo)
    assert made.table.name == "TRL's RLOO" and differing({"advantage.name": "rloo", "mask.truncated": True}, c) == {}


REFUSED = {  # a model, and further arguments
    "experts": ("Qwen/Qwen3-VL-30B-A3B-Instruct", GEOMETRY),
    "sound": ("Qwen/Qwen2.5-Omni-7B", GEOMETRY),
    "another family": ("OpenGVLab/InternVL3_5-8B-HF", GEOMETRY),
    "video": (QWEN.format(7), "data.train_files=a/Video-R1-data@train"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_families_and_video_are_refused_before_anything_else(name, tmp_path, capsys, wording):
    model, words = REFUSED[name]
    write(tmp_path, "run.sh", text := easyr1_script(tmp_path, model, words))
    # A family that models/ has by now is not refused.
    is_refused = images.family_of(model) == "other" or name == "video"
    assert program.run(tmp_path / "run.sh", tmp_path / "mine.py", 1000, 0) == int(is_refused)
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("not supported: ") == is_refused
    wording(first)
    made = made_of(tmp_path, "run.sh", text)
    assert made.outcomes["data.video_key"].kind == ("unsupported" if name in ("sound", "video") else "no effect")


def test_a_run_with_images_of_a_family_that_is_here_is_complete(tmp_path, capsys, wording):
    model, words, _ = EASYR1_SCRIPTS["qwen3 4b lora"]
    write(tmp_path, "run.sh", easyr1_script(tmp_path, model, words))
    assert program.run(tmp_path / "run.sh", tmp_path / "mine.py", 1000, 0) == 0
    printed = capsys.readouterr().out
    assert "not supported" not in printed
    wording(printed.partition("could not judge:")[0])  # what follows depends on the packages that are here
    # A name that says nothing of a tower: the run needs a model that has one.
    write(tmp_path, "run.sh", easyr1_script(tmp_path, "/models/of_last_week", words))
    assert program.run(tmp_path / "run.sh", None, 1000, 0) == 0
    (note,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: this run has ")]
    wording(note)


FAMILIES = {
    "Qwen/Qwen2-VL-2B-Instruct": "qwen2_vl", "/m/qwen2_5_vl_7b": "qwen2_5_vl", "Qwen2.5-VL-72B": "qwen2_5_vl",
    "a/Qwen25VL-3b": "qwen2_5_vl", "Qwen/Qwen3-VL-8B-Thinking": "qwen3_vl", "Qwen/Qwen2.5-7B": "",
    "Qwen/Qwen3-VL-235B-A22B-Instruct": "qwen3_vl_moe", "Qwen/Qwen3-30B-A3B": "", "google/gemma-3-1b-it": "",
    "google/gemma-3-12b-it": "gemma3", "HuggingFaceTB/SmolVLM2-2.2B": "other", "zai-org/GLM-4.1V-9B": "other",
    "moonshotai/Kimi-VL-A3B-Instruct": "other",
}  # fmt: skip


def test_the_name_of_a_model_shows_its_family():
    assert {model: images.family_of(model) for model in FAMILIES} == FAMILIES
    assert {"qwen2_vl", "qwen2_5_vl", "qwen3_vl"} <= images.FAMILIES.keys()
