"""The self-test: checks at step 0 on the run's own model, engine, data and reward functions.

A check takes a `Trial` and returns a `CheckReport`. To add a check, write a function and add a line to CHECKS.
docs/health.md lists the checks, their bounds and their costs.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.data import formats
from jaxrl_llm.errors import UserError
from jaxrl_llm.health.finding import Finding
from jaxrl_llm.health.history import History
from jaxrl_llm.health.rules.environment import tool_down
from jaxrl_llm.learner.scorers import States
from jaxrl_llm.machine import progress, sharding, transfers
from jaxrl_llm.rollout.named_environments import NamedEnvironments
from jaxrl_llm.rollout.routing import routing_agreement
from jaxrl_llm.selftest.trial import (
    COMPARED_TOKENS,
    MAX_TOKENS,
    TRIAL_KEY,
    Dialog,
    SelfTestParts,
    Trial,
    make_trial,
    trial_batch,
)
from jaxrl_llm.structs import Array, Batch, PyTree, Rollouts
from jaxrl_llm.tasks import PREFILL, owns_loop
from jaxrl_llm.tasks.protocol import COLUMN

# A bound such as KL is for float32; KL_ROUNDED is the bound of the same check for other dtypes.
# Bounds of the KL between equal weights in two programs. The KL is about half the squared difference of
# log-probabilities, which is 1e-6 in float32.
KL, KL_ROUNDED = 1e-9, 1e-3
# Bounds of differences of log-probabilities. float32 bounds the largest difference, which is 3e-6 for the embedded
# model on a CPU. Other dtypes bound the mean, because rare tokens differ by much more: it is 1.8e-3 in bfloat16 over
# 1,000 tokens (docs/LOG.md). `engine.max_gap` bounds the largest difference of another engine, and so its mean too.
GAP, MEAN_GAP = 1e-4, 1e-2
RATIO, RATIO_ROUNDED = 1e-4, 1e-2  # bounds of the distance of the mean importance ratio from 1
# Bounds of the share of clipped tokens. Rounding may clip a few tokens; 0.01 is the bound of the rule phantom_clipping.
CLIPPED, CLIPPED_ROUNDED = 0.0, 0.01
CENTERED = 1e-4  # bound of the mean of a group's advantages, which are about 1 and are summed in float32
# Bounds of |difference of gradients| / |gradient|. In float32 another order of summation changes it by 1e-6.
GRADIENT, GRADIENT_ROUNDED = 1e-4, 5e-2
MIN_CHANCE = 1e-4  # probability below which equal samples cannot be chance
# A trial push multiplies all weights by WEIGHT_FACTOR and replaces weights that are all 0, such as a matrix B of new
# adapters, by numbers of size ZERO_REPLACEMENT. This changes log-probabilities by far more than rounding.
WEIGHT_FACTOR, ZERO_REPLACEMENT = 1.05, 0.02
JUDGED_ROWS = 2  # rows of the data whose answers the reward functions judge
MIN_COMPLETIONS = 16  # a finding that no completion stops needs at least this many completions

GROUP_CENTERED = ("grpo", "rloo", "gdpo", "pass_at_k")  # advantage estimators with mean 0 in each group
ANSWER_COLUMNS = ("answer", "solution", "ground_truth", "completion")  # columns that may hold a good answer
EMPTY_THOUGHT = "<think>\n</think>\n"  # empty reasoning, which some reward functions demand before an answer
# Forms in which reward functions expect an answer; the check of the reward functions tries all of them.
ANSWER_FORMS = (
    "{}",
    "\\boxed{{{}}}",
    "#### {}",
    "<answer>{}</answer>",
    EMPTY_THOUGHT + "<answer>\n{}\n</answer>",
    EMPTY_THOUGHT + "\\boxed{{{}}}",
    "<answer>\\boxed{{{}}}</answer>",
)


class CheckReport(NamedTuple):
    """The result of a check: its findings, and the numbers that it measured."""

    text: str  # the measured numbers, or why nothing was measured
    findings: tuple[Finding, ...] = ()
    applicable: bool = True
    id: str = ""  # id of the check, such as "S1"; "" for the report on the samples that all checks use
    seconds: float = 0.0

    def line(self) -> str:
        """Returns the report as a line of a table."""
        verdict = "found" if self.findings else "passed" if self.applicable else "not applicable"
        return f"{self.id:<4} {verdict:<15} {self.text}  ({self.seconds:.1f} s)"

    def record(self) -> dict[str, Any]:
        passed = not self.findings if self.applicable else None
        fields = {"id": self.id, "passed": passed, "text": self.text, "seconds": round(self.seconds, 3)}
        return fields | {"findings": [finding.record() for finding in self.findings]}


def alarm(
    check: str, id: str, evidence: str, cause: str, fix: str, *, failures: str = "", severity: str = "error"
) -> Finding:
    """Returns the finding of a check.

    check: id of the check (S1, S2, ...). id: id of the finding. evidence, cause, fix: texts that the user reads.
    failures: ids on the page of failures, such as F1.
    """
    source = f"docs/health.md {check}" + (f", docs/failures.md {failures}" if failures else "")
    return Finding(severity=severity, evidence=evidence, cause=cause, fix=fix, reference=source, id=id)


Check: TypeAlias = Callable[[Trial], CheckReport]
# Returns the report of a check that does not apply to a run. text: reason.
skipped = partial(CheckReport, findings=(), applicable=False)
NEEDS_FULL = "only `jaxrl doctor --selftest` runs this check, because it compiles further programs"


def all_reports(parts: SelfTestParts, states: States, *, full: bool) -> Iterator[CheckReport]:
    """Runs all checks on a new run, and yields a report on the samples and one report per check.

    states: states at step 0. full: True to run also the checks that compile programs which the run does not need.
    """
    start_time = time.perf_counter()
    trial = make_trial(parts, states, full=full)
    _, group, _ = trial.rollouts.completions.shape
    sampled = f"sampled {len(trial.rollouts.completions)} x {group} completions, and scored them"
    yield CheckReport(sampled, seconds=time.perf_counter() - start_time)
    for id, function in CHECKS:
        start_time = time.perf_counter()
        report = function(trial)
        yield report._replace(id=id, seconds=time.perf_counter() - start_time)


def run_checks(parts: SelfTestParts, states: States, say: Callable[[str], None]) -> list[Finding]:
    """Runs the checks that need only programs of the run, prints how many passed, and returns their findings."""
    start_time = time.perf_counter()
    reports, check_ids = [], [*(id for id, _ in CHECKS), ""]
    with progress.task("self-test", len(check_ids)) as progress_bar:
        progress_bar.detail = "sampling"
        for report, next_id in zip(all_reports(parts, states, full=False), check_ids, strict=True):
            reports += [report] if report.id else []
            progress_bar.advance(detail=next_id)
    applicable = sum(report.applicable for report in reports)
    alarming = sum(bool(report.findings) for report in reports)
    summary = f"{applicable - alarming} checks passed" + (f", {alarming} found something" if alarming else "")
    say(f"self-test: {summary} in {time.perf_counter() - start_time:.1f} s")
    return [finding for report in reports for finding in report.findings]


def reference_agrees(trial: Trial) -> CheckReport:
    """S1: at step 0 the reference model equals the policy."""
    if "ref_logprobs" not in trial.scores:
        return skipped("the run has no reference model")
    # The policy is not scored by the reference's program, because a mistake in this program would affect both.
    if trial.full:
        kl = float(trial.gradient("policy", 0)[1]["kl/ref"])
    elif "old_logprobs" in trial.scores:
        mask = trial.rollouts.loss_mask
        gap = np.where(mask, _to_host(trial.scores["ref_logprobs"]) - _to_host(trial.scores["old_logprobs"]), 0.0)
        kl = float(np.sum(np.expm1(gap) - gap) / max(mask.sum(), 1))  # the estimator k3 of `algorithms.kl`
    else:
        return skipped(NEEDS_FULL)
    text = f"KL to the reference {kl:.1e}"
    bound = KL if trial.parts.recipe_summary.dtype == "float32" else KL_ROUNDED
    # In a full trial with top-k or top-p, the KL is the mean of the difference d of log-probabilities. Otherwise it is
    # the mean of about d^2 / 2, so a bound b of d^2 / 2 is a bound sqrt(2 b) of d.
    if trial.full and trial.parts.learning.sampling.truncates:
        bound = np.sqrt(2 * bound)
    if abs(kl) <= bound:
        return CheckReport(text)
    cause = "the reference model has other weights than the policy, or its program computes other numbers"
    fix = "start a new run, and do not change the model's files meanwhile"
    return CheckReport(text, (alarm("S1", "reference_differs", f"{text} at step 0", cause, fix),))


def ratio_is_one(trial: Trial) -> CheckReport:
    """S2: the first update on a rollout has importance ratio 1, and clips nothing."""
    metrics = _first_metrics(trial)
    if metrics is None:
        return skipped(NEEDS_FULL)
    if "ratio/mean" not in metrics:
        return skipped("the loss has no ratio")
    ratio, clipped = float(metrics["ratio/mean"]), float(metrics.get("clip/fraction", 0.0))
    text = f"ratio 1 {ratio - 1:+.1e}, {clipped:.2%} of the tokens clipped"
    ratio_bound, clip_bound = (RATIO, CLIPPED) if trial.exact else (RATIO_ROUNDED, CLIPPED_ROUNDED)
    if abs(ratio - 1) <= ratio_bound and clipped <= clip_bound:
        return CheckReport(text)
    cause = "the old log-probabilities differ from those that the update computes"
    fix = "use an engine or a dtype that rounds like the trainer, or check your loss"
    return CheckReport(text, (alarm("S2", "ratio_not_one", f"{text} in the first update", cause, fix),))


def sampler_agrees(trial: Trial) -> CheckReport:
    """S3: sampler and trainer compute the same log-probabilities."""
    if trial.policy is None:
        return skipped(NEEDS_FULL)
    gaps = np.abs(_to_host(trial.policy) - trial.rollouts.logprobs)[trial.rollouts.loss_mask]
    text = f"log-probabilities of sampler and trainer differ by {gaps.max():.1e} at most, {gaps.mean():.1e} in the mean"
    if trial.full and trial.parts.model.cfg.mixture and trial.parts.recipe_summary.in_trainer:
        same_share = routing_agreement(trial.parts.model, trial.params, trial.batch, trial.parts.learning.mesh)
        text += f"; they choose the same experts in {same_share:.2%} of layers and tokens"
    gap, bound = (gaps.max(), GAP) if trial.exact else (gaps.mean(), min(trial.engine.max_gap or MEAN_GAP, MEAN_GAP))
    if gap <= bound:
        return CheckReport(text)
    cause = f"the engine and the trainer compute different log-probabilities (bound {bound:g})"
    fix = "compare the weights, the dtype and the sampling settings of both"
    return CheckReport(text, (alarm("S3", "sampler_disagrees", text, cause, fix),))


def groups_are_whole(trial: Trial) -> CheckReport:
    """S4: each group has all its completions, and group-relative advantages have mean 0 in each group."""
    name = trial.parts.recipe_summary.credit.estimator.name
    expected, sampled = trial.rewards.total.shape, trial.rollouts.completions.shape[:2]
    findings = []
    if sampled != expected:
        evidence = f"{sampled[0]} groups of {sampled[1]} completions, not {expected[0]} of {expected[1]}"
        findings.append(alarm("S4", "groups_broken", evidence, "the engine loses completions", "fix the engine"))
    text = f"{sampled[0]} groups of {sampled[1]}"
    if name not in GROUP_CENTERED:
        return CheckReport(f"{text}; the estimator need not have mean 0 in a group", tuple(findings))
    mask = trial.rollouts.loss_mask
    sums = np.where(mask, _to_host(trial.batch.advantages), 0.0).sum(axis=-1)
    # The advantage of a completion is the mean over its trained tokens, because tokens may have different advantages.
    completion_means = sums / np.maximum(mask.sum(axis=-1), 1)
    mean = float(np.abs(completion_means.mean(axis=1)).max())
    text = f"{text}, mean of their advantages {mean:.1e} at most"
    if not mean <= CENTERED:
        cause, fix = "the baseline of an advantage is not the mean of its group", f"fix the estimator {name}"
        findings.append(alarm("S4", "advantages_not_centered", text, cause, fix))
    return CheckReport(text, tuple(findings))


def reward_sees(trial: Trial) -> CheckReport:
    """S5: the reward functions can judge any text, and a good answer earns more than an empty completion."""
    reward, rows = trial.parts.recipe_summary.reward, trial.parts.dataset.rows[:JUDGED_ROWS]
    if not any(reward.weights) or not trial.parts.recipe_summary.credit.estimator.needs_reward:
        return skipped("no reward is used")
    if not reward.timeout and not trial.full:  # a further call may change the state of a function in this process
        return skipped(
            "config.reward.timeout = 0: the functions run in the run's own process, where only `jaxrl doctor "
            "--selftest` calls them"
        )
    columns = [name for name in ANSWER_COLUMNS if all(isinstance(row.get(name), str | int | float) for row in rows)]
    answers = [[str(row[name]) for name in columns] for row in rows]
    # The text after "####" is tried too, because it is the answer in GSM8K.
    answers = [[*texts, *(text.split("####")[-1].strip() for text in texts)] for texts in answers]
    texts = [
        ["", *(form.format(answer) for answer in row_answers for form in _answer_forms(row))]
        for row, row_answers in zip(rows, answers, strict=True)
    ]
    try:
        rewards = _total_rewards(trial, rows, texts)
    except UserError as error:
        cause, fix = "the self-test called the function", "make the function judge any text, also an empty one"
        return CheckReport("an error", (alarm("S5", "reward_fails", str(error), cause, fix),))
    if np.isnan(rewards).all():
        if any(owns_loop(environment.function) for environment in trial.parts.recipe_summary.environments.values()):
            return skipped("the agents of the run reward their episodes, and no other function judges texts")
        evidence = f"no reward function returned a number for any of {rewards.size} completions"
        cause = f"{', '.join(map(str, reward.functions))}: a judge does not answer, or the rows lack a column"
        fix = "start the judge, or fix the data"
        return CheckReport(evidence, (alarm("S5", "no_verdict", evidence, cause, fix),))
    if not columns:
        return CheckReport(
            f"the functions return numbers; the data has no column {', '.join(ANSWER_COLUMNS[:-1])} or "
            f"{ANSWER_COLUMNS[-1]} with a good answer to compare"
        )
    rewards = np.nan_to_num(rewards)
    empty_rewards, best_rewards = rewards[:, 0], rewards[:, 1:].max(axis=1)
    text = f"good answers earn up to {best_rewards.max():g}, empty completions {empty_rewards.min():g}"
    if np.any(best_rewards > empty_rewards):
        return CheckReport(text)
    evidence = "no form of a row's answer earns more than an empty completion"
    cause = (
        "the reward function ignores the answer, or needs a form that the self-test does not try "
        f"({text}; {', '.join(columns)})"
    )
    fix = "call your reward function on a good answer"
    return CheckReport(text, (alarm("S5", "reward_blind", evidence, cause, fix, severity="warning"),))


def _answer_forms(row: dict[str, Any]) -> list[str]:
    """Returns the forms of an answer for a row, without the part of an empty thought that its prompt has already."""
    prompt = row["prompt"]
    # The message of the answer may begin in the prompt.
    message_start = prompt[-1]["content"] if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant" else ""
    opened_text = row.get(PREFILL) or str(message_start)
    opening = EMPTY_THOUGHT if "</think>" in opened_text else "<think>" if "<think>" in opened_text else ""
    return [form.removeprefix(opening) for form in ANSWER_FORMS]


def _total_rewards(trial: Trial, rows: list[dict[str, Any]], texts: list[list[str]]) -> np.ndarray:
    """Returns the total rewards of completions of rows, NaN if no function returned a number.

    texts: completions of each row. Raises: UserError, if a reward function fails.
    """
    ids = [[trial.parts.tokenizer(x, add_special_tokens=False)["input_ids"] for x in group] for group in texts]
    columns = {}
    # With an environment, functions get the columns of an episode of one turn, whose measurements are all 0.
    if trial.parts.recipe_summary.environments:
        columns["turns"] = [[[{"role": "assistant", "content": text}] for text in group] for group in texts]
        columns["episode"] = [[defaultdict(float) for _ in group] for group in texts]
        columns["loss_mask"] = [[[True] * len(tokens) for tokens in group] for group in ids]
    with closing(trial.parts.open_reward_fn()) as reward_fn:
        return reward_fn(rows, texts, ids, columns).rewards.total


def stop_is_learned(trial: Trial) -> CheckReport:
    """S6: prompts end with the generation prompt; completions can stop, and their stop tokens are trained."""
    rollouts, stops, limit = trial.rollouts, trial.parts.stop_ids, trial.parts.learning.sizes.max_completion_tokens
    findings = list(_check_generation_prompt(trial))
    if not any(0 <= stop < trial.parts.model.cfg.vocab_size for stop in stops):
        fix = "add eos_token_id to the model's generation_config.json"
        evidence = f"stop tokens {list(stops)}, none in the vocabulary"
        findings.append(alarm("S6", "no_stop_token", evidence, "no completion can end", fix, failures="F14"))
    # A completion that stopped must end with a stop token, and the loss mask must contain this token.
    # The index of the last token of an empty completion is set to 0, because -1 would select padding.
    last_index = np.maximum(rollouts.completion_mask.sum(axis=-1, keepdims=True) - 1, 0)  # [B, G, 1]
    last_tokens = np.take_along_axis(rollouts.completions, last_index, axis=-1)[..., 0]  # [B, G]
    last_is_trained = np.take_along_axis(rollouts.loss_mask, last_index, axis=-1)[..., 0]
    stop_is_trained = np.isin(last_tokens, stops) & last_is_trained
    is_stopped, count = ~rollouts.truncated, rollouts.truncated.size
    text = f"{is_stopped.sum()} of {count} completions stopped, all by a token that is trained"
    if untrained_stops := int((is_stopped & ~stop_is_trained).sum()):
        text = f"{untrained_stops} of {is_stopped.sum()} completions that stopped do not end with a trained stop token"
        cause, fix = "the policy never learns to stop", "keep the stop token in the engine's completion and its mask"
        findings.append(alarm("S6", "stop_not_trained", text, cause, fix, failures="F14"))
    elif not is_stopped.any() and count >= MIN_COMPLETIONS and limit <= MAX_TOKENS:
        text = f"none of {count} completions stopped within {limit} tokens"
        fix = "raise config.rollout.max_completion_tokens, or use a model that was trained to stop"
        findings.append(
            alarm("S6", "nothing_stops", text, "the limit cuts all of them", fix, failures="F14", severity="warning")
        )
    return CheckReport(text, tuple(findings))


def gradient_stays(trial: Trial) -> CheckReport:
    """S7: micro-batches and packed rows do not change the gradient."""
    if not trial.full:
        return skipped(NEEDS_FULL)
    microbatch = sharding.prompt_shards(trial.parts.learning.mesh)  # one prompt of each device
    summary = trial.parts.recipe_summary
    all_float32 = summary.dtype == summary.gradient_dtype == "float32"
    bound = GRADIENT if all_float32 else GRADIENT_ROUNDED
    findings, distances = [], []
    # Compare each learner's gradients with its gradient on the whole batch at once, without packing.
    for name in trial.parts.learning.learners:
        whole_gradient, _ = trial.gradient(name, 0)
        distances_by_layout = {
            "packed rows": _distance(trial.gradient(name, microbatch, packed=True)[0], whole_gradient)
        }
        # If packing and micro-batches together fail, a program without packing shows which of the two is the cause.
        if not distances_by_layout["packed rows"] <= bound:
            distances_by_layout["one prompt at a time"] = _distance(trial.gradient(name, microbatch)[0], whole_gradient)
        distances.append(f"{name} {max(distances_by_layout.values()):.1e}")
        for layout in [layout for layout, distance in distances_by_layout.items() if not distance <= bound]:
            evidence = (
                f"with {layout}, the gradient of the {name} differs by {distances_by_layout[layout]:.1e} of its norm"
            )
            cause = "the loss depends on other tokens of the batch, for example by a mean over the batch"
            fix = "return one number per token from the loss, and no mean"
            findings.append(alarm("S7", "microbatch_changes_gradient", evidence, cause, fix, failures="F25, F29"))
    return CheckReport(
        f"packed rows and micro-batches change the gradient by {', '.join(distances)} of its norm", tuple(findings)
    )


def environment_is_masked(trial: Trial) -> CheckReport:
    """S8: tokens of an environment are in the completion, but not in the loss mask."""
    if not trial.parts.environments:
        return skipped("the run has no environment")
    if not trial.full:
        return skipped(NEEDS_FULL)
    rollouts, dialogs = trial.episodes()
    if down_finding := _tool_down(trial, rollouts):
        return CheckReport(down_finding.evidence, (down_finding,))
    # All episodes together give three counts: tokens of the environment, trained ones of them, and changed ones.
    arrays = rollouts.completions, rollouts.completion_mask, rollouts.loss_mask  # [B, G, C] each
    flat_arrays = [array.reshape(-1, array.shape[-1]) for array in arrays]
    counts = [_count_observations(*episode) for episode in zip(*flat_arrays, dialogs, strict=True)]
    tokens, trained, changed = np.sum(counts, axis=0).tolist()
    text = f"the environment wrote {tokens} of {rollouts.completion_mask.sum()} tokens in {len(dialogs)} episodes"
    if not tokens:
        cause = "the policy ends each episode in its first turn, or the environment returns no text"
        fix = "read completions.jsonl; start from a model that knows the protocol of the environment"
        return CheckReport(
            text, (alarm("S8", "environment_silent", text, cause, fix, failures="F22", severity="warning"),)
        )
    if changed:
        evidence = f"{changed} of {tokens} tokens of the environment differ in the completion"
        cause, fix = "the engine encodes the text again between turns", "append the ids that the environment returns"
        return CheckReport(text, (alarm("S8", "observation_changed", evidence, cause, fix, failures="F21"),))
    if trained:
        evidence = f"{trained} of {tokens} tokens of the environment are in the loss mask"
        cause, fix = "the policy is trained on text that it has not written", "append observations with loss_mask False"
        return CheckReport(text, (alarm("S8", "environment_trained", evidence, cause, fix, failures="F20"),))
    return CheckReport(f"{text}, and none of them is trained")


def _count_observations(
    completion: np.ndarray, completion_mask: np.ndarray, loss_mask: np.ndarray, dialog: Dialog
) -> np.ndarray:
    """Counts the tokens of an environment in a completion [C], by the ids that the environment returned.

    dialog: token ids of the turns and observations. Returns three counts [3]: tokens of the environment, those of them
    that are in the loss mask, and those that differ in the completion.
    """
    position, length, counts = 0, int(completion_mask.sum()), np.zeros(3, int)
    for turn, observation in dialog:
        position += len(turn)
        if observation is None or length <= position:  # the episode ended here, or reached the completion's limit
            break
        span = slice(position, position := position + len(observation))
        counts += len(observation), loss_mask[span].sum(), (completion[span] != observation).sum()
    return counts


def _tool_down(trial: Trial, rollouts: Rollouts) -> Finding | None:
    """Returns the finding of the rule `tool_down` if a tool fails in all calls of these episodes, else None."""
    groups = {"": np.ones(len(rollouts.truncated), bool)}
    if isinstance(trial.parts.environments, NamedEnvironments):
        names = np.array([row[COLUMN] for row in trial.prompts.rows])
        groups = {f"{name}/": names == name for name in np.unique(names).tolist()}
    means = {
        f"episode/{prefix}{name}": float(values[own].mean())
        for prefix, own in groups.items()
        for name, values in rollouts.episodes.items()
    }
    finding, environments = tool_down(History([{"step": 1} | means])), trial.parts.recipe_summary.environments
    for section, environment in environments.items():
        if finding and "url" in environment.arguments:
            url = environment.arguments["url"]
            finding = replace(finding, cause=f"{finding.cause} (config.{section}.url = {url!r})")
    return finding and replace(finding, id=tool_down.__name__)


def samples_differ(trial: Trial) -> CheckReport:
    """S9: completions of a prompt differ within their group, and between two random keys."""
    rollouts = trial.rollouts
    tokens = np.where(rollouts.completion_mask, rollouts.completions, 0)
    logprobs = np.where(rollouts.completion_mask, rollouts.logprobs, 0)
    # The samples with another key are shorter, so only their first tokens are compared.
    compared, other_rollouts = slice(0, COMPARED_TOKENS), trial.other_key_rollouts
    other_key_tokens = np.where(other_rollouts.completion_mask, other_rollouts.completions, 0)[..., compared]
    # {what should make completions differ: log-probability that all are equal by chance; False if some differ}.
    # Another completion of a group equals the first one with the probability of the first one.
    other_members = tokens.shape[1] - 1
    log_chance = {"members of a group": (tokens == tokens[:, :1]).all() and other_members * logprobs[:, 0].sum()}
    log_chance["keys"] = np.array_equal(tokens[..., compared], other_key_tokens) and logprobs[..., compared].sum()
    findings = []
    # A value of False compares as 0, so completions that differ raise no finding.
    for source in [source for source, chance in log_chance.items() if chance < np.log(MIN_CHANCE)]:
        evidence = f"all completions are the same for different {source}"
        by_chance = f"by chance: e^{log_chance[source]:.0f}"
        cause, fix = f"the engine uses one key ({by_chance})", "draw with the key and the member"
        findings.append(alarm("S9", "samples_repeat", evidence, cause, fix))
    distinct = np.mean([len(np.unique(group, axis=0)) for group in tokens])
    changed_share = (tokens[..., compared] != other_key_tokens).any(axis=-1).mean()
    text = f"{distinct:.1f} of {tokens.shape[1]} completions of a group are distinct"
    text += f", another key changes {changed_share:.0%}"
    return CheckReport(text, tuple(findings))


def push_arrives(trial: Trial) -> CheckReport:
    """S10: after a push of weights the engine samples with the new weights."""
    if not trial.full:
        return skipped(NEEDS_FULL)
    if trial.engine.max_gap is not None:
        return _weight_check(trial)
    # Sample with weights that differ from the run's weights in a known way.
    changed_params = _changed_params(trial.params)
    trial.engine.update_weights(changed_params)
    sampled = trial.sample(TRIAL_KEY, COMPARED_TOKENS)
    # The engine gets the run's own weights again, whatever this check finds.
    trial.engine.update_weights(trial.params)
    # The engine's log-probabilities must equal those of the trainer with the pushed weights, not with the old weights.
    new_gap, old_gap = (_logprob_gap(trial, params, sampled) for params in (changed_params, trial.params))
    text = (
        f"after a push, log-probabilities differ from the new weights by {new_gap:.1e}, from the old by {old_gap:.1e}"
    )
    if new_gap < old_gap and (new_gap <= GAP or not trial.exact):
        return CheckReport(text)
    cause, fix = "the engine does not sample with the weights that it received", "fix its method update_weights"
    return CheckReport(text, (alarm("S10", "push_has_no_effect", text, cause, fix, failures="F23"),))


CHECKS: tuple[tuple[str, Check], ...] = (
    ("S1", reference_agrees),
    ("S2", ratio_is_one),
    ("S3", sampler_agrees),
    ("S4", groups_are_whole),
    ("S5", reward_sees),
    ("S6", stop_is_learned),
    ("S7", gradient_stays),
    ("S8", environment_is_masked),
    ("S9", samples_differ),
    ("S10", push_arrives),
)


# One program for all weights, because operation by operation each shape would compile programs of its own.
@jax.jit
def _changed_params(params: PyTree) -> PyTree:
    """Returns changed weights for a trial push."""
    return jax.tree.map(_changed_weights, params)


def _changed_weights(weights: Array) -> Array:
    """Returns changed weights for a trial push: multiplied by WEIGHT_FACTOR, or small numbers if all are 0."""
    # The integers of an int8 base stay, because their scales are changed.
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        return weights
    # The NumPy array is equal in all processes, so it can be combined with an array that is sharded over them.
    small = ZERO_REPLACEMENT * np.sin(np.arange(1, 1 + np.prod(weights.shape[-1:], dtype=int)))
    return jnp.where(
        jnp.any(weights != 0), weights * WEIGHT_FACTOR, small.astype(weights.dtype).reshape(weights.shape[-1:])
    )


def _to_host(x: Array) -> np.ndarray:
    """Copies an array [B, ...] from the devices to the host, with the rows of all processes."""
    return transfers.gather_to_host(x)


def _first_metrics(trial: Trial) -> dict[str, Array] | None:
    """Returns the metrics of the first update, or None if the run has no program that computes log-probabilities."""
    if trial.full:
        return trial.gradient("policy", 0)[1]
    if trial.policy is None:
        return None
    loss_fn = trial.parts.recipe_summary.loss

    @jax.jit
    def metrics(logprobs: Array, batch: Batch) -> dict[str, Array]:
        mask = batch.loss_mask
        values = loss_fn(logprobs, batch, **batch.columns)[1]
        return {name: jnp.sum(jnp.where(mask, x, 0.0)) / jnp.sum(mask) for name, x in values.items()}

    return metrics(trial.policy, replace(trial.batch, packed_index=None))


def _check_generation_prompt(trial: Trial) -> Iterator[Finding]:
    """Yields a finding if the first prompt does not end with the generation prompt of the chat template."""
    prompt, tokenizer = trial.parts.dataset.rows[0]["prompt"], trial.parts.tokenizer
    if isinstance(prompt, str) or prompt[-1]["role"] == "assistant":  # no template, or the answer has begun already
        return
    args = trial.parts.recipe_summary.template_args | formats.template_args(trial.parts.dataset.rows[0])
    render = partial(tokenizer.apply_chat_template, prompt, tokenize=False, **args)
    without_prompt, with_prompt = (render(add_generation_prompt=add) for add in (False, True))
    expected = with_prompt.removeprefix(without_prompt) if with_prompt.startswith(without_prompt) else ""
    decoded = tokenizer.decode(trial.parts.dataset.ids[0], skip_special_tokens=False)
    if not "".join(decoded.split()).endswith("".join(expected.split())):
        evidence = f"the prompt ends with {decoded[-40:]!r}, not with {expected!r} of the chat template"
        cause, fix = "the prompt does not ask the model to answer", "fix config.data.convert or the chat template"
        yield alarm("S6", "no_generation_prompt", evidence, cause, fix)


def _distance(gradient: Any, reference: Any) -> float:
    """Returns |gradient - reference| / |reference|."""
    return float(_relative_distance(gradient, reference))


@jax.jit
def _relative_distance(gradient: PyTree, reference: PyTree) -> Array:
    difference, norm = optax.tree.sub(gradient, reference), optax.global_norm(reference)
    return optax.global_norm(difference) / jnp.maximum(norm, 1e-30)


def _logprob_gap(trial: Trial, params: Any, sampled: Any) -> float:
    """Returns the largest difference between log-probabilities of the engine and of the trainer with `params`."""
    assert trial.logprobs  # not None in a full trial
    trainer_logprobs = _to_host(
        trial.logprobs(params, trial_batch(trial.parts, trial.prompts, sampled, full=trial.full))
    )
    mask, sampler_logprobs = transfers.gather((sampled.loss_mask, sampled.logprobs), trial.parts.learning.mesh)
    return float(np.abs(np.where(mask, trainer_logprobs - sampler_logprobs, 0.0)).max())


def _weight_check(trial: Trial) -> CheckReport:
    """S10 for an engine whose pushes the run checks after each step: reports the result of the run's own check."""
    try:
        gap = trial.parts.actor.lease.reclaim()[1]["weight_check/gap"]
    except UserError as error:
        cause, fix = "the engine does not have the pushed weights", "start the server again"
        return CheckReport("", (alarm("S10", "push_has_no_effect", str(error), cause, fix, failures="F23"),))
    return CheckReport(
        f"weight check: log-probabilities differ by {gap:.1e} at most, the bound is {trial.engine.max_gap:g}"
    )
