"""Memory of a run with LoRA against one in which all parameters learn: `python -m benchmarks.lora_memory`.

A model of 27 million parameters and the step of the workload `even` (docs/performance.md), compiled for this device, as
`plan` does it for a TPU. Nothing runs. A row is one program: what it needs, and what else is in memory with it.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.workloads import WORKLOADS, write

ROOT = Path(__file__).parent.parent
SIZES = {
    "prompts_per_step": 8, "prompts_per_update": 8, "group_size": 8, "rollout.max_completion_tokens": 128,
    "mesh.fsdp": 1, "kl.coef": 0.04,
}  # fmt: skip
CASES: list[dict[str, Any]] = [{"microbatch": 8}, {"microbatch": 1}, {"microbatch": 1, "model.dtype": "bfloat16"}]
MIB = 2**20


def main() -> None:
    from jaxrl_llm.config.load import load
    from jaxrl_llm.plan.phases import make_plan
    from jaxrl_llm.sharding import make_mesh

    workload = WORKLOADS["even"]
    with TemporaryDirectory() as made:
        folder = Path(made) / "model"
        write(workload, folder)
        for case in CASES:
            peaks = {}
            for name in ("grpo", "lora"):
                config = load(ROOT / "configs" / f"{name}.py")
                config.update_from_flattened_dict(SIZES | {"model.path": str(folder)} | case)
                plan = make_plan(config.lock(), make_mesh(**config.mesh), workload.prompt_tokens, Path(made))
                holds = ", ".join(f"{what} {size / MIB:.0f}" for what, size in plan.holds.items())
                print(f"\n{name}, {case}; holds, MiB: {holds}")
                for phase in plan.phases:
                    print(
                        f"  {phase.peak / MIB:8.0f} MiB = {phase.program / MIB:.0f} + {phase.beside / MIB:.0f}  {phase.name}"
                    )
                peaks[name] = {
                    "update": max(phase.peak for phase in plan.phases if phase.name.startswith("the update")),
                    "step": max(phase.peak for phase in plan.phases),
                }
            for what in ("update", "step"):
                share = peaks["lora"][what] / peaks["grpo"][what]
                print(f"{case}: the peak of the {what} with LoRA is {share:.0%} of that of the full run")


if __name__ == "__main__":
    main()
