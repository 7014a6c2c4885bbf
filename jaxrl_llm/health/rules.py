"""Health rules: pure functions that find a problem in a run's records, with its cause and remedy.

A rule gets the `History` of a run and returns a finding or None. Its keyword arguments are fields of `config.health`.
docs/health.md lists the rules. If it gives no source for a bound, the bound was calibrated on the runs named there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.config.names import keywords
from jaxrl_llm.config.schema import Count, MayChange
from jaxrl_llm.health.finding import FEW, RECENT, WINDOW, Finding, History, Needs, Record, channels, mean

# Bounds, which `bands` draws too. "Start" is the mean of the first steps, a spread the deviation of their rewards.
MEAN_WEIGHT, SAMPLE_SIZE = (0.5, 2.0), 0.3  # of importance weights, and the least effective sample size, as a share
IMPORTANCE_KL = 1e-3
NO_SIGNAL = 0.8  # share of groups
NEVER_STOPS = 0.9  # share of completions
FIRST_CLIPPED = 0.01  # share of tokens
ENTROPY = (0.1, 3.0)  # times the start
GRADIENT = (2.5, 5.0)  # times the start, if more tokens are clipped too; and alone
SPIKE = 10.0  # times the mean of the steps before
CLIPPED = (2.0, 0.02)  # times the start, or this share
TRUNCATED = (1.5, 0.05)  # times the start, or this share
REPEATED = (2.0, 0.2)  # times the start, or this share
LENGTH = 0.25  # times the start
REWARD_FALL = 0.5  # spreads
KL_PAYS = 0.1  # spreads
ONE_TURN = 1.02  # turns of an episode
TOOL_ERRORS = 0.05  # of turns
DOWN = 0.1  # calls of a tool in an episode, at least, so that all of a few are no accident
EXPLAINED = -0.05  # a critic that says the same for all has 0, to rounding: so it is where nearly all earn the same


def findings(history: History, bounds: Mapping[str, Any]) -> list[Finding]:
    """Applies all rules; bounds: the `health` section of a config."""
    if not history.records:
        return []
    found = [rule(history, **{name: bounds[name] for name in keywords(rule)}) for rule in RULES]
    return [finding for finding in found if finding]


def blind(records: Sequence[Record]) -> dict[str, str]:
    """Returns {rule: what the records lack} for the rules that can judge none of them."""
    lacking = {rule.__name__: needs.lacks(records) for rule, needs in RULES.items()}
    return {name: lacks for name, lacks in lacking.items() if lacks}


def sampler_mismatch(history: History) -> Finding | None:
    """F7: sampler and trainer compute different distributions, too different for the correction."""
    if _trains_nothing(history):
        return None
    r = {name: x for name, x in history.latest[-1].items() if x is not None}
    if not {"importance/kl", "importance/mean", "importance/ess", "rollout/lag_p95"} <= r.keys():
        return None
    kl, weight, ess, stale = r["importance/kl"], r["importance/mean"], r["importance/ess"], r["rollout/lag_p95"] > 0
    signs = (
        [f"KL(sampler || trainer) {kl:.1e}"] if kl > IMPORTANCE_KL and not stale else []
    )  # older weights must differ
    low, high = MEAN_WEIGHT
    signs += [f"mean weight {weight:.2f}"] if not low <= weight <= high else []
    signs += [f"effective sample size {ess:.0%}"] if ess < SAMPLE_SIZE else []
    if not signs:
        return None
    return Finding(
        "sampler_mismatch",
        "error" if kl > 10 * IMPORTANCE_KL or not low <= weight <= high or ess < SAMPLE_SIZE else "warning",
        ", ".join(signs),
        "the weights that sampled are too old" if stale else "the engine does not compute what the trainer computes",
        "lower rollout.max_lag or optim.learning_rate"
        if stale
        else "set importance.action = 'truncate', and model.dtype to the server's",
        "arXiv 2505.24298, 2510.18855",
    )


def stale_weights(history: History) -> Finding | None:
    """F23: after a push, the servers still answer with the previous weights."""
    both = "weight_check/gap", "weight_check/gap_before"
    last = [r for r in history.latest if all(r.get(name) is not None for name in both)][-3:]
    if len(last) < 3 or not all(r["weight_check/gap"] >= r["weight_check/gap_before"] > 0 for r in last):
        return None
    if max(r["weight_check/gap"] for r in last) < 1e-5:  # the weights hardly change
        return None
    r = last[-1]
    return Finding(
        "stale_weights",
        "error",
        f"gap {r['weight_check/gap']:.1e} after a push, {r['weight_check/gap_before']:.1e} to the weights before",
        "pushed weights did not arrive",
        "start the servers again and resume",
        "TRL #5312",
    )


def engine_drift(history: History) -> Finding | None:
    """F24: the mismatch grows although the weights do not change."""
    still = [r for r in history.latest if not r.get("update_norm") and r.get("sampler/gap_mean") is not None]
    if len(still) < 8 or len(still) < len(history.latest):
        return None
    first, last = (sum(r["sampler/gap_mean"] for r in part) / 4 for part in (still[:4], still[-4:]))
    if last <= 3 * first or last < 1e-5:
        return None
    return Finding(
        "engine_drift",
        "error",
        f"mean gap {first:.1e} to {last:.1e} with weights that did not change",
        "the engine drifts",
        "start the server again and resume",
        "measured here",
    )


def stale_samples(history: History) -> Finding | None:
    """F30: samples are too old for the correction."""
    r = history.latest[-1]
    lag, weight = r.get("rollout/lag_p95") or 0, r.get("importance/mean") or 1.0
    if not lag or abs(weight - 1) <= 0.1:
        return None
    return Finding(
        "stale_samples",
        "warning",
        f"95 % of the tokens are at most {lag:g} steps old, their mean weight is {weight:.2f}",
        "rollouts are too far off-policy",
        "lower rollout.max_lag",
        "arXiv 2505.24298",
    )


def _trains_nothing(history: History) -> bool:
    """Returns whether no completion of the step has a verdict: means over trained tokens then mean nothing."""
    return history.latest[-1].get("reward/no_verdict") == 1


def no_verdict(history: History) -> Finding | None:
    """F35: no completion of the step has a verdict, so that nothing is trained."""
    if not _trains_nothing(history):
        return None
    return Finding(
        "no_verdict",
        "error",
        "no completion of the step has a verdict, and nothing is trained",
        "every reward function with a weight abstains: a judge does not answer, or the rows lack what it reads",
        "start the judge again, look at the metrics of the reward functions, or mend the data",
        "docs/failures.md F35",
    )


def updates_skipped(history: History, *, max_skipped: MayChange[Count]) -> Finding | None:
    """F27: many updates in a row are skipped, and the model does not change."""
    r = history.latest[-1]
    counts = [int(x) for name, x in r.items() if name.endswith("updates/skipped_in_a_row") and x is not None]
    if not max_skipped or max(counts, default=0) < max_skipped:
        return None
    names = [name for name in sorted(r) if r[name] is None and not name.endswith(("_min", "_max"))]
    refused = [name.removeprefix("skip/") for name in sorted(r) if name.startswith("skip/") and r[name]]
    cause = "no token in them is trained"
    fix = "other limits: config.mask and rollout.max_completion_tokens decide which tokens are trained"
    if _trains_nothing(history):
        cause, fix = "no completion has a verdict", "a judge that answers"
    elif names:
        cause = f"their gradients are not finite ({', '.join(names[:5])})"
        fix = "a lower optim.learning_rate or with model.dtype = 'float32'"
    elif refused:
        cause, fix = (
            f"config.health.skip has {refused[0]!r}",
            "a lower optim.learning_rate, or without this in health.skip",
        )
    return Finding(
        "updates_skipped",
        "error",
        f"{max(counts)} updates in a row were skipped, and the model stands still",
        cause,
        f"begin a new run with {fix}, or raise config.health.max_skipped (0: never stop)",
        "docs/failures.md F27",
    )


def phantom_clipping(history: History) -> Finding | None:
    """F8: the first update on a rollout clips tokens, although the policy has not moved since it sampled them."""
    clipped, lag = history.now("clip/first"), history.now("rollout/lag_p95")
    if clipped is None or lag or clipped <= FIRST_CLIPPED:
        return None
    return Finding(
        "phantom_clipping",
        "error",
        f"{clipped:.1%} of the tokens are clipped in the first optimizer step on a rollout",
        "old log-probabilities are rounded in another way than those of the update, so these tokens teach nothing",
        "let the trainer compute them: set model.dtype to the engine's, or the engine's to float32",
        "docs/failures.md F8",
    )


def no_signal(history: History) -> Finding | None:
    """F10: in most groups all completions earn the same, so their advantages are 0."""
    if _trains_nothing(history):
        return None
    share = history.now("groups/no_signal")
    # Before the start is over, a task that is solved at once looks like one without a signal.
    least = NO_SIGNAL if history.then("groups/no_signal") is not None else 0.99
    if share is None or share <= least or _solved(history):
        return None
    return Finding(
        "no_signal",
        "error" if share > 0.99 else "warning",
        f"in {share:.0%} of the groups all completions have the same reward",
        "the problems are too hard or too easy, or the reward cannot tell answers apart",
        "set rollout.resample_rounds, raise group_size or rollout.temperature, or look at completions.jsonl",
        "arXiv 2503.14476",
    )


def _solved(history: History) -> bool:
    """Returns whether the rewards have risen and hardly differ any more: nothing is left to learn."""
    before, now = history.then("reward/mean"), history.now("reward/mean")
    spread, left = history.then("reward/std"), history.now("reward/std")
    if before is None or now is None or spread is None or left is None:
        return False
    return now > before and left < 0.7 * spread


def entropy_collapse(history: History) -> Finding | None:
    """F12: the policy has become nearly certain, and has not solved the task."""
    before, now = history.then("entropy"), history.now("entropy")
    if not before or now is None or now >= ENTROPY[0] * before or _solved(history):
        return None
    distinct = history.now("completion/distinct")
    same = "" if distinct is None else f"; {distinct:.0%} of a group's completions differ"
    return Finding(
        "entropy_collapse",
        "warning",
        f"entropy {now:.2g}, {before:.2g} at the start{same}",
        "the policy has settled on one answer, and tries no other",
        "raise loss.clip_high or rollout.temperature, lower optim.learning_rate, or set entropy.target",
        "arXiv 2505.22617",
    )


def entropy_explosion(history: History) -> Finding | None:
    """F13: the policy becomes random."""
    before, now, earlier = history.then("entropy"), history.now("entropy"), _earlier(history, "entropy")
    if not before or now is None or now <= ENTROPY[1] * before or earlier is None or now <= earlier:
        return None
    size, size_before = history.now("completion/compressed"), history.then("completion/compressed")
    noise = f"; the text compresses to {size:.0%}, {size_before:.0%} at the start" if size and size_before else ""
    return Finding(
        "entropy_explosion",
        "error",
        f"entropy {now:.2g}, {before:.2g} at the start, and it rises{noise}",
        "the policy turns to noise",
        "lower entropy.coef, loss.clip_high or optim.learning_rate, and go on from an earlier checkpoint",
        "Search-R1 #162",
    )


def _earlier(history: History, name: str) -> float | None:
    """Returns the mean of the RECENT values before those of `History.now`."""
    return mean(name, history.latest[-2 * RECENT : -RECENT], RECENT)


def reward_collapse(history: History) -> Finding | None:
    """The reward has fallen far below what it was for a while: by half of its deviation at the start."""
    best, spread, now = history.best("reward/mean"), history.then("reward/std"), history.now("reward/mean")
    if now is None or best is None or not spread or best - now <= REWARD_FALL * spread:
        return None
    return Finding(
        "reward_collapse",
        "error",
        f"the mean reward was {best:.3g} for {RECENT} steps, and is {now:.3g}",
        "the policy has been ruined since",
        "go on from an earlier checkpoint with a lower optim.learning_rate or fewer optimizer steps on a rollout",
        "Search-R1 #97",
    )


def gradient_climb(history: History) -> Finding | None:
    """F6: the norm of the gradient climbs, far or together with the share of clipped tokens."""
    before, now = history.then("grad_norm"), history.now("grad_norm")
    clipped, clips = history.then("clip/fraction"), history.now("clip/fraction")
    if before is None or now is None or clipped is None or clips is None or len(history.latest) < WINDOW:
        return None
    together = clips > max(CLIPPED[0] * clipped, CLIPPED[1])
    if now <= GRADIENT[0 if together else 1] * before:
        return None
    return Finding(
        "gradient_climb",
        "warning",
        f"gradient norm {before:.2g} to {now:.2g}, clipped tokens {clipped:.1%} to {clips:.1%}",
        "the policy leaves what was sampled faster and faster",
        "in this order: set importance.action, epochs = 1, a small kl.coef; go on from an earlier checkpoint",
        "TRL #2980",
    )


def gradient_spike(history: History) -> Finding | None:
    """F6: the gradient of a step is far larger than those before it."""
    before = [r["grad_norm"] for r in history.latest[:-1] if r.get("grad_norm")]
    now, most = history.latest[-1].get("grad_norm"), max(before, default=0.0)
    if not now or len(before) < RECENT or now <= SPIKE * sum(before) / len(before) or now <= 3 * most:
        return None
    return Finding(
        "gradient_spike",
        "warning",
        f"gradient norm {now:.2g}, {most:.2g} at most in the {len(before)} steps before",
        "this batch differs from all others, or the policy has just been damaged",
        "look at its completions and rewards; optim.clip_norm limits it, health.skip = ('gradient_spike',) skips it",
        "TRL #2980",
    )


def good_fades(history: History) -> Finding | None:
    """F19: completions with a positive advantage become less likely, and the reward is past its best."""
    # The median: in a healthy run, the good completions of a batch may be a new kind that is still unlikely.
    best, now = history.best("logprobs/good"), history.typical("logprobs/good")
    if best is None or now is None or now >= min(2 * best, best - 0.05):
        return None
    # While the reward rises, it may be only the hard problems that are left: with remax they alone have an advantage.
    earned, earns, spread = history.best("reward/mean"), history.now("reward/mean"), history.then("reward/std")
    if earned is None or earns is None or spread is None or earned - earns <= 0.1 * spread:
        return None
    return Finding(
        "good_fades",
        "warning",
        f"log-probability of a token in good completions {now:.2g}, {best:.2g} at best",
        "negative gradients of bad completions act on the tokens that they share with good ones",
        "lower optim.learning_rate, or have fewer optimizer steps on a rollout",
        "arXiv 2512.04220",
    )


def repeats(history: History) -> Finding | None:
    """F18: completions repeat themselves."""
    before, now = history.then("completion/repeated"), history.now("completion/repeated")
    if before is None or now is None or now <= max(REPEATED[0] * before, REPEATED[1]):
        return None
    return Finding(
        "repeats",
        "warning",
        f"{now:.0%} of the tokens of a completion continue what it has said before, {before:.0%} at the start",
        "the text degenerates, and the reward does not see it",
        "look at completions.jsonl, and let the reward see the text: a penalty for repetition",
        "docs/failures.md F18",
    )


def kl_alone(history: History) -> Finding | None:
    """F11: most of the KL penalty is on completions without an advantage."""
    alone, whole, coef = history.now("loss/kl_alone"), history.now("loss/kl"), history.now("kl/coef")
    reward, before, spread = history.now("reward/mean"), history.then("reward/mean"), history.then("reward/std")
    if alone is None or not whole or not coef or reward is None or before is None or spread is None:
        return None
    if alone <= 0.8 * whole or _solved(history) or reward > before + 0.1 * spread:
        return None
    return Finding(
        "kl_alone",
        "warning",
        f"{alone / whole:.0%} of the KL penalty is on completions without an advantage, and the reward does not rise",
        "the penalty draws the policy back where no reward draws it on",
        "set rollout.resample_rounds, or lower kl.coef",
        "docs/failures.md F11",
    )


def kl_pays(history: History) -> Finding | None:
    """F5: the KL term in the reward earns more, while the task earns less."""
    kl, kl_now = history.then("reward/kl"), history.now("reward/kl")
    task, task_now, spread = history.then("reward/mean"), history.now("reward/mean"), history.then("reward/std")
    if kl is None or kl_now is None or task is None or task_now is None or not spread:
        return None
    if kl_now <= max(kl, 0.0) + KL_PAYS * spread or task_now >= task - KL_PAYS * spread:
        return None
    return Finding(
        "kl_pays",
        "warning",
        f"the KL term {kl:.2g} to {kl_now:.2g}, the task {task:.2g} to {task_now:.2g}",
        "k1 in the reward is signed: unlikely tokens earn",
        "set kl.placement = 'loss' with k3, or another kl.estimator",
        "docs/failures.md F5",
    )


def truncated(history: History) -> Finding | None:
    """F15: completions reach the limit and the reward falls."""
    cut, at_first = history.now("completion/truncated"), history.then("completion/truncated")
    reward, before, spread = history.now("reward/mean"), history.then("reward/mean"), history.then("reward/std")
    if cut is None or at_first is None or reward is None or before is None or not spread:
        return None
    if cut <= max(TRUNCATED[0] * at_first, TRUNCATED[1]) or reward >= before - 0.1 * spread:
        return None
    rewards = f"reward {before:.2g} to {reward:.2g}"
    return Finding(
        "truncated",
        "warning",
        f"{cut:.0%} of the completions reach the limit, {at_first:.0%} at the start; {rewards}",
        "what the limit cuts is judged as wrong, or the loss favors long completions",
        "raise rollout.max_completion_tokens, or set reward.overlong_tokens, mask.truncated or token_mean",
        "arXiv 2503.14476",
    )


def never_stops(history: History) -> Finding | None:
    """F14: no completion ends by itself."""
    cut = history.now("completion/truncated")
    if cut is None or cut < NEVER_STOPS:  # not 1: TRL takes a last token that is padding for an end
        return None
    return Finding(
        "never_stops",
        "error",
        f"{cut:.0%} of the completions reach the limit",
        "the model never ends an answer: its stop token is missing or never trained, or the limit is too low",
        "check the chat template and generation_config.json, or raise rollout.max_completion_tokens",
        "docs/failures.md F14",
    )


def length_collapse(history: History) -> Finding | None:
    """F16: completions have become very short while the reward rises."""
    before, now = history.then("completion/length"), history.now("completion/length")
    reward, earned = history.then("reward/mean"), history.now("reward/mean")
    if not before or now is None or now >= LENGTH * before or reward is None or earned is None or earned < reward:
        return None
    return Finding(
        "length_collapse",
        "warning",
        f"completions have {now:.3g} tokens, {before:.3g} at the start; reward {reward:.2g} to {earned:.2g}",
        "the policy earns by not answering",
        "look at completions.jsonl, and reward only answers",
        "docs/failures.md F16",
    )


def channels_diverge(history: History) -> Finding | None:
    """F17: one reward function earns more and another one less: the reward may be hacked."""
    lost = set[str]()  # which have fallen to less than half
    spread, slopes = history.then("reward/std"), dict[str, float]()
    for name in channels(history.latest[-1]):
        before, now = history.then(name), history.now(name)
        if before is not None and now is not None:
            slopes[name.removeprefix("reward/")] = now - before
            lost |= {name.removeprefix("reward/")} if 0 <= now < before / 2 and before > 0.05 else set()
    if not spread or len(slopes) < 2:
        return None
    up, down = max(slopes, key=lambda name: slopes[name]), min(slopes, key=lambda name: slopes[name])
    down = min(lost, key=lambda name: slopes[name]) if lost else down
    if slopes[up] < 0.3 * spread or (slopes[down] > -0.3 * spread and not lost):
        return None
    return Finding(
        "channels_diverge",
        "warning",
        f"reward {up} rose by {slopes[up]:.2g}, {down} fell by {-slopes[down]:.2g}",
        "the policy earns by one part of the reward at the cost of another",
        "give the first only where the second is earned, or change reward.weights",
        "docs/failures.md F17",
    )


def critic_lags(history: History) -> Finding | None:
    """F32: the critic predicts worse than a constant would."""
    explained = history.typical("critic/explained_variance")
    if explained is None or explained >= EXPLAINED or len(history.latest) < WINDOW:
        return None
    # A batch in which nearly all earn the same has no variance to explain: the value may be -1,000.
    spread, spreads = history.then("reward/std"), history.now("reward/std")
    if spread is not None and spreads is not None and spreads < 0.3 * spread:
        return None
    return Finding(
        "critic_lags",
        "warning",
        f"explained variance {explained:.2f} over {RECENT} steps",
        "the critic does not follow the policy, so the advantages are noise",
        "raise critic.warmup_steps or critic.optim.learning_rate",
        "docs/failures.md F32",
    )


def tools_unused(history: History) -> Finding | None:
    """F22: the environment answers nothing that the policy uses: each episode ends at its first turn."""
    turns = history.now("episode/turns")
    if turns is None or turns >= ONE_TURN or _solved(history):
        return None
    return Finding(
        "tools_unused",
        "warning",
        f"{turns:.2f} turns in an episode",
        "the policy does not know the tools, or earns as much without them",
        "begin with a model that uses them (jaxrl sft), describe them in the prompt, or look at the reward",
        "docs/failures.md F22",
    )


def tool_down(history: History) -> Finding | None:
    """F36: every call of a tool fails, from the first step on."""
    last = [r for r in history.latest if r.get("episode/errors") is not None and r.get("episode/turns")][-3:]
    if not last or any(r["episode/errors"] < max(_asked(r), DOWN) for r in last):
        return None
    return Finding(
        "tool_down",
        "error",
        f"all calls fail, {last[-1]['episode/errors']:.2g} in an episode",
        "the tool or its server does not answer",
        "start it again, or mend its address in config.env; look at completions.jsonl for its error",
        "docs/failures.md F36",
    )


def _asked(record: Record) -> float:
    """Returns how often an episode asks its tools, if the environment counts that; else its turns."""
    count = lambda name: record.get(f"episode/{name}") or 0.0  # noqa: E731
    calls = count("calls") and count("calls") - count("invalid")  # an invalid call asks nobody
    return calls + count("searches") + count("programs") or record["episode/turns"]


def tool_errors(history: History) -> Finding | None:
    """F22: the environment often fails."""
    errors, turns = history.now("episode/errors"), history.now("episode/turns")
    if errors is None or not turns or errors <= TOOL_ERRORS * turns:
        return None
    return Finding(
        "tool_errors",
        "warning",
        f"{errors / turns:.0%} of the turns end in an error of the environment",
        "a tool fails, is too slow, or does not understand what the policy writes",
        "look at completions.jsonl and at the tool's own log; raise env.timeout, env.retries or turns.timeout",
        "docs/failures.md F22",
    )


AFTER_START = FEW + RECENT + 1  # records from which on `History.then` has a value
# What a rule reads, besides numbers that only its evidence has. Without it the doctor says that it could not look.
RULES: dict[Callable[..., Finding | None], Needs] = {
    sampler_mismatch: Needs(("importance/kl", "importance/mean", "importance/ess", "rollout/lag_p95")),
    stale_weights: Needs(("weight_check/gap", "weight_check/gap_before"), 3),
    engine_drift: Needs(("sampler/gap_mean",), 8),
    stale_samples: Needs(("rollout/lag_p95", "importance/mean")),
    no_verdict: Needs(("reward/no_verdict",)),
    updates_skipped: Needs(("updates/skipped_in_a_row",)),
    phantom_clipping: Needs(("clip/first",), RECENT),
    no_signal: Needs(("groups/no_signal",), RECENT),
    entropy_collapse: Needs(("entropy",), AFTER_START),
    entropy_explosion: Needs(("entropy",), 2 * RECENT),
    reward_collapse: Needs(("reward/mean", "reward/std"), AFTER_START),
    gradient_climb: Needs(("grad_norm", "clip/fraction"), WINDOW),
    gradient_spike: Needs(("grad_norm",), RECENT + 1),
    good_fades: Needs(("reward/mean", "reward/std", "logprobs/good"), AFTER_START),
    repeats: Needs(("completion/repeated",), AFTER_START),
    kl_alone: Needs(("reward/mean", "reward/std", "loss/kl_alone", "loss/kl", "kl/coef"), AFTER_START),
    kl_pays: Needs(("reward/mean", "reward/std", "reward/kl"), AFTER_START),
    truncated: Needs(("reward/mean", "reward/std", "completion/truncated"), AFTER_START),
    never_stops: Needs(("completion/truncated",), RECENT),
    length_collapse: Needs(("reward/mean", "completion/length"), AFTER_START),
    channels_diverge: Needs(("reward/std",), AFTER_START, functions=2),
    critic_lags: Needs(("critic/explained_variance",), WINDOW),
    tools_unused: Needs(("episode/turns",), RECENT),
    tool_down: Needs(("episode/errors", "episode/turns")),
    tool_errors: Needs(("episode/errors", "episode/turns"), RECENT),
}
