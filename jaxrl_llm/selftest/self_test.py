"""The self-test: checks of step 0 on the run's own model, engine, data and reward functions.

A check gets a `Trial` and returns a `CheckReport`. To add one, write a function and add a line to CHECKS.
docs/health.md lists the checks, their bounds, and what they cost.
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
from jaxrl_llm.machine import progress, sharding
from jaxrl_llm.rollout.routing import routing_agreement
from jaxrl_llm.selftest.trial import AGAIN, KEY, TOKENS, Dialog, SelfTestParts, Trial, prepare, trial_batch
from jaxrl_llm.structs import Array, Batch, Rollouts
from jaxrl_llm.tasks import PREFILL

# Bounds of the KL between equal weights in two programs: half the square of a difference of log-probabilities, which is
# 1e-6 for float32.
KL, KL_ROUNDED = 1e-9, 1e-3
# Bounds of differences of log-probabilities. float32 bounds the largest difference, which is 3e-6 for the embedded
# model on a CPU. Other dtypes bound the mean, because rare tokens differ by much more: it is 1.8e-3 in bfloat16 over
# 1,000 tokens (docs/LOG.md). `engine.max_gap` bounds the largest difference of another engine, and so its mean too.
GAP, MEAN_GAP = 1e-4, 1e-2
RATIO, RATIO_ROUNDED = 1e-4, 1e-2  # distance of the mean ratio from 1: exp of the above
CLIPPED, CLIPPED_ROUNDED = 0.0, 0.01  # share of tokens; rounding may clip a few: the bound of the rule phantom_clipping
CENTERED = 1e-4  # mean of a group's advantages, whose size is about 1: G sums in float32
# |difference of gradients| / |gradient|. In float32 another order of sums changes 1e-6; bfloat16 has 8 bits.
GRADIENT, GRADIENT_ROUNDED = 1e-4, 5e-2
CHANCE = 1e-4  # probability below which equal samples are no accident
# Factor of all weights in a trial push, and the size of those that are 0, such as a matrix B of new adapters. It
# changes log-probabilities by far more than rounding.
MOVED, FROM_ZERO = 1.05, 0.02
ROWS = 2  # of the data, whose answers the reward functions judge
MEANT = 16  # completions, of which one should have stopped

GROUP_CENTERED = ("grpo", "rloo", "gdpo", "pass_at_k")  # estimators whose advantages have mean 0 in each group
ANSWERS = ("answer", "solution", "ground_truth", "completion")  # columns that may hold a good answer
THOUGHT = "<think>\n</think>\n"
FORMS = (
    "{}",
    "\\boxed{{{}}}",
    "#### {}",
    "<answer>{}</answer>",
    THOUGHT + "<answer>\n{}\n</answer>",
    THOUGHT + "\\boxed{{{}}}",
    "<answer>\\boxed{{{}}}</answer>",
)


class CheckReport(NamedTuple):
    """The findings of a check, and the numbers that it measured."""

    text: str  # the numbers, or why it measured none
    findings: tuple[Finding, ...] = ()
    applicable: bool = True
    id: str = ""  # of the check; "": it is none, and says what all checks look at
    seconds: float = 0.0

    def line(self) -> str:
        """Returns it as a line of a table."""
        verdict = "found" if self.findings else "passed" if self.applicable else "not applicable"
        return f"{self.id:<4} {verdict:<15} {self.text}  ({self.seconds:.1f} s)"

    def record(self) -> dict[str, Any]:
        passed = not self.findings if self.applicable else None
        fields = {"id": self.id, "passed": passed, "text": self.text, "seconds": round(self.seconds, 3)}
        return fields | {"findings": [finding.record() for finding in self.findings]}


def alarm(
    check: str, id: str, evidence: str, cause: str, fix: str, *, failures: str = "", severity: str = "error"
) -> Finding:
    """Returns the finding of a check. failures: rows of the page of failures."""
    source = f"docs/health.md {check}" + (f", docs/failures.md {failures}" if failures else "")
    return Finding(severity, evidence, cause, fix, source, id)


Check: TypeAlias = Callable[[Trial], CheckReport]
skipped = partial(CheckReport, findings=(), applicable=False)
MORE = "doctor --selftest does this: it needs programs that the run has not"


def check(parts: SelfTestParts, states: States, *, full: bool) -> Iterator[CheckReport]:
    """Runs all checks on a new run; states: its first ones; full: also those with programs of their own."""
    began = time.perf_counter()
    trial = prepare(parts, states, full=full)
    _, group, _ = trial.rollouts.completions.shape
    sampled = f"sampled {len(trial.rollouts.completions)} x {group} completions, and scored them"
    yield CheckReport(sampled, seconds=time.perf_counter() - began)
    for id, function in CHECKS:
        began = time.perf_counter()
        report = function(trial)
        yield report._replace(id=id, seconds=time.perf_counter() - began)


def at_start(parts: SelfTestParts, states: States, say: Callable[[str], None]) -> list[Finding]:
    """Runs the checks that need no other programs than the run, says how many passed, and returns what they find."""
    began = time.perf_counter()
    reports, following = [], [*(id for id, _ in CHECKS), ""]
    with progress.task("self-test", len(following)) as shown:
        shown.detail = "sampling"
        for report, then in zip(check(parts, states, full=False), following, strict=True):
            reports += [report] if report.id else []
            shown.advance(detail=then)
    applicable = sum(report.applicable for report in reports)
    alarming = sum(bool(report.findings) for report in reports)
    summary = f"{applicable - alarming} checks passed" + (f", {alarming} found something" if alarming else "")
    say(f"self-test: {summary} in {time.perf_counter() - began:.1f} s")
    return [finding for report in reports for finding in report.findings]


def reference_agrees(trial: Trial) -> CheckReport:
    """S1: at step 0 the reference is the policy."""
    if "ref_logprobs" not in trial.scores:
        return skipped("the run has no reference")
    # The reference's own program is not used, because it would make the same mistake twice.
    if trial.full:
        kl = float(trial.gradient("policy", 0)[1]["kl/ref"])
    elif "old_logprobs" in trial.scores:
        mask = trial.rollouts.loss_mask
        gap = np.where(mask, _host(trial.scores["ref_logprobs"]) - _host(trial.scores["old_logprobs"]), 0.0)
        kl = float(np.sum(np.expm1(gap) - gap) / max(mask.sum(), 1))  # k3
    else:
        return skipped(MORE)
    text = f"KL to the reference {kl:.1e}"
    bound = KL if trial.parts.recipe_summary.dtype == "float32" else KL_ROUNDED
    # The bound is wider with top-k or top-p, because then the KL is the mean of d and not of d^2 / 2.
    if abs(kl) <= (np.sqrt(2 * bound) if trial.full and trial.parts.learning.sampling.truncates else bound):
        return CheckReport(text)
    cause = "the reference has other weights than the policy, or scores in another way"
    fix = "begin a new run, with files that nobody changes"
    return CheckReport(text, (alarm("S1", "reference_differs", f"{text} at step 0", cause, fix),))


def ratio_is_one(trial: Trial) -> CheckReport:
    """S2: the first update on a rollout has ratio 1, and clips nothing."""
    metrics = _first_metrics(trial)
    if metrics is None:
        return skipped(MORE)
    if "ratio/mean" not in metrics:
        return skipped("the loss has no ratio")
    ratio, clipped = float(metrics["ratio/mean"]), float(metrics.get("clip/fraction", 0.0))
    text = f"ratio 1 {ratio - 1:+.1e}, {clipped:.2%} of the tokens clipped"
    ratio_bound, clip_bound = (RATIO, CLIPPED) if trial.exact else (RATIO_ROUNDED, CLIPPED_ROUNDED)
    if abs(ratio - 1) <= ratio_bound and clipped <= clip_bound:
        return CheckReport(text)
    cause = "old log-probabilities are not those of the policy that learns"
    fix = "use an engine or a dtype that rounds as the trainer does, or look at your loss"
    return CheckReport(text, (alarm("S2", "ratio_not_one", f"{text} in the first update", cause, fix),))


def sampler_agrees(trial: Trial) -> CheckReport:
    """S3: sampler and trainer compute the same log-probabilities."""
    if trial.policy is None:
        return skipped(MORE)
    gaps = np.abs(_host(trial.policy) - trial.rollouts.logprobs)[trial.rollouts.loss_mask]
    text = f"log-probabilities of sampler and trainer differ by {gaps.max():.1e} at most, {gaps.mean():.1e} in the mean"
    if trial.full and trial.parts.model.cfg.mixture and trial.parts.recipe_summary.in_trainer:
        same = routing_agreement(trial.parts.model, trial.params, trial.batch, trial.parts.learning.mesh)
        text += f"; they choose the same experts in {same:.2%} of layers and tokens"
    gap, bound = (gaps.max(), GAP) if trial.exact else (gaps.mean(), min(trial.engine.max_gap or MEAN_GAP, MEAN_GAP))
    if gap <= bound:
        return CheckReport(text)
    cause = f"the engine does not compute what the trainer computes (bound {bound:g})"
    fix = "compare weights, dtype and sampling settings of both"
    return CheckReport(text, (alarm("S3", "sampler_disagrees", text, cause, fix),))


def groups_are_whole(trial: Trial) -> CheckReport:
    """S4: each group has all its completions, and advantages relative to a group have mean 0 in it."""
    name = trial.parts.recipe_summary.credit.estimator.name
    expected, sampled = trial.rewards.total.shape, trial.rollouts.completions.shape[:2]
    findings = []
    if sampled != expected:
        evidence = f"{sampled[0]} groups of {sampled[1]} completions, not {expected[0]} of {expected[1]}"
        findings.append(alarm("S4", "groups_broken", evidence, "the engine loses completions", "mend it"))
    text = f"{sampled[0]} groups of {sampled[1]}"
    if name not in GROUP_CENTERED:
        return CheckReport(f"{text}; the estimator need not have mean 0 in a group", tuple(findings))
    mask = trial.rollouts.loss_mask
    sums = np.where(mask, _host(trial.batch.advantages), 0.0).sum(axis=-1)
    # An estimator may give every token its own advantage. That of a completion is the mean of its trained tokens.
    completion_means = sums / np.maximum(mask.sum(axis=-1), 1)
    mean = float(np.abs(completion_means.mean(axis=1)).max())
    text = f"{text}, mean of their advantages {mean:.1e} at most"
    if not mean <= CENTERED:
        cause, fix = "a group is not its own baseline", f"mend the estimator {name}"
        findings.append(alarm("S4", "advantages_not_centered", text, cause, fix))
    return CheckReport(text, tuple(findings))


def reward_sees(trial: Trial) -> CheckReport:
    """S5: functions judge what a policy may say, and a good answer earns more than an empty completion."""
    reward, rows = trial.parts.recipe_summary.reward, trial.parts.dataset.rows[:ROWS]
    if not any(reward.weights) or not trial.parts.recipe_summary.credit.estimator.needs_reward:
        return skipped("no reward is used")
    if not reward.timeout and not trial.full:  # a call more may change the state of a function
        return skipped("reward.timeout = 0: the functions run in this process; doctor --selftest calls them")
    columns = [name for name in ANSWERS if all(isinstance(row.get(name), str | int | float) for row in rows)]
    answers = [[str(row[name]) for name in columns] for row in rows]
    # Also what is after "####", as in GSM8K.
    answers = [[*texts, *(text.split("####")[-1].strip() for text in texts)] for texts in answers]
    texts = [
        ["", *(form.format(answer) for answer in each for form in _forms(row))]
        for row, each in zip(rows, answers, strict=True)
    ]
    try:
        earned = _earned(trial, rows, texts)
    except UserError as error:
        fix = "make it judge any text, since a policy may say nothing"
        return CheckReport("an error", (alarm("S5", "reward_fails", str(error), "it was asked", fix),))
    if np.isnan(earned).all():
        evidence = f"no function has a verdict on {earned.size} completions"
        cause = f"{', '.join(map(str, reward.functions))}: a judge does not answer, or the rows lack what it reads"
        fix = "start the judge, or mend the data"
        return CheckReport(evidence, (alarm("S5", "no_verdict", evidence, cause, fix),))
    if not columns:
        return CheckReport(
            f"the functions judge; the data has no column {', '.join(ANSWERS[:-1])} or {ANSWERS[-1]} to compare"
        )
    earned = np.nan_to_num(earned)
    empty, best = earned[:, 0], earned[:, 1:].max(axis=1)
    text = f"good answers earn up to {best.max():g}, empty completions {empty.min():g}"
    if np.any(best > empty):
        return CheckReport(text)
    evidence = "no form of the row's answer earns more than an empty completion"
    cause = f"the reward is blind, or wants a form that the self-test does not try ({text}; {', '.join(columns)})"
    fix = "judge a good answer by hand with your reward function"
    return CheckReport(text, (alarm("S5", "reward_blind", evidence, cause, fix, severity="warning"),))


def _forms(row: dict[str, Any]) -> list[str]:
    """Returns the forms of an answer without the thought that the row's prompt already opens, or opens and closes."""
    prompt = row["prompt"]
    continued = prompt[-1]["content"] if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant" else ""
    begun = row.get(PREFILL) or str(continued)
    opening = THOUGHT if "</think>" in begun else "<think>" if "<think>" in begun else ""
    return [form.removeprefix(opening) for form in FORMS]


