"""Rules that translate the keys that only Search-R1 has, from search_r1.tsv, into fields of a jaxrl_llm config.

All other keys of Search-R1 are translated by verl.tsv, with veRL's defaults of early 2025.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from jaxrl_llm.tools.translate import family, verl
from jaxrl_llm.tools.translate.outcome import Keys, Outcome, unsupported
from jaxrl_llm.tools.translate.table import Row, read_rows, trainer_table

# A prompt has n x n_agent episodes, and the veRL of early 2025 does not multiply the mini-batch by them.
ROWS = verl.ROWS | read_rows("search_r1")
# Names and patterns of the keys that only Search-R1 has; `reward` is a default of the table.
OWN_KEYS = tuple(read_rows("search_r1").keys() - verl.ROWS.keys() - {"reward"})
FAMILY = replace(verl.FAMILY, rows=ROWS, counts_sequences=True)

# {scores of the format in main_ppo_format: reward function}
FORMAT_REWARDS = {"0.2, 0.1, 0.0": "search.with_format", "0.0, 0.0, 0.0": "search.exact_match"}

data_files = partial(family.rows_of, "search_r1.convert")


def grouped(value: Any, keys: Keys) -> Outcome:
    """Translates `rollout.n` and `rollout.n_agent`, whose product is the episodes of a prompt, to `group_size`."""
    return Outcome("mapped", {"group_size": FAMILY.group_size(keys)}, "n x n_agent episodes of a prompt")


def turns(value: Any, keys: Keys) -> Outcome:
    """Translates Search-R1's `max_turns`, the searches of an episode, to `env`, `turns` and the limit of an episode."""
    searches, response = int(keys["max_turns"]), int(keys["data.max_response_length"])
    fields = {
        "env.most_searches": searches,
        # Search-R1 generates one more turn after max_turns searches, which cannot search.
        "turns.most": searches + 1,
        "rollout.max_completion_tokens": (searches + 1) * response + searches * int(keys["data.max_obs_length"]),
    }
    reason = "turns that may search; one more answers. An episode has at most (max_turns + 1) x max_response_length + "
    return Outcome("changed", fields, reason + "max_turns x max_obs_length tokens, and is never cut at its beginning")


def turn_limit(row: Row, value: Any, keys: Keys) -> Outcome:
    """Translates a limit of tokens of one turn, such as `data.max_obs_length`, with the limit of an episode."""
    # The limit of an episode depends on all limits, so each key sets it too.
    episode_limit = turns(value, keys).fields["rollout.max_completion_tokens"]
    fields = {row.field: int(value), "rollout.max_completion_tokens": episode_limit}
    return Outcome("changed" if row.why else "mapped", fields, row.why)


def format_scores(row: Row, value: Any, keys: Keys) -> Outcome:
    """Translates the scores of `main_ppo_format`: jaxrl_llm has those of Search-R1 v0.3, or exact match without any."""
    names = ("structure_format_score", "final_format_score", "retrieval_score")
    function = FORMAT_REWARDS.get(", ".join(str(float(keys.get(f"{row.section}{name}") or 0)) for name in names))
    if not function:
        return unsupported(row.field, "search.with_format has 0.2, 0.1 and 0", *row.field_names)
    return Outcome("mapped", row.fields_with((function,)), row.why)


def masking(row: Row, value: Any, keys: Keys) -> Outcome:
    """Translates `actor.state_masking`, whether the policy learns only from its own tokens, as in jaxrl_llm always."""
    if value:
        return Outcome("changed", reason=row.why)
    reason = "without it the policy also learns to write what the search returned; jaxrl_llm never trains on that"
    return unsupported(row.key, reason)


def base(keys: Keys) -> str:
    """Returns the config of jaxrl_llm that a translation changes."""
    return f"search_{verl.base(keys)}"


RULES = vars(family) | vars(verl) | FAMILY.rules() | globals()
SEARCH_R1 = trainer_table("Search-R1", "commit 0789f5e", ROWS, RULES, base, as_of=(0, 2))
