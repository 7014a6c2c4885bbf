"""Times `train.rl_step`, a GRPO step: `python benchmarks/speed/ours.py MODEL_DIR --steps 5 --microbatch 2`."""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from benchmarks.speed.workloads import CLIP_NORM, KL_COEF, PAD, TEMPERATURE, Workload, read, reward
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.build import Parts, build
from jaxrl_llm.config import load as configs
from jaxrl_llm.machine.compilation import Compilations, enable_compilation_cache
from jaxrl_llm.models import hf
from jaxrl_llm.rollout.actor import WeightLease
from jaxrl_llm.rollout.grading import GradedCompletions
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.rollout.samples import Samples
from jaxrl_llm.session.session import Session
from jaxrl_llm.structs import PartState, Prompts, PyTree, Rewards
from jaxrl_llm.train import rl_step

ROOT = Path(__file__).parents[2]
SIDE = 2048  # of the matrices whose product measures the ceiling


def ceiling() -> float:
    """GFLOP/s of float32 matrix products of SIDE x SIDE: the best of 10."""
    x = jnp.ones((SIDE, SIDE))
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(x, x))
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        jax.block_until_ready(product(x, x))
        seconds.append(time.perf_counter() - began)
    return 2 * SIDE**3 / min(seconds) / 1e9


class Prescribed:
    """A run's actor, for prompts and lengths as a workload says."""

    def __init__(self, workload: Workload, engine: Sampler):
        self._workload, self._engine, self._step = workload, engine, 0

    def load(self, state: PartState | None) -> None:
        """Nothing is kept."""

    def start(self, states: PyTree, params: PyTree, step: int, attempt: int = 0) -> WeightLease:
        """Begins with these weights."""
        return self.push(states, params, 0)

    def next(self) -> Samples:
        """Samples of the next step."""
        w, ids = self._workload, np.asarray(self._workload.prompt_ids(self._step), np.int32)
        prompts = Prompts(ids, np.ones_like(ids, bool), [{}] * len(ids), np.arange(len(ids), dtype=np.int32))
        lengths, key = np.asarray(w.lengths(self._step)), jax.random.fold_in(jax.random.key(0), self._step)
        sampling = Sampling(TEMPERATURE)
        rollouts = self._engine.sample(prompts, key, group_size=w.group, sampling=sampling, max_tokens=lengths)
        self._engine.release()
        np.testing.assert_array_equal(rollouts.completion_mask.sum(axis=-1), lengths)
        return Samples(prompts, rollouts, lambda: GradedCompletions([], earned(rollouts.completions, lengths), [], {}))

    def push(self, states: PyTree, params: PyTree, step: int) -> WeightLease:
        """The next samples are of these weights. The engine has a copy of its own."""
        self._engine.update_weights(params, step)
        self._step, pushed = step, Future()
        pushed.set_result(None)
        return WeightLease(states, params, pushed, None)

    def state(self, seconds: float | None = None) -> PartState:
        """Nothing is kept."""
        return PartState({})


def earned(completions: np.ndarray, lengths: np.ndarray) -> Rewards:
    """Rewards [B, G] as a channel and as the total."""
    each = [
        [reward(row[:n].tolist()) for row, n in zip(rows, ns, strict=True)]
        for rows, ns in zip(completions, lengths, strict=True)
    ]
    total = np.asarray(each, np.float32)
    return Rewards(total, {"benchmarks.speed.ours.even": total})


def even(completions: list) -> list[float]:
    """Named in the config; `earned` stands in for it, since completions here are no text."""
    return [0.0] * len(completions)


def rows() -> list[dict[str, str]]:
    """Named in the config; `Prescribed` stands in for them."""
    return [{"prompt": "0"}]


def make_config(workload: Workload, folder: Path, remat: str, microbatch: int) -> ConfigDict:
    """configs/grpo.py with the settings that every trainer has here."""
    c = configs.load(ROOT / "configs" / "grpo.py")
    c.update_from_flattened_dict({
        "num_steps": 1000, "prompts_per_step": workload.prompts, "prompts_per_update": workload.prompts,
        "group_size": workload.group, "microbatch": microbatch, "model.path": str(folder), "model.remat": remat,
        "data.source": "benchmarks.speed.ours.rows", "eval": None, "reward.functions": ("benchmarks.speed.ours.even",),
        "reward.weights": (1.0,), "reward.timeout": 0.0, "kl.coef": KL_COEF, "checkpoint.keep_best": 0,
        "rollout.max_completion_tokens": workload.completion_tokens, "rollout.temperature": TEMPERATURE,
        "optim.learning_rate": workload.learning_rate, "optim.warmup_steps": 0, "optim.decay": "constant",
        "optim.clip_norm": CLIP_NORM, "optim.b2": 0.999, "mesh.fsdp": 1, "log.to": (),
        "log.completions_every": 0,
    })  # fmt: skip
    if workload.group == 1:
        c.advantage = ConfigDict(dict(name="reinforce_pp", gamma=1.0, epsilon=1e-8))
    return c


@contextmanager
def one_run(workload: Workload, folder: Path, remat: str, microbatch: int) -> Iterator[tuple[Session, Parts]]:
    """The run of a workload, with a workdir that is gone at the end."""
    config = make_config(workload, folder, remat, microbatch)
    with tempfile.TemporaryDirectory() as workdir, build(config, Path(workdir)) as (session, parts):
        mesh, limit = parts.learning.mesh, workload.completion_tokens
        model = hf.load_model(folder, mesh, remat=remat)
        engine = Sampler(model, mesh, max_completion_tokens=limit, stop_ids=(), pad_id=PAD)
        parts.actor = Prescribed(workload, engine)  # pyright: ignore[reportAttributeAccessIssue]
        yield session, parts


def step_function(session: Session, parts: Parts, compilations: Compilations) -> Callable[[int], dict]:
    """`one_step(step) -> measurements`."""
    lease = session.restore()

    def one_step(step: int) -> dict:
        nonlocal lease
        compiled, began = compilations.seconds, time.perf_counter()
        lease, record = rl_step(session, parts, lease, step + 1)
        jax.block_until_ready((lease.states, record.updates))
        total = time.perf_counter() - began
        measured = record.summary()
        assert np.isfinite(measured["loss/total"])
        assert measured["update_norm"] > 0
        assert measured["sampler/gap_max"] < 1e-4
        assert (measured["kl/ref"] > 1e-9) == (step > 0)
        seconds = {phase: measured[f"time/{phase}"] for phase in ("rollout", "score", "update")}
        return seconds | {
            "total": total, "tokens": record.tokens, "compile": compilations.seconds - compiled,
            "gap": float(measured["sampler/gap_max"]),
        }  # fmt: skip

    return one_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=9, help="after the first (default: %(default)s)")
    parser.add_argument("--microbatch", type=int, default=1, help="prompts at a time")
    parser.add_argument("--remat", choices=("none", "dots", "full"), default="dots")
    args = parser.parse_args()
    enable_compilation_cache()
    compilations = Compilations()
    with one_run(read(args.model), Path(args.model), args.remat, args.microbatch) as run:
        one_step = step_function(*run, compilations)
        first, *steps = [one_step(step) for step in range(args.steps + 1)]
    report = {name: [step[name] for step in steps] for name in first}
    report |= {"name": "jaxrl_llm", "version": {"jax": jax.__version__}, "warmup": first["total"]}
    report |= {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    report |= {"ceiling_gflops": ceiling(), "compilations": str(compilations)}
    report |= {"checks": {"sampler_gap_max": max(report.pop("gap")), "lengths": "as asked"}}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