def _earned(trial: Trial, rows: list[dict[str, Any]], texts: list[list[str]]) -> np.ndarray:
    """Returns what completions of rows earn, NaN without a verdict. Raises: UserError, as the functions do."""
    ids = [[trial.parts.tokenizer(x, add_special_tokens=False)["input_ids"] for x in group] for group in texts]
    columns = {}
    if trial.parts.environments:  # as of an episode of one turn, in which the environment measured 0
        columns["turns"] = [[[{"role": "assistant", "content": text}] for text in group] for group in texts]
        columns["episode"] = [[defaultdict(float) for _ in group] for group in texts]
        columns["loss_mask"] = [[[True] * len(tokens) for tokens in group] for group in ids]
    with closing(trial.parts.open_reward_fn()) as reward_fn:
        return reward_fn(rows, texts, ids, columns).rewards.total


def stop_is_learned(trial: Trial) -> CheckReport:
    """S6: prompts end where the answer begins; a completion can stop, and learns its stop token."""
    rollouts, stops, limit = trial.rollouts, trial.parts.stop_ids, trial.parts.learning.sizes.max_completion_tokens
    findings = list(_generation_prompt(trial))
    if not any(0 <= stop < trial.parts.model.cfg.vocab_size for stop in stops):
        fix = "add eos_token_id to the model's generation_config.json"
        evidence = f"stop tokens {list(stops)}, none in the vocabulary"
        findings.append(alarm("S6", "no_stop_token", evidence, "no completion can end", fix, failures="F14"))
    # The last token of a completion; 0 where the engine returns an empty one.
    last = np.maximum(rollouts.completion_mask.sum(axis=-1, keepdims=True) - 1, 0)
    at_end = lambda x: np.take_along_axis(x, last, axis=-1)[..., 0]  # noqa: E731
    learned = np.isin(at_end(rollouts.completions), stops) & at_end(rollouts.loss_mask)
    ended, count = ~rollouts.truncated, rollouts.truncated.size
    text = f"{ended.sum()} of {count} completions stopped, all by a token that is trained"
    if lost := int((ended & ~learned).sum()):
        text = f"{lost} of {ended.sum()} completions that stopped do not end with a trained stop token"
        cause, fix = "stopping is never learned", "let the engine keep the stop token in the completion and its mask"
        findings.append(alarm("S6", "stop_not_trained", text, cause, fix, failures="F14"))
    elif not ended.any() and count >= MEANT and limit <= TOKENS:
        text = f"none of {count} completions stopped within {limit} tokens"
        fix = "raise rollout.max_completion_tokens, or use a model that knows its stop token"
        findings.append(
            alarm("S6", "nothing_stops", text, "the limit cuts all of them", fix, failures="F14", severity="warning")
        )
    return CheckReport(text, tuple(findings))


