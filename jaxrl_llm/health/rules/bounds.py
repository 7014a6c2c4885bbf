"""Bounds of the rules, which `health.bands` draws too."""

from __future__ import annotations

# Bounds, which `bands` draws too. "Start" is the mean of the first steps, a spread the deviation of their rewards.
MEAN_WEIGHT, SAMPLE_SIZE = (0.5, 2.0), 0.3  # of importance weights, and the least effective sample size, as a share
IMPORTANCE_KL = 1e-3
BFLOAT16 = 2.0**-7  # its rounding error
ROUNDINGS = 12.0  # rounding errors of the number type, by which log-probabilities may differ
STALE = 3.0  # times the usual gap of a weight check
DRIFT = 3.0  # times the gap of sampler and trainer at the start
WEIGHT_OFF = 0.08  # of the mean weight from 1, for old samples
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
ANSWER = 8  # tokens that may be an answer
REWARD_FALL = 0.5  # spreads
SEQUENCES = 64  # of a step, at most, whose rewards the noise of the mean reward stands for
ODD = 2.0  # times as much, where a few odd rewards make the deviation
# Factors by which these differ where the policy has changed. Harder problems alone make larger gradients.
OF_THE_POLICY = {"entropy": 1.5, "completion/length": 1.5, "grad_norm": 2.5}
WITHIN_A_STEP = 0.7  # part of a fall of the reward between neighbouring means of four steps
LITTLE = 0.1  # spreads by which the reward has not moved
KL_ALONE = 0.8  # of the penalty
KL_COSTS = 0.02  # spreads
KL_PAYS = 0.1  # spreads
ONE_TURN = 1.02  # turns of an episode
TOOL_ERRORS = 0.05  # of turns
# Calls of a tool in an episode, at least, so that all of a few are no accident.
DOWN = 0.1
# A critic that says the same for all has 0, to rounding: so it is where nearly all earn the same.
EXPLAINED = -0.05
