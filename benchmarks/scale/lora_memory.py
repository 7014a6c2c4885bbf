"""Memory of a run with LoRA against one in which all parameters learn: `python -m benchmarks.scale.lora_memory`.

A model of 27 million parameters and the step of the workload `even` (docs/performance.md), compiled for this device and
not run. A row is a program: what it needs itself (arguments, temporaries and results), and what else is in memory.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.speed.workloads import WORKLOADS, write

ROOT = Path(__file__).parents[2]
STEP = {
    "prompts_per_step": 8, "prompts_per_update": 8, "group_size": 8, "rollout.max_completion_tokens": 128,
    "mesh.fsdp": 1,
}  # fmt: skip
CASES: list[dict[str, Any]] = [{"microbatch": 1}, {"microbatch": 1, "model.dtype": "bfloat16"}]
RUNS: dict[str, dict[str, Any]] = {"grpo": {}, "lora": {}, "lora, int8": {"adapters.base_dtype": "int8"}}
MIB = 2**20


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with TemporaryDirectory() as made:
        from jaxrl_llm import recipe as recipes
        from jaxrl_llm.config.load import load
        from jaxrl_llm.machine.meshes import make_mesh
        from jaxrl_llm.tools.plan.phases import make_plan
        from jaxrl_llm.tools.plan.prompts import PlannedPrompt

        workload, folder = WORKLOADS["even"], Path(made) / "model"
        prompts = PlannedPrompt(workload.prompt_tokens)
        write(workload, folder)
        for case in CASES:
            peaks: dict[str, dict[str, int]] = {"update": {}, "step": {}}
            for name, more in RUNS.items():
                config = load(ROOT / "configs" / f"{name.partition(',')[0]}.py")
                config.update_from_flattened_dict(STEP | {"model.path": str(folder)} | case | more)
                plan = make_plan(recipes.read(config), make_mesh(**config.mesh), prompts, Path(made))
                holds = ", ".join(f"{what} {size / MIB:.0f}" for what, size in plan.holds.items())
                print(f"\n{name}, {case}; it holds, MiB: {holds}")
                for phase in plan.phases:
                    parts = f"{phase.program / MIB:.0f} + {phase.beside / MIB:.0f} beside"
                    print(f"  {phase.peak / MIB:5.0f} MiB = {parts}: {phase.name}", flush=True)
                peaks["update"][name] = max(x.peak for x in plan.phases if x.name.startswith("the update"))
                peaks["step"][name] = max(phase.peak for phase in plan.phases)
            for what, peak in peaks.items():
                for name in list(RUNS)[1:]:
                    share = peak[name] / peak["grpo"]
                    print(
                        f"{case}: the peak of the {what} with {name} is {share:.0%} of that of the full run", flush=True
                    )


if __name__ == "__main__":
    main()
