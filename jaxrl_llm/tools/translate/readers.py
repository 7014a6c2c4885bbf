"""Reads a config or script of another trainer: recognizes the trainer, and returns the keys with their values.

Keys come from a document (JSON or YAML), from a Python script of TRL, or from the training command of a shell script.
Variables, loops and functions of the shell script decide the command's arguments, so shell.py interprets the script.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.tools.translate import arguments, documents, easyr1, launchers, script_calls, search_r1, shell, trl, verl
from jaxrl_llm.tools.translate.outcome import TrainerTable
from jaxrl_llm.tools.translate.releases import matches
from jaxrl_llm.tools.translate.script import read_script
from jaxrl_llm.tools.translate.shell import ShellCommand
from jaxrl_llm.tools.translate.shell_words import ASSIGNMENT
from jaxrl_llm.tools.translate.table import SENTENCES, read_names

# A key of any trainer, or of a script of TRL, such as trainer.model.my_function().
KEY = re.compile(r"[\w./@-]+|(trainer\.|[*][*]).*")
# A module of Python, as after `python -m`.
MODULE = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
# Trainers whose keys have sections, as in actor_rollout_ref.actor.optim.lr, and patterns of keys that show the trainer.
# EasyR1 and Search-R1 come first, because they were made from veRL and keep most of its keys.
SECTION_TRAINERS = (
    (easyr1.EASYR1, ("worker.*",)),
    (search_r1.SEARCH_R1, search_r1.OWN_KEYS),
    (verl.VERL, ("actor_rollout_ref.*",)),
)
# First words of these keys, such as actor_rollout_ref.
FIRST_SECTIONS = {key.split(".")[0] for table, _ in SECTION_TRAINERS for key in table.rules if "." in key}
# An argument section.key=value of these trainers.
SECTION_ARGUMENT = re.compile(rf"[+~]*({'|'.join(map(re.escape, FIRST_SECTIONS))})(\.[\w-]+)+=.*", re.DOTALL)
# {pattern of the file of a program that the tables describe: what it does besides its options}
KNOWN_PROGRAMS = read_names("programs")
# {part of the name of a TRL program: key of trl.TRL_TRAINERS; "" for GRPO}. The first part that a name has decides.
PROGRAMS = {"grpo": "", "online": "", "rloo": "rloo", "dpo": "dpo", "cpo": "simpo", "simpo": "simpo"}
# TRL's keys that change a run, which are --flags of its command line.
TRL_FLAGS = trl.flags()
# Python code that makes a config of TRL, as in `python -c "$CODE"`.
MAKES_CONFIG = re.compile(rf"\b({'|'.join(script_calls.CONFIGS)})\(")
# Beginning of the key of a flag, such as --config-name, accelerate.num_processes or program.lora_r.
FLAG_KEY = re.compile(rf"--|(program|{'|'.join(launchers.LAUNCHERS)})\.")
# Modules that start a training script, which is a later word of the command.
LAUNCHER_MODULES = ("torch.distributed", *launchers.LAUNCHERS)


@dataclass(kw_only=True)
class ForeignConfig(documents.DocumentKeys):
    """The keys of a config or script, and the table of the trainer that they are for.

    pinned: version of the trainer that the text names, such as "0.16.1" of `pip install trl==0.16.1`; "" if none.
    """

    table: TrainerTable
    pinned: str


def read(path: Path) -> ForeignConfig:
    """Reads a config or script of another trainer. Raises: UserError, if it is unreadable or of no known trainer."""
    try:
        return _read(path, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text ({error}): name a config or a script") from None
    except RecursionError:
        raise UserError(f"{path} refers to itself or is nested too deeply: name a config or a script") from None


def _read(path: Path, text: str) -> ForeignConfig:
    """Reads the text of a config or script by the suffix of its path: .py, .json, .yaml, or else a shell script."""
    is_document = path.suffix in (".json", ".yaml", ".yml")
    if path.suffix == ".py":
        settings = read_script(path, text)
    elif is_document:
        settings = documents.with_references(documents.read_document(path, text), {})
    else:
        settings = _from_shell(path, text)
    keys = settings.keys = {key: arguments.without_places(value) for key, value in settings.keys.items()}
    # A key becomes a comment of the config, so it must not have other characters, such as line breaks.
    if wrong := next((key for key in keys if not KEY.fullmatch(key)), ""):
        raise UserError(f"{path}: {wrong!r} is no config key: name a config of TRL, veRL, EasyR1 or Search-R1")
    # Most keys belong to all trainers of TRL, so the program decides.
    table = trl.TRL_TRAINERS.get(settings.program) or detect(path, keys, settings.lost)
    # A launcher starts a document of TRL, and its unknown number of processes is a factor of the batch.
    if is_document and table in trl.TRL_TRAINERS.values() and not keys.keys() & {"num_processes", "world_size"}:
        keys["num_processes"] = None
    pinned = pinned_version(table, "\n".join([text, settings.program_text, *requirements(path, text)]))
    return ForeignConfig(**vars(settings), table=table, pinned=pinned)


def requirements(path: Path, text: str) -> list[str]:
    """Returns the texts of the files that a script installs with `pip install -r FILE`, and that are beside it."""
    files = [path.parent / name for name in re.findall(r"\bpip install .*?-r[ =]?[\"']?([^\s\"';&]+)", text)]
    return [file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()]


def pinned_version(table: TrainerTable, text: str) -> str:
    """Returns the version of the trainer that a text names, as in trl==0.16.1 or "# trl 0.16"; "" if it names none."""
    match = re.search(
        rf"\b{table.releases.package}(?:\[[\w,]+\])?(?:==|~=| v?|@v|-)(\d+\.\d+(?:\.\d+)?)\b", text, re.IGNORECASE
    )
    return match[1] if match and table.releases.history and table.releases.is_numbered else ""


def detect(path: Path, keys: dict[str, Any], lost: Sequence[str] = ()) -> TrainerTable:
    """Returns the trainer of the keys. lost: lines that belong to no key. Raises: UserError, if no trainer has them."""
    for table, patterns in SECTION_TRAINERS:
        if any(matches(key, patterns) for key in keys):
            return table
    # TRL's keys have no sections. Half of the keys must be known, because other programs have a learning_rate too.
    # If several kinds know as many keys, the kind in the file's name wins, and then GRPO.
    tables = [trl.TRL_TRAINERS[kind] for kind in sorted(trl.TRL_TRAINERS, key=lambda kind: kind not in path.stem)]
    counts = [sum(table.knows(key) or key.startswith(launchers.LAUNCHERS) for key in keys) for table in tables]
    if 2 * max(counts) < max(len(keys), 1):
        first_keys = f"its first keys are {', '.join(list(keys)[:3])}" if keys else "it has no keys"
        unread_line = f"; this line was not read as a setting: {lost[0]}" if lost else ""
        raise UserError(
            f"{path} is not a config of TRL, veRL, EasyR1 or Search-R1 ({first_keys}{unread_line}): name a config or "
            "script of one of these trainers"
        )
    return tables[counts.index(max(counts))]


def _from_shell(path: Path, text: str) -> documents.DocumentKeys:
    """Returns the keys of the one training command of a shell script."""
    # bash would read < of a placeholder <PATH> as a redirection.
    text = re.sub(rf"(?<=[\s=])<({arguments.PLACEHOLDER})>(?=[\s/]|$)", r"\<\1\>", text)
    try:
        script = shell.follow(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    # A command that a loop runs several times has one place in the script, and counts once.
    runs: dict[int, list[documents.DocumentKeys]] = {}
    for command in script.commands:
        if settings := _from_command(path, command, script.files):
            runs.setdefault(command.positions[0], []).append(settings)
    if len(runs) > 1:
        raise UserError(f"{path} has {len(runs)} training commands: keep one command in the file")
    rounds = next(iter(runs.values()), [])
    lost = unreached(script, {FLAG_KEY.sub("", key) for settings in rounds for key in settings.keys})
    code = (text for command in script.commands for text in (*command.words, *script.files.values()))
    if not rounds and (program := next(filter(MAKES_CONFIG.search, code), "")):
        settings = read_script(Path(f"the Python code in {path}"), program)
        return replace(settings, notes=(*script.notes, *settings.notes))
    if not rounds:
        unreached_line = f" that runs ({lost[0]} belongs to no command that runs)" if lost else ""
        raise UserError(
            f"{path} has no training command of TRL, veRL, EasyR1 or Search-R1{unreached_line}: name a script that has "
            "such a command"
        )
    lost = dict.fromkeys([line for settings in rounds for line in settings.lost] + lost)
    # `merge_rounds` makes keys unread that the rounds of a loop set to different values.
    keys = arguments.merge_rounds([settings.keys for settings in rounds])
    return replace(rounds[0], keys=keys, lost=tuple(lost), notes=(*script.notes, *rounds[0].notes))


def unreached(script: shell.ShellRun, keys: Collection[str]) -> list[str]:
    """Returns the lines of a shell script with words that look like keys, but belong to no command that is followed.

    keys: keys of the training command, which are no loss if another line has them too.
    """
    # Words of commands that were followed are no loss. A command whose first word looks like a key does not count,
    # because it is the end of the training command, which a comment has cut off.
    whole_commands = [command for command in script.commands if not _words_like_keys(command.words[0])]
    reached = script.explained_positions.union(*(command.positions for command in whole_commands))
    words_by_line: list[tuple[int, list[str]]] = []
    for word in (word for word in script.lexer.words if word.position not in reached):
        word_text = "".join(part.text if part.kind == "text" else f"${{{part.text}}}" for part in word.parts)
        # Of A="data.seed=1" only the value looks like a key.
        value = re.sub(f"^{ASSIGNMENT.pattern}", "", word_text)
        unused_words = [text for text in _words_like_keys(value) if _key_of_word(text) not in keys]
        words_by_line.append((script.lexer.line(word.position), unused_words))
    for heredoc in (heredoc for heredoc in script.lexer.heredocs if heredoc.position not in script.explained_positions):
        first_line = script.lexer.line(heredoc.position)
        words_by_line += [(first_line + i, _words_like_keys(line)) for i, line in enumerate(heredoc.text.splitlines())]
    lines = [f"line {line}: {' '.join(words)}" for line, words in words_by_line if words]
    return lines + [text for text in script.nested_scripts if _words_like_keys(text)]


def _words_like_keys(text: str) -> list[str]:
    """Returns the words of a text that look like keys of a trainer: section.key=value, or --key."""
    overrides = [word for word in text.split() if SECTION_ARGUMENT.fullmatch(word)]
    return overrides + [word for word in text.split() if word.startswith("--") and _key_of_word(word) in TRL_FLAGS]


def _key_of_word(word: str) -> str:
    """Returns the key of a word section.key=value or --key."""
    key = word.lstrip("+~").partition("=")[0]
    return key.removeprefix("--").replace("-", "_").removeprefix("no_") if key.startswith("--") else key


def _from_command(path: Path, command: ShellCommand, files: Mapping[str, str]) -> documents.DocumentKeys | None:
    """Returns the keys that a command of a shell script passes to a trainer; None if it starts no training.

    files: {name: text} of files that the script writes.
    """
    words = command.words
    start = next((i for i in range(len(words)) if _starts_training(words, i)), None)
    if start is None:
        return None
    # The word after -m or trl is a module or a command of trl, and no argument.
    argument_words = words[start + 1 + (words[start] in ("-m", "trl")) :]
    # The file of a module is program_file too.
    program_file = f"{words[start + 1].replace('.', '/')}.py" if words[start] == "-m" else words[start]
    known_note = next((note for pattern, note in KNOWN_PROGRAMS.items() if re.search(pattern, program_file)), None)
    hydra, unkeyed = arguments.keys_of(argument_words)
    environment = {name: documents.value_of(" ".join(x), str) for name, x in command.environment.items()}
    if any(key.split(".")[0] in (*documents.SECTIONS, "config", "--config-name") for key in hydra):
        settings = documents.with_files(path, {key: documents.value_of(value) for key, value in hydra.items()}, files)
        settings.lost += _unkeyed(unkeyed) + (f"{program_file}: {SENTENCES['OTHER_MAIN']}",) * (known_note is None)
        return documents.with_references(settings, environment)
    # Any other command has the flags of a program of TRL.
    options, unkeyed = arguments.flags(argument_words)
    values: dict[str, Any] = {}
    for key, value in options.items():
        # TRL's parser adds --no_NAME for each flag that is on by default.
        is_denied = key not in trl.GRPO.rules and key.removeprefix("no_") in trl.GRPO.rules
        values[key.removeprefix("no_") if is_denied else key] = not is_denied and documents.value_of(value)
    program_name = " ".join(words[start : start + 2])
    program = next((kind for part, kind in PROGRAMS.items() if part in program_name), "")
    # A program of alignment-handbook takes its config file as an argument without a flag.
    config_files = [word for word in unkeyed if word.endswith((".yaml", ".yml", ".json"))]
    settings = documents.with_files(path, ({"config": config_files[0]} if config_files else {}) | values, files)
    trl_keys = [key for key in settings.keys if key != "config" or program]
    file = documents.find_file(path, program_file, files) if known_note is None else None
    has_trl_key = any(table.knows(key) for table in trl.TRL_TRAINERS.values() for key in trl_keys)
    # All options may be the program's own.
    if not has_trl_key and not (file and MAKES_CONFIG.search(file[1])):
        return None
    settings.program = program
    known_words = (*config_files, "train", "cpo", *trl.TRL_TRAINERS)
    settings.lost += _unkeyed([word for word in unkeyed if word not in known_words])
    if file:
        _follow_program(program_file, file, settings, environment)
    elif known_note is None:
        settings.lost += (f"{program_file}: {SENTENCES['PROGRAM_NOT_FOUND']}",)
    settings.notes += (f"{program_file}: {known_note}",) * bool(known_note)
    # An option of the program wins over the launcher's flag of this name.
    settings.keys |= launchers.flags(path, words[: start + 1], files) | settings.keys
    if "report_to" in settings.keys and (project := command.environment.get("WANDB_PROJECT")):
        settings.keys["wandb_project"] = documents.value_of(" ".join(project))
    return settings


def _follow_program(
    name: str, file: tuple[Path, str], settings: documents.DocumentKeys, environment: Mapping[str, Any]
) -> None:
    """Replaces the options of a TRL command with what its program makes of them, or says why it is not followed.

    environment: {variable that the program sees: value}.
    """
    try:
        script = read_script(*file, settings.keys, environment)
    except UserError as error:
        settings.lost += (f"{name}: this program is not followed ({error})",)
        return
    # A setting of the script wins over the option of the command that is another name of it.
    renamed, values = trl.TRL_TRAINERS[script.program].renamed, script.keys
    settings.keys = {renamed[key] if renamed.get(key) in values else key: x for key, x in values.items()}
    settings.program, settings.program_text = script.program, script.program_text
    settings.lost += script.lost
    settings.notes += (f"{name} is read, with the options of the command", *script.notes)


def _unkeyed(words: Sequence[str]) -> tuple[str, ...]:
    """Returns lines for the report about arguments that are no key with a value."""
    return tuple(f"{word}: not a key with a value that the script says" for word in words if word.strip("- "))


def _starts_training(words: list[str], i: int) -> bool:
    """Whether word i of a command starts a training program, so that the words after it are its arguments."""
    next_word = words[i + 1] if i + 1 < len(words) else ""
    if words[i] == "trl":
        return next_word in trl.TRL_TRAINERS
    if words[i] == "-m":
        return MODULE.fullmatch(next_word) is not None and not next_word.startswith(LAUNCHER_MODULES)
    return re.fullmatch(r"[^=]*\.py", words[i]) is not None
