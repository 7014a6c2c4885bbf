"""Asks the TPU compiler whether `plan` is right: `python -m benchmarks.plan_check`; it needs the tpu extra and no TPU.

`plan` adds what a program needs to what lies beside it in the memory of a chip. Here each program of a step gets what
lies beside it as one more argument, so that the compiler places both, and accepts or refuses the whole. The two must
say the same for steps that fit and for steps that do not. The model is wide and has two layers, to compile soon.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
WIDTH = 512  # tokens of a prompt
SMALL = 0.5  # of the memory; the compiler is not asked again about programs that need less with all beside them
USUAL = {
    "model.dtype": "bfloat16", "model.remat": "full", "rollout.max_completion_tokens": 512, "prompts_per_step": 32,
    "prompts_per_update": 32, "group_size": 8, "microbatch": 8,
}  # fmt: skip
# Topology and fields of a step; the first of a line fits, the last does not, others are between.
STEPS: list[tuple[str, dict[str, Any]]] = [
    ("v5e:2x2", {}),
    ("v5e:2x2", {"microbatch": 16}),
    ("v5e:2x2", {"microbatch": 32}),
    ("v5e:2x2", {"model.remat": "none"}),
    ("v5e:2x2", {"mesh.tensor": 2}),
    ("v5e:2x2", {"mesh.tensor": 4, "microbatch": 2}),
    ("v5e:2x2", {"prompts_per_step": 256}),
    ("v5e:2x2", {"prompts_per_step": 1024}),
    ("v5e:2x2", {"prompts_per_step": 1024, "engine.max_sequences": 2048}),
    ("v5e:2x2", {"kl.placement": "none", "prompts_per_step": 256}),
    ("v5e:2x2", {"optim.momentum_dtype": "bfloat16", "microbatch": 16}),
    ("v5e:1x1", {"microbatch": 1, "prompts_per_step": 8, "prompts_per_update": 8}),
    ("v5e:1x1", {"microbatch": 1, "prompts_per_step": 64}),
    ("v6e:1x1", {"microbatch": 4}),
    ("v6e:1x1", {"microbatch": 16}),
    ("v6e:2x2", {"microbatch": 32}),
    ("v5p:2x2x1", {"model.remat": "none", "microbatch": 32}),
]


def make_folder(folder: Path) -> Path:
    """Writes the config.json of a model with two layers and 0.8 billion parameters, and a tokenizer."""
    for file in (ROOT / "jaxrl_llm" / "assets" / "qwen2_5_7b").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "vocab_size": 64_000, "max_window_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def accepted(program: Any, compiled: Any, beside: int, devices: int) -> bool:
    """Returns whether the compiler places a program and `beside` bytes on each chip. compiled: without them."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxrl_llm.compilation import ROUND_AS_WRITTEN

    traced = program.trace()
    infos, tree = jax.tree.flatten(traced.args_info)
    known = tree.flatten_up_to(compiled.input_shardings)  # None: it is not used
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at) for x, at in zip(infos, known, strict=True)]
    mesh = next(at.mesh for at in known if isinstance(at, NamedSharding))
    more = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    ballast = jax.ShapeDtypeStruct((devices, beside // 4), jnp.float32, sharding=more)

    def whole(_: Any, *flat: Any) -> Any:
        positional, named = jax.tree.unflatten(tree, flat)
        return traced(*positional, **named)

    donated = tuple(i for i, x in enumerate(infos, 1) if x.donated)
    options = ROUND_AS_WRITTEN if program.phase != "push" else None
    results = compiled.output_shardings
    both = jax.jit(
        whole, keep_unused=True, donate_argnums=donated, out_shardings=results, compiler_options=options
    )  # fmt: skip
    try:
        both.trace(ballast, *args).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return False
    return True


def main() -> None:
    with TemporaryDirectory() as made:
        dump = Path(made) / "dump"
        dump.mkdir()
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump}"
        from jaxrl_llm.compilation import Program
        from jaxrl_llm.config.load import load
        from jaxrl_llm.plan import phases
        from jaxrl_llm.plan.chips import topology
        from jaxrl_llm.sharding import mesh_over

        (folder := Path(made) / "model").mkdir()
        make_folder(folder)
        wrong, seen, compile = 0, {}, Program.compile

        def remember(program: Program) -> Any:
            seen[program.name] = program, compile(program)
            return seen[program.name][1]

        Program.compile = remember
        for name, fields in STEPS:
            chip, devices = topology(name)
            config = load(ROOT / "configs" / "grpo.py")
            config.update_from_flattened_dict(USUAL | {"model.path": str(folder)} | fields)
            seen.clear()
            plan = phases.make_plan(config.lock(), mesh_over(devices, **config.mesh), WIDTH, dump)
            peaks, differ = [], []
            for phase in plan.phases:
                share = phase.peak / (chip.memory * 2**30)
                peaks.append("refused" if phase.error else f"{share:.0%}")
                if share >= SMALL and not phase.error:
                    placed = accepted(*seen[phase.name], phase.beside, len(devices))
                    differ += [phase.name] if placed != (share <= 1) else []
            wrong += bool(differ)
            said = f"{'fits' if plan.fits(chip) else 'does not fit'} ({', '.join(peaks)})"
            print(f"{name} {fields}: {said}; the compiler differs on: {', '.join(differ) or 'nothing'}", flush=True)
        sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
