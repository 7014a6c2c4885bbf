"""Translates rewards, data sets, adapters and loggers of any other trainer into fields of a jaxrl_llm config.

The rules of the trainers call these functions, after they have read the names and values from the user's file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from jaxrl_llm.tools.translate.outcome import Keys, Outcome
from jaxrl_llm.tools.translate.table import SENTENCES, read_names

# A reward function of jaxrl_llm.
ACCURACY = "math.accuracy"
# {reward function of TRL and open-r1: (that of jaxrl_llm, column of the answer or "")}
REWARDS = read_names("trl_rewards")
# Packages whose functions have the names of REWARDS.
REGISTRIES = ("trl", "open_r1")
# {name in EasyR1 or part of the name of a data file of veRL: reward function of jaxrl_llm}
EASYR1_REWARDS, EASYR1_SCORES, DATA_SOURCES = map(read_names, ("easyr1_files", "easyr1_scores", "data_sources"))
# Fields of a run that evaluates nothing.
NO_EVALUATION = {"eval": None, "checkpoint.keep_best": 0}
# Loggers that jaxrl_llm has.
LOGGERS = ("mlflow", "tensorboard", "trackio", "wandb")
# Suffixes of data files.
FILES = (".parquet", ".json", ".jsonl", ".csv")


def rewards(names: list[str], weights: list[float] | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the reward fields for functions of TRL, and {field: task} of fields that the user must complete.

    names: names of the functions. The name accuracy_reward of TRL becomes a function of jaxrl_llm. The name good of a
        function in the script becomes my_rewards.good. A name with a module, such as mymod.good, stays as it is.
    weights: weight of each function; None if all have the weight 1.
    """
    functions: list[str] = []  # functions of the jaxrl_llm config
    known: list[str] = []  # those that jaxrl_llm has itself
    own_names: list[str] = []  # names of the others, without arguments
    columns: list[str] = []  # columns of the answer that the known functions read
    for name in names:
        short_name = name.rpartition(".")[2]
        if is_registered(name) and short_name in REWARDS:
            function, column = REWARDS[short_name]
            known.append(function)
            columns += [column] if column else []
        else:
            # A function of the script itself, such as __main__.good, moves to the module my_rewards.
            function = name.removeprefix("__main__.")
            own_names.append(function.partition("(")[0])
            function = function if "." in own_names[-1] else f"my_rewards.{function}"
        functions.append(function)
    fields = reward_fields(tuple(functions), weights)
    if columns:
        fields["data.answer_column"] = columns[0]
    if not own_names:
        return fields, {}
    alone = [name for name in own_names if "." not in name]
    modules = dict.fromkeys(name.rpartition(".")[0] for name in own_names if "." in name)
    tasks = [f"move {', '.join(alone)} to a module my_rewards.py beside this file"] if alone else []
    tasks += [f"{', '.join(modules)} must be a module beside this file, or installed"] if modules else []
    reason = f"{'; '.join(tasks)}; jaxrl_llm accepts the signature of TRL"
    is_own = fields["eval.function"] not in known
    return fields, dict.fromkeys(["reward.functions", *["eval.function"] * is_own], reason)


def is_registered(name: str) -> bool:
    """Whether a reward is TRL's or open-r1's: a function of the script or of another package is the user's."""
    return name.split(".")[0] in (name, *REGISTRIES)


def reward_fields(functions: tuple[str, ...], weights: list[float] | None = None) -> dict[str, Any]:
    """Returns the reward fields for functions of jaxrl_llm."""
    all_weights = tuple(map(float, weights or [1.0] * len(functions)))
    # The function with the largest weight judges an evaluation.
    best = max(range(len(functions)), key=lambda i: all_weights[i])
    return {"reward.functions": functions, "reward.weights": all_weights, "eval.function": functions[best]}


def reward_model(path: str, reason: str) -> Outcome:
    """Returns the outcome of a reward model. reason: difference from the other trainer."""
    fields = {"reward_model.path": path, "reward_model.weight": 1.0}
    return Outcome("changed", fields, f"{reason}; its tokenizer must have the policy's token ids (docs/rewards.md)")


def custom_reward(path: str, function: str, arguments: Mapping[str, Any]) -> Outcome:
    """Returns the outcome of a reward function in a file of veRL or EasyR1, which runs unchanged as my_rewards.py."""
    arguments_text = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    call = f"my_rewards.{function}({arguments_text})" if arguments_text else f"my_rewards.{function}"
    task = f"copy {path} to my_rewards.py beside this file; jaxrl_llm accepts its signature (docs/rewards.md)"
    tasks = {"reward.functions": task, "eval.function": task}
    return Outcome("changed", reward_fields((call,)), f"{path} is not read", tasks)


