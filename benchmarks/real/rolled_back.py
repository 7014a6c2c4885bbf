"""A rate that ruins the model, and the rollback that saves the run, of which docs/gallery.md shows the page.

jaxrl train --config benchmarks/real/rolled_back.py --workdir runs/rolled_back
With --config.health.rollback=none it is the collapsed run of that page.
"""

from ml_collections import ConfigDict

from benchmarks.real import plain_addition


def get_config() -> ConfigDict:
    c = plain_addition.get_config()
    c.num_steps, c.eval.every, c.checkpoint.every, c.checkpoint.keep = 40, 5, 5, 8
    # The rate rises for the whole run: at first the model learns.
    c.optim.learning_rate, c.optim.warmup_steps = 5e-4, 39
    c.health.rollback = ConfigDict(
        dict(rules=("never_stops", "reward_collapse"), most=3, learning_rate=0.1, warmup_steps=5)
    )
    c.log.completions_every = 5
    return c
