"""Bounds of the health rules, which `health.bands` also draws into plots."""

from __future__ import annotations

# The word "start" means the mean of a metric over the first steps of a run. A "spread" is the standard
# deviation of the rewards in these steps.
MEAN_WEIGHT, SAMPLE_SIZE = (0.5, 2.0), 0.3  # range of the mean importance weight; least effective sample size, a share
IMPORTANCE_KL = 1e-3  # KL(sampler || trainer) that is always allowed
BFLOAT16 = 2.0**-7  # relative rounding error of bfloat16
ROUNDINGS = 12.0  # number of rounding errors by which log-probabilities may differ
STALE_FACTOR = 3.0  # gap of a weight check, as a multiple of the usual gap
DRIFT_FACTOR = 3.0  # gap between engine and trainer, as a multiple of the gap at the start
WEIGHT_OFF = 0.08  # distance of the mean importance weight from 1, for old samples
NO_SIGNAL = 0.8  # share of groups in which all rewards are equal
NEVER_STOPS = 0.9  # share of completions that the token limit cuts
FIRST_CLIPPED = 0.01  # share of tokens that the first update on a rollout clips
ENTROPY = (0.1, 3.0)  # lower and upper bound of the entropy, as multiples of the start
GRADIENT = (2.5, 5.0)  # gradient norm, as a multiple of the start: if more tokens are clipped too, and otherwise
SPIKE_FACTOR = 10.0  # gradient norm of a step, as a multiple of the mean of the steps before
CLIPPED = (2.0, 0.02)  # share of clipped tokens: multiple of the start, and share that is always allowed
TRUNCATED = (1.5, 0.05)  # share of truncated completions: multiple of the start, and share that is always allowed
REPEATED = (2.0, 0.2)  # share of repeated text: multiple of the start, and share that is always allowed
LENGTH_SHARE = 0.25  # length of completions, as a multiple of the start
ANSWER_TOKENS = 8  # fewest tokens that can be an answer
REWARD_FALL = 0.5  # fall of the mean reward, in spreads
SEQUENCES = 64  # assumed number of rewards in a mean, where their deviation is estimated from the noise of means
ODD_FACTOR = 2.0  # from this multiple of the estimate on, a deviation counts as inflated by a few extreme rewards
# {metric: factor of change that shows that the policy has changed}. Harder problems alone make larger gradients.
POLICY_CHANGES = {"entropy": 1.5, "completion/length": 1.5, "grad_norm": 2.5}
SUDDEN_SHARE = 0.7  # share of a fall between neighbouring means of four steps from which on the fall is sudden
LITTLE_CHANGE = 0.1  # change of the mean reward, in spreads, that counts as no change
KL_ALONE = 0.8  # share of the KL penalty that falls on completions without an advantage
KL_COSTS = 0.02  # KL penalty of a completion, in spreads
KL_PAYS = 0.1  # rise of the KL term in the reward, and fall of the task's reward, in spreads
ONE_TURN = 1.02  # mean turns of an episode
TOOL_ERRORS = 0.05  # share of turns that end with an error of the environment
# Fewest tool calls per episode, so that "all calls fail" is not said of very few calls.
CALLS_WHEN_DOWN = 0.1
# A critic that predicts a constant has the explained variance 0, up to rounding.
EXPLAINED = -0.05