def gradient_stays(trial: Trial) -> CheckReport:
    """S7: the gradient is the same for all prompts at once, and for one packed row of a prompt at a time."""
    if not trial.full:
        return skipped(MORE)
    microbatch = sharding.prompt_shards(trial.parts.learning.mesh)  # one prompt of each device
    bound = (
        GRADIENT
        if trial.parts.recipe_summary.dtype == trial.parts.recipe_summary.gradient_dtype == "float32"
        else GRADIENT_ROUNDED
    )
    findings, distances = [], []
    for name in trial.parts.learning.learners:
        whole, _ = trial.gradient(name, 0)
        distances_by_layout = {"packed rows": _distance(trial.gradient(name, microbatch, packed=True)[0], whole)}
        # Packing and micro-batches together failed. A program without packing says which of the two it is.
        if not distances_by_layout["packed rows"] <= bound:
            distances_by_layout["one prompt at a time"] = _distance(trial.gradient(name, microbatch)[0], whole)
        distances.append(f"{name} {max(distances_by_layout.values()):.1e}")
        for how in [how for how, x in distances_by_layout.items() if not x <= bound]:
            evidence = f"with {how}, the gradient of the {name} differs by {distances_by_layout[how]:.1e} of its norm"
            cause, fix = "the loss depends on more than the tokens it gets", "sum over the tokens of a loss alone"
            findings.append(alarm("S7", "microbatch_changes_gradient", evidence, cause, fix, failures="F25, F29"))
    return CheckReport(
        f"packed rows and micro-batches change the gradient by {', '.join(distances)} of its norm", tuple(findings)
    )


