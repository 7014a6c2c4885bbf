"""The environments that a config names: one for all rows of a run, or several of which each row names one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from jaxrl_llm import tasks
from jaxrl_llm.config.records import Call, KeywordArguments
from jaxrl_llm.data import formats
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.environments import EnvironmentBatch, EnvironmentPool
from jaxrl_llm.tasks.protocol import COLUMN

__all__: tuple[str, ...] = ()  # no class here is an environment that a config may name


@dataclass(frozen=True, kw_only=True)
class NamedEnvironmentSettings:
    """The section `environments.NAME` of a config: one of several environments, and the limits of its episodes."""

    env: Annotated[Call, tasks.ENVIRONMENTS]
    turns: Annotated[KeywordArguments, EnvironmentPool]


@dataclass(frozen=True, kw_only=True)
class EpisodeSettings:
    """The sections of a config about episodes: `env` and `turns` for one environment, `environments` for several."""

    env: Annotated[Call, tasks.ENVIRONMENTS] | None = None
    turns: Annotated[KeywordArguments, EnvironmentPool] | None = None
    environments: dict[str, NamedEnvironmentSettings] = field(default_factory=dict)

    @property
    def calls(self) -> dict[str, Call]:
        """The environment of each section: {"env": ...}, {"environments.NAME.env": ...} or {}."""
        if self.env:
            return {"env": self.env}
        return {f"environments.{name}.env": settings.env for name, settings in self.environments.items()}

    def sections(self) -> dict[str, NamedEnvironmentSettings]:
        """Returns {prefix of its fields: settings} of each environment: {"": ...} for `env` and `turns`."""
        if self.env and self.turns:
            return {"": NamedEnvironmentSettings(env=self.env, turns=self.turns)}
        return {f"environments.{name}.": settings for name, settings in self.environments.items()}


def check_episodes(episodes: EpisodeSettings) -> None:
    """Raises: UserError, if sections are missing or contradict each other. Agents need no section `turns`."""
    environment, turns = episodes.env, episodes.turns
    if episodes.environments and (environment or turns):
        section = "env" if environment else "turns"
        raise UserError(
            f"config.{section} and config.environments exclude each other: move this environment to a section of "
            "config.environments, with its own env and turns"
        )
    for name, settings in episodes.environments.items():
        _check_named(name, settings.env)
    if environment and tasks.owns_loop(environment.function):
        if turns:
            raise UserError(
                f"config.turns has no effect, because config.env.name = {environment.name!r} has limits of its own: "
                "remove config.turns"
            )
        return
    if environment and not turns:
        raise UserError(
            "config.turns is missing: config.env needs the limits of episodes; add config.turns as in "
            "configs/search_grpo.py"
        )
    if turns and not environment:
        raise UserError(
            "config.turns has no effect without config.env, which names the environment: add config.env, or remove "
            "config.turns"
        )


def _check_named(name: str, environment: Call) -> None:
    """Raises: UserError, if an environment cannot be one of several."""
    if tasks.owns_loop(environment.function):
        raise UserError(
            f"config.environments.{name}.env.name = {environment.name!r}: agents own their loop, so they are the only "
            "environment of a run: set config.env, or name another environment"
        )
    if isinstance(environment.arguments.get("factory"), dict):
        raise UserError(
            f"config.environments.{name}.env.factory has several classes, but the column {COLUMN!r} already chooses a "
            "section of config.environments: make a section for each class"
        )


def open_environments(
    episodes: EpisodeSettings, tokenizer: Any, exit_stack: ExitStack, template_args: Mapping[str, Any]
) -> Environments | None:
    """Opens the environments of a run, which `exit_stack` closes. Returns None if the run has no environment.

    template_args: arguments of the chat template, except for the tools. Raises: UserError.
    """
    if episodes.env and episodes.turns:
        pool = EnvironmentPool(tokenizer, episodes.env, template_args, **episodes.turns)
        return exit_stack.enter_context(closing(pool))
    pools = dict[str, EnvironmentPool]()
    for name, settings in episodes.environments.items():
        with errors_name_section(name):
            pool = EnvironmentPool(tokenizer, settings.env, template_args, **settings.turns)
        pools[name] = exit_stack.enter_context(closing(pool))
    return NamedEnvironments(pools) if pools else None


@contextmanager
def errors_name_section(name: str) -> Iterator[None]:
    """Changes config.env in a UserError to config.environments.NAME.env, and config.turns alike."""
    try:
        yield
    except UserError as error:
        section = f"config.environments.{name}."
        raise UserError(re.sub(r"\bconfig\.(?=env\b|turns\b)", section, str(error))) from error


class NamedEnvironments:
    """The environments of a run that has several. The column `environment` of a row names the one of its episodes."""

    def __init__(self, pools: Mapping[str, EnvironmentPool]):
        self._pools = pools
        self.schemas: list[dict[str, Any]] = []  # each row has the tools of its own environment
        self.observation_tokens = max(pool.observation_tokens for pool in pools.values())

    def prepare_rows(self, rows: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Returns rows with what their environments add to them, and with the tools of their environments.

        Raises: UserError, if a row names no environment of the run, or an environment does not accept its row.
        """
        prepared = list(rows)
        for name, places in self._places(rows).items():
            pool, own_rows = self._pools[name], [rows[i] for i in places]
            with errors_name_section(name):
                own_rows = pool.prepare_rows([self._with_tools(row, name) for row in own_rows])
            for i, row in zip(places, own_rows, strict=True):
                prepared[i] = row
        return prepared

    def check(self, rows: Sequence[dict[str, Any]]) -> None:
        """Checks each environment as `EnvironmentPool.check` does, with its own rows. Raises: UserError."""
        for name, places in self._places(rows).items():
            with errors_name_section(name):
                self._pools[name].check([rows[i] for i in places])

    def start_batch(self, rows: Sequence[dict[str, Any]], group_size: int) -> EnvironmentBatch:
        """Returns new environments for a batch of rows. Raises: UserError, if an environment refuses its row."""
        return EnvironmentBatch.start(self.pools_of(rows), rows, group_size)

    def pools_of(self, rows: Sequence[dict[str, Any]]) -> list[EnvironmentPool]:
        """Returns the pool of each row."""
        return [self._pools[row[COLUMN]] for row in rows]

    def _places(self, rows: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
        """Returns {environment: indices of its rows}. Raises: UserError, if a row names no environment of the run."""
        places: dict[str, list[int]] = {}
        for i, row in enumerate(rows):
            name = row.get(COLUMN)
            if not isinstance(name, str) or name not in self._pools:
                raise UserError(
                    f"config.environments has the sections {', '.join(self._pools)}, but a row "
                    f"({formats.columns_text(row)}) has {name!r} in the column {COLUMN!r}: add this column with "
                    "data.convert, or correct it"
                )
            places.setdefault(name, []).append(i)
        return places

    def _with_tools(self, row: dict[str, Any], name: str) -> dict[str, Any]:
        """Returns a row whose prompt the chat template renders with the tools of its environment."""
        if not (schemas := self._pools[name].schemas):
            return row
        if row.get("tools") is not None:
            raise UserError(
                "config.env: rows have a column 'tools' with other functions, which the environment cannot call; "
                "remove this column"
            )
        if isinstance(row["prompt"], str):
            raise UserError(
                "config.env: only a chat template can describe tools, but the prompt of a row is text: make prompts "
                "lists of messages, for example with data.convert"
            )
        return row | {"tools": schemas}


Environments: TypeAlias = EnvironmentPool | NamedEnvironments
