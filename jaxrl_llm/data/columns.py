"""Finds rows without the columns that reward functions and `sft` need, before the weights of a model are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from jaxrl_llm.config.names import is_ours, parameters, split_call
from jaxrl_llm.config.schema import check_reach
from jaxrl_llm.data import formats
from jaxrl_llm.data.formats import Row
from jaxrl_llm.data.prompts import Dataset
from jaxrl_llm.data.settings import DataSettings, EvalSet
from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks import PREFILL, REWARDS, is_empty
from jaxrl_llm.tasks.signatures import bound

# Arguments of reward functions that every run has; they are no columns of rows.
COMPLETION_ARGUMENTS = ("prompts", "completions", "completion_ids", "log_metric")
EPISODE_COLUMNS = ("turns", "episode", "loss_mask")  # arguments that only a run with an environment has
# Arguments that only other trainers have: {argument: (its meaning, the fix)}.
DEFAULT = "remove the argument from the function, or give it a default: {0}=None"
OTHER_ARGUMENTS = {
    "trainer_state": ("the state of TRL's trainer", DEFAULT),
    "log_extra": ("TRL's log of columns", DEFAULT),
    "queries": (
        "OpenRLHF's prompt and completion in one text",
        "replace it by the argument completions, and labels by answer, and return a list of numbers",
    ),
}
Turns: TypeAlias = list[tuple[bool, str]]  # (whether the policy wrote the text, text) of each turn
# Names of the column with the answer in published data sets.
ANSWERS = (
    "solution",
    "ground_truth",
    "final_answer",
    "expected_answer",
    "reference_answer",
    "target",
    "label",
    "result",
)


class ColumnRequirement(NamedTuple):
    """A reward function that needs at least one of these columns in each row."""

    function: str  # name of the reward function
    columns: tuple[str, ...]
    abstains: bool  # whether the function abstains without the column, as the functions of this package do
    reader: Callable[[Any], Any] | None = None  # parses a value; raises ValueError if the function refuses the value

    def __str__(self) -> str:
        *first_columns, last = map(repr, self.columns)
        return f"{', '.join(first_columns)} or {last}" if first_columns else last


def column_requirements(functions: Sequence[str], *, episodes: bool) -> list[ColumnRequirement]:
    """Returns the columns that reward functions need, read from their signatures.

    functions: names of reward functions, with arguments, as in a config; episodes: whether an environment adds columns.
    Each row needs the column of an argument without a default. A function of this package whose columns all have
    defaults needs one of these columns.
    """
    requirements = []
    for text in functions:
        function, (name, _) = bound(text), split_call(text)
        # If the config gives arguments, `function` is a `partial` around the plain function. The decorators in
        # `jaxrl_llm.tasks` set attributes of the plain function: `reads` {column: reader}, `asks` (function that lists
        # columns) and `any_of` (columns of which a row needs one).
        plain_function = getattr(function, "func", function)
        is_package_function, readers = is_ours(plain_function, REWARDS), getattr(plain_function, "reads", {})
        columns = _column_arguments(function, {*COMPLETION_ARGUMENTS, *(EPISODE_COLUMNS if episodes else ())})
        required = [column for column, has_default in columns.items() if not has_default]
        requirements += [
            ColumnRequirement(name, (column,), is_package_function, readers.get(column)) for column in required
        ]
        if list_columns := getattr(plain_function, "asks", None):
            # A column without a reader is shown to the function as it is, also None.
            column_readers = list_columns(**getattr(function, "keywords", {}))
            requirements += [
                ColumnRequirement(name, (column,), reader is not None, reader)
                for column, reader in sorted(column_readers.items(), key=itemgetter(0))
            ]
        optional = tuple(column for column in columns if column not in EPISODE_COLUMNS)
        default_any_of = optional if is_package_function and not required else ()
        if any_of := getattr(plain_function, "any_of", default_any_of):
            requirements.append(ColumnRequirement(name, any_of, is_package_function))
    return requirements


def _column_arguments(function: Callable[..., Any], other_arguments: set[str]) -> dict[str, bool]:
    """Returns {argument of a function that is a column of the data: whether it has a default}."""
    columns = {}
    for parameter in parameters(function).values():
        has_default = parameter.default is not parameter.empty
        # Keyword-only arguments with a default are settings, which come from a config and not from the data.
        is_keyword_only = parameter.kind is parameter.KEYWORD_ONLY
        is_column = parameter.kind is parameter.POSITIONAL_OR_KEYWORD or (is_keyword_only and not has_default)
        if is_column and parameter.name not in other_arguments:
            columns[parameter.name] = has_default
    return columns


def check(
    dataset: Dataset, functions: Sequence[str], section: str, *, episodes: bool = False, convert: str = ""
) -> Dataset:
    """Returns a data set with notes on rows that lack a column which a reward function needs.

    Each source of a mixture gets its own note.

    section: "data", section of an evaluation set, or "" for a command line; episodes: whether the config has an
    environment; convert: name of the rows' convert function, "" if none.
    Raises: UserError, naming the function and a remedy, if no row has the column, if the column is empty in all rows
    for a function that abstains on empty values, or if the function refuses a value.
    """
    parts = dataset.parts or {"": range(len(dataset.rows))}
    # {columns: {source: indices of rows without them}}. Rows are searched once for each set of columns, because several
    # functions may need the same columns.
    empty_rows: dict[tuple[str, ...], dict[str, list[int]]] = {}
    effects: dict[str, list[str]] = {}  # {note on the rows: what each function does with them}
    for requirement in column_requirements(functions, episodes=episodes):
        columns = requirement.columns
        if columns not in empty_rows:
            empty_rows[columns] = {source: _rows_without(dataset.rows, part, columns) for source, part in parts.items()}
        empty_by_source = empty_rows[columns]
        count = sum(map(len, empty_by_source.values()))
        has_column = any(column in row for row in dataset.rows for column in columns) if count else True
        if not has_column or (requirement.abstains and count == len(dataset.rows)):
            raise UserError(_missing_column(requirement, dataset, section, convert, has_column=has_column))
        if requirement.reader:
            _check_readable(requirement, set(chain(*empty_by_source.values())), dataset, section)
        for source, row_indices in empty_by_source.items():
            if row_indices:
                note = _note(requirement, row_indices, parts[source], dataset, source)
                value = dataset.rows[row_indices[0]].get(columns[0])
                effect = "abstains" if requirement.abstains else f"gets {value!r}"
                effects.setdefault(note, []).append(f"{requirement.function} {effect}")
    lines = [f"{note}: {', '.join(effects_of_note)}" for note, effects_of_note in effects.items()]
    return replace(dataset, notes=(*dataset.notes, *lines))


def check_all(
    data: DataSettings,
    eval_sets: Mapping[str, EvalSet],
    functions: Sequence[str],
    dataset: Dataset,
    held_out: Mapping[str, Dataset],
    *,
    episodes: bool,
) -> tuple[Dataset, dict[str, Dataset]]:
    """Returns the training and the evaluation data with notes on rows that lack a column.

    eval_sets, held_out: evaluation sets and their data, by section of the config; functions: reward functions, whose
    servers are contacted once; episodes: whether the config has an environment.
    Raises: UserError, if a column or a server is missing.
    """
    for column in data.completion_columns:
        dataset = check_completions(dataset, column, data.source)
    for function in functions:
        check_reach(function, REWARDS, "config.reward.functions")
    for section, problems in eval_sets.items():
        for function in problems.functions:
            check_reach(function, REWARDS, f"config.{section}.function")
    checked = check(dataset, functions, "data", episodes=episodes, convert=data.convert)
    checked_sets = dict(held_out)
    for section, problems in eval_sets.items():
        for column in () if problems.functions else data.completion_columns:
            checked_sets[section] = check_completions(checked_sets[section], column, problems.source)
        checked_sets[section] = check(
            checked_sets[section], problems.functions, section, episodes=episodes, convert=problems.convert
        )
    return checked, checked_sets


def _rows_without(rows: Sequence[Row], part: range, columns: tuple[str, ...]) -> list[int]:
    """Returns the indices of rows in `part` in which all columns are empty or missing."""
    return [i for i in part if all(is_empty(rows[i].get(column)) for column in columns)]


def _check_readable(requirement: ColumnRequirement, empty_rows: set[int], dataset: Dataset, section: str) -> None:
    """Raises: UserError, with the first row and the number of rows whose value a reward function refuses.

    empty_rows: indices of rows without a value, which are not read.
    """
    # All rows are read before the error, because the number of refused rows shows whether the whole column is wrong.
    refused: list[tuple[int, ValueError]] = []
    for i, row in enumerate(dataset.rows):
        if requirement.reader and i not in empty_rows:
            try:
                requirement.reader(row[requirement.columns[0]])
            except ValueError as error:
                refused.append((i, error))
    if refused:
        i, error = refused[0]
        source = next((f"{name} " for name, part in dataset.parts.items() if i in part), "")
        source = source or (f"{section}.source " if section else "")
        count = f"; {len(refused):,} of {len(dataset.rows):,} rows have such a value" if len(refused) > 1 else ""
        raise UserError(
            f"{source}row {dataset.numbers[i]:,}: reward {requirement.function} cannot judge this row: {error}{count}"
        )


def _note(requirement: ColumnRequirement, empty_rows: list[int], part: range, dataset: Dataset, source: str) -> str:
    """Returns a note on the number of rows without the required columns, in a data set or a source of a mixture."""
    prefix = f"{source}: " if source else ""
    if len(empty_rows) == len(part):
        return f"{prefix}no row has {requirement}"
    first, verb = dataset.numbers[empty_rows[0]], "has" if len(empty_rows) == 1 else "have"
    return f"{prefix}{len(empty_rows):,} of {len(part):,} rows {verb} no {requirement}, the first is row {first:,}"


def _missing_column(
    requirement: ColumnRequirement, dataset: Dataset, section: str, convert: str, *, has_column: bool
) -> str:
    """Returns the error for a column that a reward function needs: no row has it, or it is empty in all rows."""
    function, columns = requirement.function, requirement.columns
    present = sorted({column for row in dataset.rows for column in row} - {"prompt", PREFILL})
    problem = "which no row has"
    if has_column:
        present = [column for column in present if column not in columns]
        origin = f" of {dataset.source}" if dataset.source else ""
        problem = f"which is empty in all {len(dataset.rows):,} rows{origin}"
    convert_field = f"{section}.convert" if section else "--convert"
    answer_field = "data.answer_column" if section else "--answer-column"
    likely = next((column for column in ANSWERS if column in present), "")
    if columns[0] in EPISODE_COLUMNS:
        remedy = "only runs with an environment have this column, so add the section env"
    elif name := next((column for column in columns if column in OTHER_ARGUMENTS), ""):
        meaning, remedy = OTHER_ARGUMENTS[name]
        return f"reward {function} has the argument {name!r}, {meaning}, which is unknown here: {remedy.format(name)}"
    elif convert:
        remedy = f"{convert_field} = {convert!r} must make the column"
    elif columns[0] == "answer":
        fill = f"fill the column, or name another one in {answer_field}" if present else "fill the column"
        name_other = fill if has_column else f"name the column of the answer in {answer_field}"
        remedy = f"set {answer_field} = {likely!r}" if likely else name_other
        remedy += f", or make the column with {convert_field}"
    else:
        remedy = f"{'fill the column' if has_column else 'rename a column'}, or make it with {convert_field}"
    source_field = f" ({section}.source)" if section else ""
    columns_text = f"has the columns {', '.join(present)}" if present else "has no other column"
    return (
        f"reward {function} needs the column {requirement}, {problem}{source_field}; the data {columns_text}: {remedy}"
    )


def check_completions(dataset: Dataset, column: str, source: str) -> Dataset:
    """Returns a data set with a note on the rows whose completion is blank.

    column: name of the column that `sft` learns, with text or the turns of an episode.
    Raises: UserError, with the first row and the number of rows whose column holds anything else, or nothing.
    """
    completions = [turns(row.get(column)) for row in dataset.rows]
    without_turns = [i for i, messages in enumerate(completions) if not messages]
    if without_turns and not any(column in row for row in dataset.rows):
        columns = formats.columns_text(dict.fromkeys(name for row in dataset.rows for name in row))
        raise UserError(
            f"{source} has no column {column!r} ({columns}): name the completion to learn in data.completion_column"
            " (and the worse one of a preference pair in data.rejected_column)"
        )
    if without_turns:
        first = without_turns[0]
        raise UserError(
            f"{source} row {dataset.numbers[first]}: {column!r} is {dataset.rows[first].get(column)!r:.200}, but must "
            "be text, or messages of the roles assistant and environment "
            f"({len(without_turns):,} of {len(completions):,} rows have no completion); drop these rows with "
            "data.convert"
        )
    blank = [i for i, messages in enumerate(completions) if not any(text.strip() for _, text in messages)]
    if not blank:
        return dataset
    share = f"{len(blank):,} of {len(completions):,} rows"
    note = (
        f"{share} have an empty {column!r}, the first is row {dataset.numbers[blank[0]]:,}: they teach to stop at once"
    )
    return replace(dataset, notes=(*dataset.notes, note))


def turns(completion: Any) -> Turns:
    """Returns the turns of a completion: (whether the policy wrote it, text); [] for a value without text or turns."""
    if isinstance(completion, str):
        return [(True, completion)]
    try:
        messages = [(message["role"], message["content"]) for message in completion]
    except (TypeError, KeyError):
        return []
    if any(role not in ("assistant", "environment") or not isinstance(text, str) for role, text in messages):
        return []
    return [(role == "assistant", text) for role, text in messages]