def environment_is_masked(trial: Trial) -> CheckReport:
    """S8: what an environment says is read, but not trained on."""
    if not trial.parts.environments:
        return skipped("the run has no environment")
    if not trial.full:
        return skipped(MORE)
    rollouts, dialogs = trial.episodes()
    if down := _tool_down(trial, rollouts):
        return CheckReport(down.evidence, (down,))
    arrays = rollouts.completions, rollouts.completion_mask, rollouts.loss_mask
    flat = [x.reshape(-1, x.shape[-1]) for x in arrays]
    counts = [_observed(*episode) for episode in zip(*flat, dialogs, strict=True)]
    tokens, trained, changed = np.sum(counts, axis=0).tolist()
    text = f"the environment said {tokens} of {rollouts.completion_mask.sum()} tokens in {len(dialogs)} episodes"
    if not tokens:
        cause = "the policy ends each episode in its first turn, or the environment says nothing"
        fix = "look at completions.jsonl; start from a model that knows the protocol"
        return CheckReport(
            text, (alarm("S8", "environment_silent", text, cause, fix, failures="F22", severity="warning"),)
        )
    if changed:
        evidence = f"{changed} of {tokens} tokens that the environment said are others in the completion"
        cause, fix = "text is encoded again between turns", "append the ids that the environment returns"
        return CheckReport(text, (alarm("S8", "observation_changed", evidence, cause, fix, failures="F21"),))
    if trained:
        evidence = f"{trained} of {tokens} tokens that the environment said are in the loss mask"
        cause, fix = "the policy learns to say what it only reads", "append an observation with loss_mask False"
        return CheckReport(text, (alarm("S8", "environment_trained", evidence, cause, fix, failures="F20"),))
    return CheckReport(f"{text}, and none of them is trained")


