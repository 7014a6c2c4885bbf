"""What the chips of a slice send each other in a program, by the TPU compiler: `python -m benchmarks.collectives`.

It compiles the update, the scoring and the critic's update for chips that need not be there, and lists the collectives
of the compiled programs. It needs `pip install 'jax[tpu]'`, and minutes for each program.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from rich.console import Console
from rich.table import Table

from jaxrl_llm import sharding
from jaxrl_llm.algorithms import losses
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.learner import critic, forward, optim, update
from jaxrl_llm.models.blocks import DecoderConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.structs import Batch

QWEN = dict(
    max_positions=4096, rope_theta=1e6, norm_eps=1e-6, qkv_bias=True, qk_norm=False, dtype="bfloat16", remat="full"
)  # fmt: skip
MODELS = {
    "0.5B": DecoderConfig(
        vocab_size=151_936, width=896, layers=24, heads=14, kv_heads=2, head_dim=64, mlp_width=4864, tied_head=True,
        **QWEN,
    ),
    "7B": DecoderConfig(
        vocab_size=152_064, width=3584, layers=28, heads=28, kv_heads=4, head_dim=128, mlp_width=18_944,
        tied_head=False, **QWEN,
    ),
}  # fmt: skip
PROGRAMS = ("update", "score", "critic")


@dataclass(frozen=True)
class Sizes:
    """B prompts, in micro-batches; G completions of each; tokens P and C."""

    prompts: int = 64
    microbatch: int = 8
    group: int = 8
    prompt_tokens: int = 512
    completion_tokens: int = 1024


def lower(program: str, config: DecoderConfig, mesh: Mesh, sizes: Sizes) -> jax.stages.Lowered:
    """Traces one of `PROGRAMS` for a mesh, whose devices need not be there."""
    b, microbatch = sizes.prompts, sizes.microbatch
    batch = _batch(mesh, sizes)
    model = Decoder(replace(config, tied_head=True) if program == "critic" else config, mesh)
    shapes, objective = model.shapes(), update.policy_objective(model, losses.ppo_clip(), Sampling())
    if program == "critic":
        readout = {"kernel": jnp.zeros((config.width, 1)), "bias": jnp.zeros(1)}
        shapes, objective = {"decoder": shapes, "readout": readout}, critic.value_objective(model, clip=0.2)
    adamw = optim.make_optimizer(
        10, learning_rate=1e-6, warmup_steps=0, warmup_ratio=0.0, decay="constant", end=0.0, clip_norm=1.0,
        weight_decay=0.0, b1=0.9, b2=0.95, eps=1e-8,
    )  # fmt: skip
    state, placed = update.abstract_state(shapes, adamw, mesh)
    if program == "score":
        return forward.make_logprob_fn(model, Sampling(), mesh, microbatch).lower(state.params, batch)
    aggregate = partial(losses.aggregation_weights, mode="token_mean")
    step = update.make_update_step(objective, adamw, mesh, placed, microbatch=microbatch, aggregate=aggregate)
    return step.lower(state, batch, jax.ShapeDtypeStruct((b,), jnp.int32))


def _batch(mesh: Mesh, sizes: Sizes) -> Batch:
    place = NamedSharding(mesh, sharding.BATCH)
    prompts = (sizes.prompts, sizes.prompt_tokens)
    completions = (sizes.prompts, sizes.group, sizes.completion_tokens)
    of = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)  # noqa: E731
    names = ("advantages", "values", "returns", "sampler_logprobs", "old_logprobs")
    return Batch(
        of(prompts, "int32"), of(prompts, "bool"), of(completions, "int32"), of(completions, "bool"),
        of(completions, "bool"), **{name: of(completions, "float32") for name in names},
    )  # fmt: skip


KINDS = "all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute|ragged-all-to-all|reduce-scatter"
COLLECTIVE = re.compile(rf"%(\S+) = (.*?) ({KINDS})(-start)?\(")
CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%([\w.-]+)|branch_computations={([^}]*)}")
SIZES = {"pred": 1, "bf16": 2, "f16": 2}  # bytes of a number; the name ends in the bits of all others


@dataclass(frozen=True)
class Collective:
    """A collective of a program. On a ring, a chip sends its `bytes`, less the share that it has."""

    kind: str
    shape: str  # on a chip, and whole: what all-gather returns, and reduce-scatter takes
    bytes: int  # an all-reduce counts twice: it is a reduce-scatter and an all-gather
    loops: tuple[int, ...]  # trip counts of the loops around it, from the outermost

    @property
    def times(self) -> int:
        return math.prod(self.loops)


def collectives(text: str) -> list[Collective]:
    """Lists the collectives between chips in the text of a compiled program (`compiled.as_text()`)."""
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if begin := re.match(r"(ENTRY )?%([\w.-]+) \(.*{$", line):
            lines = computations[begin[2]] = []
            entry = begin[2] if begin[1] else entry
        elif line.startswith("  "):
            lines.append(line)

    def walk(name: str, loops: tuple[int, ...]) -> Iterator[Collective]:
        for line in computations[name]:
            if loop := re.search(r" while\(.*condition=%([\w.-]+), body=%([\w.-]+)", line):
                yield from walk(loop[2], (*loops, trip_count(line, computations[loop[1]], computations[loop[2]])))
            elif found := COLLECTIVE.search(line):
                # The TPU compiler has no reduce-scatter: it fuses an all-reduce and a slice into a computation.
                kind = "reduce-scatter" if name.startswith("all-reduce-scatter") else found[3]
                if one := _collective(kind, found[2], bool(found[4]), line, loops):
                    yield one
            else:
                for one_name, more in CALLED.findall(line):
                    for called in [one_name] if one_name else re.findall(r"[\w.-]+", more):
                        yield from walk(called, loops)

    return list(walk(entry, ()))


def trip_count(line: str, condition: list[str], body: list[str]) -> int:
    """How often the loop in this line runs: as the compiler notes it, or from its condition, counter < bound."""
    if known := re.search(r'known_trip_count":{"n":"(\d+)"', line):
        return int(known[1])
    bound = max((int(n) for x in condition for n in re.findall(r" constant\((\d+)\)", x)), default=1)
    counter = next((int(n) for x in condition for n in re.findall(r" get-tuple-element\(.*\), index=(\d+)", x)), 0)
    root = next(x for x in body if x.startswith("  ROOT "))
    returned = re.findall(r"%([\w.-]+)", root.partition(" tuple(")[2])[counter]
    added = re.search(rf"%{re.escape(returned)} = .* add\(%\S+, %([\w.-]+)\)", "\n".join(body))
    name = re.escape(added[1]) if added else "none"
    step = re.search(rf"%{name} = .* constant\((\d+)\)", "\n".join(body))  # an unrolled loop counts in larger steps
    return -(-bound // (int(step[1]) if step else 1))


def _collective(kind: str, type_: str, started: bool, line: str, loops: tuple[int, ...]) -> Collective | None:
    """The collective in a line, or None if it is in groups of one chip."""
    if (size := _group_size(line)) == 1:
        return None
    arrays = [(f"{dtype}[{shape}]", _bytes(dtype, shape)) for dtype, shape in re.findall(r"\b(\w+)\[([\d,]*)\]", type_)]
    shape, largest = max(arrays, key=lambda x: x[1])
    # What starts a collective returns its operands too.
    total = largest if started else sum(x for _, x in arrays)
    if kind == "reduce-scatter" and " reduce-scatter" in line:
        shape, total = f"{size} x {shape}", total * size
    return Collective(kind, shape, total * (2 if kind == "all-reduce" else 1), loops)


def _group_size(line: str) -> int:
    """Chips that a collective joins; 0 for all, and where it does not say so."""
    if groups := re.search(r"replica_groups=mesh\[([^\]]*)\] {([^}]*)}", line):
        axes = dict(re.findall(r"('\w+')=(\d+)", groups[1]))
        return math.prod(int(axes[axis]) for axis in re.findall(r"'\w+'", groups[2]))
    if groups := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(groups[1])
    groups = re.search(r"replica_groups={{([\d,]*)}", line)
    return len(groups[1].split(",")) if groups else 0


def _bytes(dtype: str, shape: str) -> int:
    bits = re.search(r"\d+$", dtype)
    return SIZES.get(dtype, int(bits[0]) // 8 if bits else 1) * math.prod(int(n) for n in shape.split(",") if n)


def print_table(program: str, found: list[Collective], lines: int) -> None:
    """Prints the largest groups of equal collectives, and the totals by the loops around them."""
    groups = Counter((c.kind, c.shape, c.loops, c.bytes) for c in found)
    rows = sorted(((n * math.prod(key[2]) * key[3], n, *key) for key, n in groups.items()), reverse=True)
    whole = sum(row[0] for row in rows)
    table = Table(title=f"{program}: {whole / 1e9:,.2f} GB a chip")
    for column in ("collective", "array", "MB", "times", "loops around it", "GB"):
        table.add_column(column, justify="left" if column in ("collective", "array") else "right")
    for total, n, kind, shape, loops, size in rows[:lines]:
        times, around = n * math.prod(loops), " x ".join(map(str, loops))
        table.add_row(kind, shape, f"{size / 1e6:,.3f}", f"{times:,}", around, f"{total / 1e9:,.3f}")
    rest = sum(row[0] for row in rows[lines:])
    table.add_row(f"{len(rows[lines:])} smaller", "", "", "", "", f"{rest / 1e9:,.3f}")
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--topology", default="v6e:2x4", help="of the TPU slice")
    parser.add_argument("--mesh", nargs=3, type=int, default=(1, 8, 1), metavar=("DATA", "FSDP", "TENSOR"))
    parser.add_argument("--lines", type=int, default=12, help="of each table")
    for name, value in vars(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    args = parser.parse_args()
    os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "TPU_LOG_DIR": "disabled"}
    devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name=args.topology).devices)
    mesh = Mesh(devices.reshape(args.mesh), sharding.AXES, axis_types=(AxisType.Auto,) * 3)
    sizes = Sizes(**{name: getattr(args, name) for name in vars(Sizes())})
    for name in args.models:
        for program in args.programs:
            begin = time.perf_counter()
            compiled = lower(program, MODELS[name], mesh, sizes).compile()
            seconds, memory = time.perf_counter() - begin, compiled.memory_analysis()
            print_table(f"{name} {program}", collectives(compiled.as_text()), args.lines)
            print(
                f"compiled in {seconds:.0f} s; arguments {memory.argument_size_in_bytes / 1e9:.2f} GB, temporaries at "
                f"most {memory.temp_size_in_bytes / 1e9:.2f} GB, peak {memory.peak_memory_in_bytes / 1e9:.2f} GB",
                flush=True,
            )


if __name__ == "__main__":
    main()
