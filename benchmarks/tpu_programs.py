"""Compiles the programs of a GRPO run for TPUs that are not there: `python -m benchmarks.tpu_programs 0.5B v5e:2x2`.

It needs an environment with `pip install 'jax[tpu]'`. Nothing runs on a TPU. The compiler refuses what does not fit.
"""

from __future__ import annotations

import argparse
import os

os.environ |= {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1"}
os.environ |= {"TPU_LOG_DIR": "disabled"}

import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh

from jaxrl_llm.algorithms import losses
from jaxrl_llm.algorithms.credit import make_credit
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.build import make_policy
from jaxrl_llm.config import checks
from jaxrl_llm.config import load as configs
from jaxrl_llm.learner.packing import packed_shapes
from jaxrl_llm.learner.scorers import make_scorers
from jaxrl_llm.models.blocks import DecoderConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.programs import of_learning
from jaxrl_llm.rollout.sampler import Sampler
from jaxrl_llm.shapes import MOST, SAMPLING, TRAINING, Book
from jaxrl_llm.sharding import AXES

ROOT = Path(__file__).parent.parent
QWEN = dict(head_dim=128, max_positions=32768, rope_theta=1e6, norm_eps=1e-6, qkv_bias=True, qk_norm=False)
MODELS = {
    "0.5B": QWEN | dict(
        vocab_size=151_936, width=896, layers=24, heads=14, kv_heads=2, head_dim=64, mlp_width=4864, tied_head=True
    ),
    "7B": QWEN | dict(
        vocab_size=152_064, width=3584, layers=28, heads=28, kv_heads=4, mlp_width=18944, tied_head=False
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("topology", help="for example v5e:2x2, v5e:4x4, v6e:2x4, v5p:2x2x1")
    parser.add_argument("--tensor", type=int, default=1, help="devices of the tensor axis (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--completion-tokens", type=int, default=512)
    parser.add_argument("--microbatch", type=int, default=16)
    parser.add_argument("--shapes", type=int, help="shapes of each kind (default: as many as a run may use)")
    args = parser.parse_args()
    topology = topologies.get_topology_desc(platform="tpu", topology_name=args.topology)
    sizes = (1, len(topology.devices) // args.tensor, args.tensor)
    devices = mesh_utils.create_device_mesh(sizes, topology.devices, allow_split_physical_axes=True)
    mesh = Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3)
    total, count = 0.0, 0
    for name, compile in programs(args, mesh):
        began = time.perf_counter()
        compiled = compile()
        seconds = time.perf_counter() - began
        lines = compiled.as_text().count(" = ")
        used = compiled.memory_analysis()
        memory = (used.argument_size_in_bytes + used.temp_size_in_bytes) / 2**30
        total, count = total + seconds, count + 1
        print(f"{seconds:7.1f}s  {lines:7,} instructions  {memory:5.1f} GiB  {name}", flush=True)
    print(f"{total:7.1f}s  {count} programs of {args.model} on {args.topology}")


def programs(args: argparse.Namespace, mesh: Mesh) -> Any:
    """Yields (name, compile): in each kind the largest shape, and then the next smaller ones."""
    config = configs.load(ROOT / "configs" / "grpo.py")
    config.update_from_flattened_dict({
        "prompts_per_step": args.prompts, "prompts_per_update": args.prompts, "group_size": args.group,
        "microbatch": args.microbatch, "model.dtype": "bfloat16", "model.remat": "full", "eval.every": 0,
        "rollout.max_completion_tokens": args.completion_tokens, "checkpoint.keep_best": 0,
    })  # fmt: skip
    model = Decoder(DecoderConfig(**MODELS[args.model], dtype="bfloat16", remat="full"), mesh)
    sampling, aggregate = Sampling(1.0), partial(losses.aggregation_weights, **config.aggregate)
    given: Any = SimpleNamespace(
        config=config, totals=checks.check_train(config), model=model, mesh=mesh, params=model.shapes
    )
    learners = {"policy": make_policy(given, sampling, aggregate, off_policy=False)}
    scorers = make_scorers(config, model, sampling, mesh, (), updates=1, exact=False)
    credit = make_credit(config, mesh, updates=1)
    engine = Sampler(model, mesh, max_completion_tokens=args.completion_tokens, stop_ids=(1,), pad_id=0, book=Book())
    batch = dict(prompts=args.prompts, width=args.prompt_tokens, group=args.group, sampling=sampling)
    of_sampling = list(engine.programs(learners["policy"].shapes.params, **batch))
    yield from of_sampling[: 2 + (args.shapes or MOST[SAMPLING])]  # weights, prompts, and decode loops
    shapes = packed_shapes(args.group, args.completion_tokens)[: args.shapes or MOST[TRAINING]]
    yield from of_learning(config, mesh, scorers, learners, credit, shapes, args.prompt_tokens)


if __name__ == "__main__":
    main()