def _observed(completion: np.ndarray, real: np.ndarray, trained: np.ndarray, dialog: Dialog) -> np.ndarray:
    """Counts what an environment said in a completion [C], by the ids that went to and from it.

    Returns the numbers of its tokens, of those in the loss mask, and of those that are others in the completion: [3].
    """
    at, length, counts = 0, int(real.sum()), np.zeros(3, int)
    for turn, observation in dialog:
        at += len(turn)
        if observation is None or length <= at:  # the episode ended there, or had no room for an answer
            break
        span = slice(at, at := at + len(observation))
        counts += len(observation), trained[span].sum(), (completion[span] != observation).sum()
    return counts


def _tool_down(trial: Trial, rollouts: Rollouts) -> Finding | None:
    """Finds a tool that fails in all calls of these episodes."""
    measured = {f"episode/{name}": float(x.mean()) for name, x in rollouts.episodes.items()}
    finding, environment = tool_down(History([{"step": 1} | measured])), trial.parts.recipe_summary.env
    if finding and environment and "url" in environment.arguments:
        finding = replace(finding, cause=f"{finding.cause} (config.env.url = {environment.arguments['url']!r})")
    return finding and replace(finding, id=tool_down.__name__)


def samples_differ(trial: Trial) -> CheckReport:
    """S9: completions of a prompt differ, in their group and between two keys."""
    rollouts = trial.rollouts
    tokens, logprobs = (np.where(rollouts.completion_mask, x, 0) for x in (rollouts.completions, rollouts.logprobs))
    first, mask = slice(0, AGAIN), trial.again.completion_mask
    again, others = np.where(mask, trial.again.completions, 0)[..., first], tokens.shape[1] - 1
    # Another completion of a group repeats the first one by chance with the first one's probability.
    equal = {"members of a group": (tokens == tokens[:, :1]).all() and others * logprobs[:, 0].sum()}
    equal["keys"] = np.array_equal(tokens[..., first], again) and logprobs[..., first].sum()
    findings = []
    for what in [what for what, chance in equal.items() if chance < np.log(CHANCE)]:  # False, if they differ, is 0
        evidence = f"all completions are the same for different {what}"
        cause, fix = f"the engine uses one key (by chance: e^{equal[what]:.0f})", "draw with the key and the member"
        findings.append(alarm("S9", "samples_repeat", evidence, cause, fix))
    distinct = np.mean([len(np.unique(group, axis=0)) for group in tokens])
    moved = (tokens[..., first] != again).any(axis=-1).mean()
    text = f"{distinct:.1f} of {tokens.shape[1]} completions of a group are distinct, another key changes {moved:.0%}"
    return CheckReport(text, tuple(findings))


