"""The columns that functions ask of rows, and the rows that lack them: found before the weights of a model are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
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

# Arguments that are no columns of rows.
COMPLETION_ARGUMENTS = ("prompts", "completions", "completion_ids", "log_metric")
EPISODE_COLUMNS = ("turns", "episode", "loss_mask")  # columns that an environment gives
# Arguments of other trainers alone, and what to do about them.
DEFAULT = "take it out of the function's arguments, or give it a default, as {0}=None"
OTHER_ARGUMENTS = {
    "trainer_state": ("the state of TRL's trainer", DEFAULT),
    "log_extra": ("TRL's log of columns", DEFAULT),
    "queries": (
        "OpenRLHF's prompt and completion in one text",
        "take completions in its place, and answer in place of labels, and return a list of numbers",
    ),
}
Turns: TypeAlias = list[tuple[bool, str]]
# Names that the answer of a problem has in published data sets.
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


class Demand(NamedTuple):
    """A reward function needs one of these columns in each row."""

    function: str
    columns: tuple[str, ...]
    ours: bool  # a function of this package, which abstains without the column
    reader: Callable[[Any], Any] | None = None  # raises ValueError for a value that the function refuses

    def __str__(self) -> str:
        *others, last = map(repr, self.columns)
        return f"{', '.join(others)} or {last}" if others else last


def demands_of(functions: Sequence[str], *, episodes: bool) -> list[Demand]:
    """Returns the columns that reward functions need, by their signatures; episodes: an environment gives columns, too.

    An argument without a default is a column that each row needs. A function of this package that has defaults for
    all columns needs one of them.
    """
    demands = []
    for text in functions:
        function, (name, _) = bound(text), split_call(text)
        # The function behind a partial that holds the arguments of the config.
        plain = getattr(function, "func", function)
        ours, readers = is_ours(plain, REWARDS), getattr(plain, "reads", {})
        columns = _parameters(function, {*COMPLETION_ARGUMENTS, *(EPISODE_COLUMNS if episodes else ())})
        required = [column for column, has_default in columns.items() if not has_default]
        demands += [Demand(name, (column,), ours, readers.get(column)) for column in required]
        if more := getattr(plain, "asks", None):
            # A column without a reader is shown as the row has it, also None.
            asked = more(**getattr(function, "keywords", {}))
            demands += [Demand(name, (column,), asked[column] is not None, asked[column]) for column in sorted(asked)]
        optional = tuple(column for column in columns if column not in EPISODE_COLUMNS)
        if any_of := getattr(plain, "any_of", optional if ours and not required else ()):
            demands.append(Demand(name, any_of, ours))
    return demands


def _parameters(function: Callable[..., Any], offered: set[str]) -> dict[str, bool]:
    """Returns the arguments of a function that are columns of the data, and whether they have a default."""
    columns = {}
    for p in parameters(function).values():
        has_default = p.default is not p.empty
        # Keyword-only arguments with a default are settings: a config gives them, no data.
        column = p.kind is p.POSITIONAL_OR_KEYWORD or (p.kind is p.KEYWORD_ONLY and not has_default)
        if column and p.name not in offered:
            columns[p.name] = has_default
    return columns


def check(
    dataset: Dataset, functions: Sequence[str], section: str, *, episodes: bool = False, convert: str = ""
) -> Dataset:
    """Returns a data set with notes on the rows that lack a column of a reward function, by source of a mixture.

    section: "data", section of an evaluation set, or "" for a command line; episodes: whether the config has an
    environment; convert: name of the rows' convert function, "" if none.
    Raises: UserError, naming the function and a remedy, if no row has the column, if all values are empty for a
    function of ours, or if the function refuses a value.
    """
    parts = dataset.parts or {"": range(len(dataset.rows))}
    # Rows without a column, of each source.
    # Several functions may need the same columns: rows are searched once for each set of columns.
    lacking: dict[tuple[str, ...], dict[str, list[int]]] = {}
    # What the functions do with such rows.
    notes: dict[str, list[str]] = {}
    for demand in demands_of(functions, episodes=episodes):
        if demand.columns not in lacking:
            lacking[demand.columns] = {
                name: _without(dataset.rows, rows, demand.columns) for name, rows in parts.items()
            }
        without = lacking[demand.columns]
        count = sum(map(len, without.values()))
        named = any(column in row for row in dataset.rows for column in demand.columns) if count else True
        if not named or (demand.ours and count == len(dataset.rows)):
            raise UserError(_refusal(demand, dataset, section, convert, named))
        if demand.reader:
            _check_readable(demand, set(chain(*without.values())), dataset, section)
        for name, rows in without.items():
            if rows:
                note = _note(demand, rows, parts[name], dataset, name)
                first = dataset.rows[rows[0]].get(demand.columns[0])
                notes.setdefault(note, []).append(
                    f"{demand.function} {'abstains' if demand.ours else f'gets {first!r}'}"
                )
    lines = [f"{note}: {', '.join(effects)}" for note, effects in notes.items()]
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
    """Returns the training and the evaluation data with notes on rows that lack a column. Raises: UserError.

    eval_sets, held_out: evaluation sets and their data, by section of the config. functions: reward functions, whose
    servers are asked once.
    """
    for column in data.completion_columns:
        dataset = check_completions(dataset, column, data.source)
    for function in functions:
        check_reach(function, REWARDS, "config.reward.functions")
    for section, problems in eval_sets.items():
        for function in problems.functions:
            check_reach(function, REWARDS, f"config.{section}.function")
    checked, judged = check(dataset, functions, "data", episodes=episodes, convert=data.convert), dict(held_out)
    for section, problems in eval_sets.items():
        for column in () if problems.functions else data.completion_columns:
            judged[section] = check_completions(judged[section], column, problems.source)
        judged[section] = check(
            judged[section], problems.functions, section, episodes=episodes, convert=problems.convert
        )
    return checked, judged


def _without(rows: Sequence[Row], part: range, columns: tuple[str, ...]) -> list[int]:
    return [i for i in part if all(is_empty(rows[i].get(column)) for column in columns)]


def _check_readable(demand: Demand, empty: set[int], dataset: Dataset, section: str) -> None:
    """Raises: UserError, with the first row and how many there are, for values that a reward function refuses."""
    # Places and what was wrong.
    # All rows are read before the error: its count tells a broken row from a wrong column.
    refused: list[tuple[int, ValueError]] = []
    for i, row in enumerate(dataset.rows):
        if demand.reader and i not in empty:
            try:
                demand.reader(row[demand.columns[0]])
            except ValueError as error:
                refused.append((i, error))
    if refused:
        i, error = refused[0]
        source = next((f"{name} " for name, part in dataset.parts.items() if i in part), "")
        source = source or (f"{section}.source " if section else "")
        more = f"; {len(refused):,} of {len(dataset.rows):,} rows are like this" if len(refused) > 1 else ""
        raise UserError(f"{source}row {dataset.numbers[i]:,}: reward {demand.function} cannot judge it: {error}{more}")


def _note(demand: Demand, without: list[int], part: range, dataset: Dataset, source: str) -> str:
    prefix = f"{source}: " if source else ""
    if len(without) == len(part):
        return f"{prefix}no row has {demand}"
    first, verb = dataset.numbers[without[0]], "has" if len(without) == 1 else "have"
    return f"{prefix}{len(without):,} of {len(part):,} rows {verb} no {demand}, the first is row {first:,}"


def _refusal(demand: Demand, dataset: Dataset, section: str, convert: str, named: bool) -> str:
    present = sorted({column for row in dataset.rows for column in row} - {"prompt", PREFILL})
    what = "which the data does not have"
    if named:
        # The columns are there, but empty.
        present = [column for column in present if column not in demand.columns]
        what = f"which is empty in all {len(dataset.rows):,} rows{f' of {dataset.source}' * bool(dataset.source)}"
    by, answer = (f"{section}.convert", "data.answer_column") if section else ("--convert", "--answer-column")
    likely = next((column for column in ANSWERS if column in present), "")
    if demand.columns[0] in EPISODE_COLUMNS:
        remedy = "only episodes have it, in a run with an environment (config.env)"
    elif name := next((column for column in demand.columns if column in OTHER_ARGUMENTS), ""):
        meaning, remedy = OTHER_ARGUMENTS[name]
        return (
            f"reward {demand.function} asks for {name!r}, {meaning}, which does not exist here: {remedy.format(name)}"
        )
    elif convert:
        remedy = f"let {by} = {convert!r} make it"
    elif demand.columns[0] == "answer":
        other = f"fill it{f', name another in {answer}' * bool(present)}" if named else f"name one in {answer}"
        remedy = f"name the column that holds it, {answer} = {likely!r}" if likely else other
        remedy += f", or make it with {by}"
    else:
        remedy = f"{'fill it' if named else 'rename one'}, or make it with {by}"
    where = f" ({section}.source)" if section else ""
    listed = ", ".join(present) or "none"
    return f"reward {demand.function} asks for column {demand}, {what}{where}; there is {listed}: {remedy}"


def check_completions(dataset: Dataset, column: str, source: str) -> Dataset:
    """Returns a data set of completions to learn, text or the turns of an episode, with a note on those without text.

    Raises: UserError, with the first such row and how many there are, if rows have something else or nothing.
    """
    completions = [turns(row.get(column)) for row in dataset.rows]
    without = [i for i, messages in enumerate(completions) if not messages]
    if without and not any(column in row for row in dataset.rows):
        columns = formats.columns_text(dict.fromkeys(name for row in dataset.rows for name in row))
        raise UserError(
            f"{source} has no column {column!r} ({columns}): name the one to learn in data.completion_column"
            " (of a pair, the worse one in data.rejected_column)"
        )
    if without:
        raise UserError(
            f"{source} row {dataset.numbers[without[0]]}: {column!r} is {dataset.rows[without[0]].get(column)!r:.200} "
            f"({len(without):,} of {len(completions):,} rows have no completion): make it text, or messages of the "
            "roles assistant and environment, or drop these rows with data.convert"
        )
    blank = [i for i, messages in enumerate(completions) if not any(text.strip() for _, text in messages)]
    if not blank:
        return dataset
    first = dataset.numbers[blank[0]]
    share = f"{len(blank):,} of {len(completions):,} rows"
    note = f"{share} have an empty {column!r}, the first is row {first:,}: they teach to end"
    return replace(dataset, notes=(*dataset.notes, note))


def turns(completion: Any) -> Turns:
    """Returns the turns of a completion: (whether the policy says it, text). []: it is neither text nor turns."""
    if isinstance(completion, str):
        return [(True, completion)]
    try:
        messages = [(message["role"], message["content"]) for message in completion]
    except (TypeError, KeyError):
        return []
    if any(role not in ("assistant", "environment") or not isinstance(text, str) for role, text in messages):
        return []
    return [(role == "assistant", text) for role, text in messages]
