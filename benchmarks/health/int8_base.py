"""What a base in int8 changes in the logits: `python -m benchmarks.health.int8_base WORKDIR`, of a run with it.

On 64 random texts of 24 tokens: the rounded base against the one in the model's folder; the run's last policy against
its folder `hf`; and the same adapters on the base that is not rounded, as PEFT puts them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.machine import meshes
from jaxrl_llm.models import hf
from jaxrl_llm.models.adapters import merge_adapters
from jaxrl_llm.session.saved_run import SavedRun
from jaxrl_llm.structs import Prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workdir", type=Path)
    workdir, mesh = parser.parse_args().workdir, meshes.make_mesh(data=1, fsdp=1, tensor=1)
    run = SavedRun(workdir)
    step = run.find("last")
    with run.model_folder(step) as folder:
        model = hf.load_model(folder, mesh)
        of_run, base = model.adapters(run.adapters), hf.load_params(folder, model, mesh)
        rounded, adapters = hf.load_base(folder, model, mesh, of_run), jax.tree.map(jnp.asarray, run.params(step))
    tokens = np.random.default_rng(0).integers(0, model.cfg.vocab_size, (64, 24))
    mask = np.ones_like(tokens, bool)
    logits = jax.jit(lambda params: model.logits(params, model.prefill(params, Prompt(tokens, mask))[0]))
    given, kept = logits(base), logits(merge_adapters(rounded))
    moved = jnp.abs(jax.nn.log_softmax(given) - jax.nn.log_softmax(kept)).mean()
    print(f"logits of up to {jnp.abs(given).max():.0f}; rounded: {jnp.abs(given - kept).max():.2f} at most,", end=" ")
    print(f"and {moved:.3f} of a log-probability on average")
    policy = logits(of_run.combine(rounded, adapters))
    exported, on_given = logits(hf.load_params(workdir / "hf", model, mesh)), logits(of_run.combine(base, adapters))
    print(
        f"the policy, logits of up to {jnp.abs(policy).max():.0f}: {jnp.abs(policy - exported).max():.1e} from hf,",
        end=" ",
    )
    print(f"{jnp.abs(policy - on_given).max():.2f} from its adapters on the base that is not rounded")


if __name__ == "__main__":
    main()