def by_data_source(files: Any) -> Outcome:
    """Returns the outcome of veRL's own reward, which the column data_source selects. files: files of training data."""
    names = [str(file).lower() for file in (files if isinstance(files, list) else [files])]
    # The translator does not read the column data_source, so the name of the file stands for the column.
    for part, function in DATA_SOURCES.items():
        if all(part in name for name in names):
            reasons = ["in veRL data_source selects the function, in jaxrl_llm the config", SENTENCES.get(function, "")]
            return Outcome("changed", reward_fields((function,)), "; ".join(filter(None, reasons)))
    fields = reward_fields(("verl.score",)) | {"eval.function": "verl.accuracy"}
    reason = "data_source selects the function, of which jaxrl_llm has those for mathematics and questions"
    return Outcome("changed", fields, reason)


def easyr1_reward(path: str, function: str, arguments: Mapping[str, Any]) -> Outcome:
    """Returns the outcome of a reward function in a file: jaxrl_llm has the functions of EasyR1's examples."""
    folder, _, file = path.rpartition("/")
    if file not in EASYR1_REWARDS or not folder.endswith(("reward_function", "score_function")):
        return custom_reward(path, function, arguments)
    return Outcome("mapped", reward_fields((EASYR1_REWARDS[file],)))


def dataset(section: str, name: str, split: str) -> Outcome:
    """Returns the outcome of a data file or a data set of the hub. section: "data" or "eval".

    name: name of the file or data set, which may have its own split, as in owner/name:configuration@split.
    """
    source, function = f"{section}.source", f"{section}.convert"
    if name.endswith(FILES):
        return Outcome("mapped", {source: name, function: ""})
    # The command `hf download` knows neither configurations nor splits.
    owned = re.split("[:@]", name)[0]
    fetch = f"hf download {owned} --repo-type dataset --local-dir data/{owned.split('/')[-1]}, and name its files"
    needs = {} if find_spec("datasets") else {source: f"pip install 'jaxrl_llm[hub]', or {fetch}"}
    return Outcome("mapped", {source: name if "@" in name else f"{name}@{split}", function: ""}, "", needs)


def adapter_targets(targets: Any) -> Outcome:
    """Returns the outcome of the modules with an adapter: "all-linear", names, or None for PEFT's own choice."""
    reason = ""
    if targets is None:
        targets, reason = ["q_proj", "v_proj"], "PEFT chooses the modules by the model's family; for most, these two"
    # The field is a pattern that is searched in a kernel's name. All linear kernels of our models end in _proj.
    module_names = targets.split(",") if isinstance(targets, str) else list(targets)
    pattern = "_proj" if module_names == ["all-linear"] else "|".join(name.strip(" ,") for name in module_names)
    # argparse keeps the comma in `--lora_target_modules q_proj, v_proj`.
    if any("," in name for name in module_names):
        reason = "PEFT has no module whose name ends with a comma; jaxrl_llm reads the names without it"
    return Outcome("changed" if reason else "mapped", {"adapters.targets": pattern}, reason)


def lora(rank: int, alpha: float, targets: Any) -> Outcome:
    """Returns the outcome of an adapter with its rank, alpha and modules."""
    outcome = adapter_targets(targets)
    fields = {"name": "lora", "rank": int(rank), "alpha": float(alpha), "rs": False, "base_dtype": "", "path": ""}
    return replace(outcome, fields=outcome.fields | {f"adapters.{name}": x for name, x in fields.items()})


def loggers(logger_names: list[str], project: str) -> Outcome:
    """Returns the loggers of a run that jaxrl_llm has too. project: name of the project in these loggers."""
    known_loggers = tuple(name for name in logger_names if name in LOGGERS)
    ignored = (*LOGGERS, "console", "file", "none", "None", "all")
    unknown_loggers = [str(name) for name in logger_names if name not in ignored]
    reason = f"jaxrl_llm has no logger {', '.join(unknown_loggers)}" if unknown_loggers else ""
    kind = "changed" if unknown_loggers else "mapped" if known_loggers else "no effect"
    if not known_loggers:
        return Outcome(kind, reason=reason or "metrics.jsonl has all numbers")
    has_project = set(known_loggers) != {"tensorboard"}
    return Outcome(kind, {"log.to": known_loggers, "log.project": project * has_project}, reason)


def entropy_bonus(value: Any, keys: Keys) -> Outcome:
    """Translates the coefficient of an entropy bonus (veRL's `entropy_coeff`) to `entropy.coef`; 0 means none."""
    return Outcome("mapped", {"entropy.coef": float(value)} if value else {"entropy": None})