def push_arrives(trial: Trial) -> CheckReport:
    """S10: after a push the engine samples with the new weights."""
    if not trial.full:
        return skipped(MORE)
    if trial.engine.max_gap is not None:
        return _weight_check(trial)
    moved = jax.tree.map(_moved, trial.params)
    trial.engine.update_weights(moved)
    sampled = trial.sample(KEY, AGAIN)
    # The run goes on with its own weights, whatever this check finds.
    trial.engine.update_weights(trial.params)
    # The tokens were sampled with the pushed weights, so their log-probabilities must be those of the new weights.
    new, old = (_gap(trial, params, sampled) for params in (moved, trial.params))
    text = f"after a push, log-probabilities differ from the new weights by {new:.1e}, from the old by {old:.1e}"
    if new < old and (new <= GAP or not trial.exact):
        return CheckReport(text)
    cause, fix = "the engine does not sample with the weights that it got", "mend its update_weights"
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


def _moved(weights: Array) -> Array:
    """Returns other weights: a factor of these, or small numbers if all are 0."""
    # A base in int8 has numbers that mean something only with their scales, which are moved.
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        return weights
    # NumPy's array is the same in all processes, so it may meet one that is spread over them.
    small = FROM_ZERO * np.sin(np.arange(1, 1 + np.prod(weights.shape[-1:], dtype=int)))
    return jnp.where(jnp.any(weights != 0), weights * MOVED, small.astype(weights.dtype).reshape(weights.shape[-1:]))


