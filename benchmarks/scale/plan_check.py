"""Asks the TPU compiler whether `plan` is right: `python -m benchmarks.scale.plan_check`.

It needs the tpu extra and no TPU.

`plan` adds what a program needs to what lies beside it in the memory of a chip. Here each program of a step gets what
lies beside it as one more argument, so that the compiler places both, and accepts or refuses the whole. The two must
say the same for steps that fit and for steps that do not. It asks where the two together need most of the memory; a
step that does not fit ends with the first program that does not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
WIDTH = 512  # tokens of a prompt
CLOSE = 0.8  # of the memory; the compiler is asked about programs that need more, with all beside them ...
BESIDE = 0.1  # ... if that is more than this share: else it has said so already, when it compiled the program alone
USUAL = {
    "model.dtype": "bfloat16", "model.remat": "full", "rollout.max_completion_tokens": 512, "prompts_per_step": 32,
    "prompts_per_update": 32, "group_size": 8, "microbatch": 4,
}  # fmt: skip
AWAY = {"host_memory.reference": True, "host_memory.optimizer": True}
STEPS: list[tuple[str, int, dict[str, Any]]] = [  # topology, layers, fields
    ("v5e:2x2", 8, {}),
    ("v5e:2x2", 9, {}),
    ("v5e:2x2", 10, {}),
    ("v5e:2x2", 10, {"optim.momentum_dtype": "bfloat16"}),
    ("v5e:2x2", 10, {"kl": None}),
    ("v5e:2x2", 12, AWAY),
    ("v5e:2x2", 12, {"mesh.tensor": 2}),
    ("v5e:2x2", 2, {"microbatch": 32}),
    ("v5e:1x1", 1, {"microbatch": 1}),
    ("v5e:1x1", 2, {"microbatch": 1}),
    ("v6e:1x1", 4, {"microbatch": 1}),
    ("v6e:1x1", 5, {"microbatch": 1}),
]


def make_folder(folder: Path, layers: int) -> Path:
    """Writes the config.json of a model that is as wide as Qwen2.5-7B, with fewer layers and tokens."""
    folder.mkdir(exist_ok=True)
    for file in (ROOT / "jaxrl_llm" / "assets" / "qwen2_5_7b").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "max_window_layers": layers, "vocab_size": 32_000}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def accepted(program: Any, compiled: Any, beside: int, devices: int) -> bool:
    """Returns whether the compiler places a program and `beside` bytes on each chip. compiled: without them."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxrl_llm.machine.compilation import ROUND_AS_WRITTEN

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
    argparse.ArgumentParser(description=__doc__).parse_args()
    with TemporaryDirectory() as made:
        dump = Path(made) / "dump"
        dump.mkdir()
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump}"
        from jaxrl_llm import recipe as recipes
        from jaxrl_llm.config.load import load
        from jaxrl_llm.machine.compilation import Program
        from jaxrl_llm.machine.meshes import mesh_over
        from jaxrl_llm.tools.plan import phases
        from jaxrl_llm.tools.plan.chips import topology
        from jaxrl_llm.tools.plan.prompts import PlannedPrompt

        wrong, seen, compile = 0, {}, Program.compile

        def remember(program: Program, memory: int = 0) -> Any:
            seen[program.name] = program, compile(program, memory)
            return seen[program.name][1]

        Program.compile = remember
        for name, layers, fields in STEPS:
            folder = make_folder(Path(made) / f"layers{layers}", layers)
            chip, devices = topology(name)
            config = load(ROOT / "configs" / "grpo.py")
            config.update_from_flattened_dict(USUAL | {"model.path": str(folder)} | fields)
            seen.clear()
            plan = phases.make_plan(
                recipes.read(config), mesh_over(devices, **config.mesh), PlannedPrompt(WIDTH), dump, chip=chip
            )
            peaks, differ = [], []
            for phase in plan.phases:
                share = phase.peak / (chip.memory * 2**30)
                peaks.append("refused" if phase.error else f"{share:.0%}")
                much = phase.beside >= BESIDE * chip.memory * 2**30 or phase.program <= chip.memory * 2**30 < phase.peak
                if share >= CLOSE and much and not phase.error:
                    placed = accepted(*seen[phase.name], phase.beside, len(devices))
                    differ += [phase.name] if placed != (share <= 1) else []
            wrong += bool(differ)
            said = f"{'fits' if plan.fits(chip) else 'does not fit'} ({', '.join(peaks)})"
            print(
                f"{name}, {layers} layers, {fields}: {said}; the compiler differs on: {', '.join(differ) or 'nothing'}",
                flush=True,
            )
        sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