def _host(x: Array) -> np.ndarray:
    """Returns an array [B, ...] of the devices on the host, with the rows of all processes."""
    return sharding.whole_to_host(x)


def _first_metrics(trial: Trial) -> dict[str, Array] | None:
    """Returns the metrics of the first update; None: the run has no program for the log-probabilities alone."""
    if trial.full:
        return trial.gradient("policy", 0)[1]
    if trial.policy is None:
        return None
    loss_fn = trial.parts.recipe_summary.loss

    @jax.jit
    def metrics(logprobs: Array, batch: Batch) -> dict[str, Array]:
        mask = batch.loss_mask
        mean = lambda x: jnp.sum(jnp.where(mask, x, 0.0)) / jnp.sum(mask)  # noqa: E731
        return {name: mean(x) for name, x in loss_fn(logprobs, batch, **batch.columns)[1].items()}

    return metrics(trial.policy, replace(trial.batch, packed_index=None))


def _generation_prompt(trial: Trial) -> Iterator[Finding]:
    """Compares the end of the first prompt with what the chat template puts before an answer."""
    prompt, tokenizer = trial.parts.dataset.rows[0]["prompt"], trial.parts.tokenizer
    if isinstance(prompt, str) or prompt[-1]["role"] == "assistant":  # no template, or an answer that goes on
        return
    args = trial.parts.recipe_summary.template_args | formats.template_args(trial.parts.dataset.rows[0])
    render = partial(tokenizer.apply_chat_template, prompt, tokenize=False, **args)
    closed, opened = (render(add_generation_prompt=add) for add in (False, True))
    expected = opened.removeprefix(closed) if opened.startswith(closed) else ""
    decoded = tokenizer.decode(trial.parts.dataset.ids[0], skip_special_tokens=False)
    if not "".join(decoded.split()).endswith("".join(expected.split())):
        evidence = f"the prompt ends with {decoded[-40:]!r}, not with {expected!r} of the chat template"
        cause, fix = "the model is not asked to answer", "mend data.convert or the chat template"
        yield alarm("S6", "no_generation_prompt", evidence, cause, fix)


def _distance(gradient: Any, other: Any) -> float:
    """Returns |gradient - other| / |other|."""
    norm = optax.global_norm(other)
    return float(optax.global_norm(jax.tree.map(jnp.subtract, gradient, other)) / jnp.maximum(norm, 1e-30))


def _gap(trial: Trial, params: Any, sampled: Any) -> float:
    """Returns the largest difference of sampled log-probabilities to those of the trainer with these parameters."""
    assert trial.logprobs  # a full trial has it
    ours = _host(trial.logprobs(params, trial_batch(trial.parts, trial.prompts, sampled, full=trial.full)))
    mask, theirs = sharding.gather((sampled.loss_mask, sampled.logprobs), trial.parts.learning.mesh)
    return float(np.abs(np.where(mask, ours - theirs, 0.0)).max())


def _weight_check(trial: Trial) -> CheckReport:
    """Asks the check that a run with such an engine makes after each push."""
    try:
        gap = trial.parts.actor.lease.reclaim()[1]["weight_check/gap"]
    except UserError as error:
        cause, fix = "the engine does not have the pushed weights", "start the server again"
        return CheckReport("", (alarm("S10", "push_has_no_effect", str(error), cause, fix, failures="F23"),))
    return CheckReport(
        f"weight check: log-probabilities differ by {gap:.1e} at most, the bound is {trial.engine.max_gap:g}"
    )
