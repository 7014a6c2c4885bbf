"""Plans a run on TPUs or GPUs without having them: `jaxrl plan --config FILE --topology v5e:4x4`, or `h100:8`."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from collections import Counter
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxrl_llm import recipe as recipes
from jaxrl_llm.config.load import config_parser, flatten, override, parse_config
from jaxrl_llm.errors import UserError, run_main
from jaxrl_llm.recipe.recipe import Recipe, SftRecipe
from jaxrl_llm.tools.plan.chips import GIB, Chip, topology
from jaxrl_llm.tools.plan.collectives import BETWEEN_SLICES
from jaxrl_llm.tools.plan.compiler import Phase
from jaxrl_llm.tools.plan.expected import check_mean
from jaxrl_llm.tools.plan.phases import SlicePlan
from jaxrl_llm.tools.plan.prompts import planned_prompt
from jaxrl_llm.tools.plan.search import Planner, fastest, largest

DESCRIPTION = (
    "Compiles the programs of a step for TPUs or GPUs, on a CPU, and prints memory, work and traffic of each chip. The "
    "times are unvalidated estimates. Exit code 0: the run fits; 1: it does not."
)


def main() -> None:
    """Prints the memory and the estimated time of a config's programs on a topology."""
    parser = config_parser("jaxrl_llm.tools.plan", DESCRIPTION)
    parser.add_argument(
        "--topology",
        required=True,
        help="a TPU slice, for example v5e:4x4 or v5p:2x2x2; or GPUs, for example h100:8 or h100:4x8 (hosts x GPUs)",
    )
    parser.add_argument("--slices", type=int, default=1, metavar="N", help="number of TPU slices, joined by a network")
    parser.add_argument(
        "--prompt-tokens", type=int, help="tokens of a prompt, with its images (default: config.data.max_prompt_tokens)"
    )
    parser.add_argument(
        "--pixels", default="", metavar="WxH[xN]", help="size and number of a prompt's images (default: no images)"
    )
    parser.add_argument(
        "--lengths", type=float, metavar="MEAN", help="mean tokens of a completion (default: half of the limit)"
    )
    parser.add_argument(
        "--collectives", type=int, default=0, metavar="N", help="also list the N largest collectives of each program"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--search",
        type=int,
        default=0,
        metavar="N",
        help="try combinations of mesh, micro-batch and remat, promising ones first, until N of them fit",
    )
    either.add_argument(
        "--solve",
        default="",
        metavar="FIELD",
        help="find the largest value of an integer field that fits, for example microbatch",
    )
    config, args = parse_config(parser)
    recipe = recipes.read_either(config)
    if args.lengths is not None and isinstance(recipe, SftRecipe):
        raise UserError("--lengths has no effect, because sft samples nothing: remove it")
    if args.lengths is not None:
        check_mean(args.lengths, recipe.rollout.max_completion_tokens)
    field = args.solve.removeprefix("config.")
    # The arguments are checked before a compiler starts.
    start = flatten(config).get(field, 0)
    if field and (field not in flatten(config) or type(start) is not int):
        override(config, field, "1")  # for an unknown field, this raises an error with a suggestion
        raise UserError(f"--solve {field} must name a field with a whole number, for example microbatch")

    def recipe_with(value: int) -> Recipe | SftRecipe:
        override(config, field, str(value))
        return recipes.read_either(config)

    planned_prompt(recipe, args.prompt_tokens or recipe.data.max_prompt_tokens, args.pixels)
    with TemporaryDirectory() as dump:
        chip, devices = topology(args.topology, args.slices, dump)
        console = Console(stderr=args.json, width=150, highlight=False)
        asked = args.lengths or 0.0, args.prompt_tokens or 0, args.pixels
        planner = Planner(chip, devices, Path(dump), console, *asked)
        with redirect_stdout(sys.stderr) if args.json else nullcontext():
            if args.search:
                plans = fastest(planner, recipe, args.search)
            elif field:
                plans = largest(planner, field, start, recipe_with)
            else:

                def say(phase: Phase) -> None:
                    console.print(f"compiled in {phase.compile_seconds:.0f} s: {phase.name}")

                plans = [planner.plan(recipe, say)]
    if args.json:
        print(json.dumps([as_json(plan, chip) for plan in plans], indent=2))
    else:
        for plan in plans:
            print_plan(plan, chip, args, console)
    if not any(plan.fits(chip) for plan in plans):
        sys.exit(1)


def print_plan(plan: SlicePlan, chip: Chip, args: Namespace, console: Console) -> None:
    """Prints a plan: the arrays that a chip holds, a table of the phases, and which phase does not fit."""
    topology_name = args.topology if args.slices == 1 else f"{args.slices} x {args.topology}"
    console.print(f"\n{title(plan, topology_name)}")
    if chip.network:
        share = "JAX uses the share XLA_CLIENT_MEM_FRACTION of a GPU's memory, by default 0.75"
        console.print(f"a program may use {chip.memory:.2f} GiB: {share}")
    if chip.note:
        console.print(chip.note)
    holds = ", ".join(f"{name} {size / GIB:.2f}" for name, size in plan.holds.items())
    console.print(f"each chip holds, GiB: {holds}")
    if plan.models.model.cfg.vision:
        console.print(image_line(plan))
    if plan.stream:
        console.print(sampling_line(plan, args))
    if plan.recipe.rl and plan.recipe.rl.agents:
        console.print("sampling is planned without agents; docs/agents.md has the sizes of programs for their requests")
    table = Table()
    columns = (
        "a step",
        "times",
        "compile s",
        "program GiB",
        "beside GiB",
        f"of {chip.memory:.4g} GiB",
        "fused",
        "tokens",
    )
    for column in (*columns, "TFLOP", "memory GB", "sent GB", "seconds", "bound by"):
        table.add_column(column, justify="left" if column in ("a step", "bound by") else "right")
    for phase in plan.phases:
        table.add_row(*row(phase, chip))
    console.print(table)
    for phase in plan.phases:
        if phase.error:
            console.print(phase.error)
        elif phase.peak > chip.memory * GIB:
            console.print(f"{phase.name} does not fit into the memory that other arrays leave")
        if args.collectives and phase.collectives:
            print_collectives(phase, args.collectives, console)
    to_hosts = sum(phase.times * phase.sent_to_hosts for phase in plan.phases)
    if to_hosts and chip.network:  # the speed between hosts of TPUs is not published
        console.print(f"of what a GPU sends, {to_hosts / 1e9:,.2f} GB a step go to other hosts")
    if between := sum(phase.times * phase.sent.get(BETWEEN_SLICES, 0) for phase in plan.phases):
        console.print(f"a chip sends {between / 1e9:,.2f} GB a step between slices, which the estimate leaves out")
    if plan.fits(chip):
        seconds = plan.seconds(chip)
        speed = f"{seconds:.1f} s a step, {plan.tokens / seconds:,.0f} tokens/s"
        console.print(f"fits. Unvalidated estimate at published speeds: {speed}")


def sampling_line(plan: SlicePlan, args: Namespace) -> str:
    """Returns a line on the sampler of a chip, and on the lengths that decoding is expected to have."""
    stream, count = plan.stream, plan.recipe.sizes.sequences_per_step
    if not stream:
        return ""
    places = f"{stream.sequences} slots, {stream.pages:,} pages of {stream.page} tokens, {stream.prompts} prompts"
    source = "--lengths" if args.lengths is not None else "half of C, as --lengths is not given"
    return f"sampler, a device: {places}; completions of {plan.tokens / count:,.0f} tokens on average ({source})"


def image_line(plan: SlicePlan) -> str:
    """Returns a line on the images of prompts, for a model that reads them."""
    prompts = plan.prompts
    if not prompts.images:
        return f"prompts of {prompts.width:,} tokens of text: --pixels plans for images"
    return (
        f"prompts of {prompts.width:,} tokens, {prompts.image_tokens:,} of them of images of "
        f"{prompts.images.patches:,} patches"
    )


def print_collectives(phase: Phase, count: int, console: Console) -> None:
    """Prints the largest groups of equal collectives of a phase."""
    # Each row begins with the total bytes of its group, so that sorting puts the largest group first.
    groups = Counter((c.kind, c.shape, c.loops, c.bytes) for c in phase.collectives)
    rows = sorted(
        (
            (number * math.prod(loops) * size, number, kind, shape, loops, size)
            for (kind, shape, loops, size), number in groups.items()
        ),
        reverse=True,
    )
    table = Table(title=f"{phase.name}: {sum(row[0] for row in rows) / 1e9:,.2f} GB a chip")
    for column in ("collective", "array", "MB", "times", "loops around it", "GB"):
        table.add_column(column, justify="left" if column in ("collective", "array") else "right")
    for total, number, kind, shape, loops, size in rows[:count]:
        times, loop_counts = number * math.prod(loops), " x ".join(f"{trips:g}" for trips in loops)
        table.add_row(kind, shape, f"{size / 1e6:,.3f}", f"{times:,.0f}", loop_counts, f"{total / 1e9:,.3f}")
    remaining_bytes = sum(row[0] for row in rows[count:])
    table.add_row(f"{len(rows[count:])} smaller", "", "", "", "", f"{remaining_bytes / 1e9:,.3f}")
    console.print(table)


def title(plan: SlicePlan, topology: str) -> str:
    """Returns a line with the model, the mesh and the sizes of a step."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.models.mesh.shape.items())
    recipe, model = plan.recipe, plan.recipe.model
    sizes = f"B {recipe.prompts_per_step}, G {recipe.sizes.group_size}, C {recipe.rollout.max_completion_tokens}"
    settings = f"microbatch {recipe.microbatch}, remat {model.remat}"
    if isinstance(recipe, SftRecipe):
        return f"{plan.models.folder.name} on {topology}: {mesh}; {sizes}; {settings}"
    settings += f", row_parts {model.row_parts}"
    max_sequences = recipe.engine.arguments.get("max_sequences", "of another engine")
    settings += f", engine.max_sequences {max_sequences}" + f", engine.devices {recipe.sampler_devices}" * (
        recipe.sampler_devices > 0
    )
    return f"{plan.models.folder.name} on {topology}: {mesh}; {sizes}; {settings}"


def row(phase: Phase, chip: Chip) -> list[str]:
    """Returns a phase as a row of the table."""
    if phase.error:
        return [phase.name, f"{phase.times}", "", "too big", f"{phase.beside / GIB:.2f}"]
    seconds = phase.seconds(chip)
    bound = max(seconds, key=lambda name: seconds[name])
    return [
        phase.name,
        f"{phase.times}",
        f"{phase.compile_seconds:.0f}",
        f"{phase.program / GIB:.2f}",
        f"{phase.beside / GIB:.2f}",
        f"{phase.peak / GIB / chip.memory:.0%}",
        "kernel" if phase.fused else "no",
        f"{phase.tokens:,}" if phase.tokens else "",
        f"{phase.flops / 1e12:.2f}",
        f"{phase.traffic / 1e9:.1f}",
        f"{phase.sent_in_slice / 1e9:.2f}",
        f"{phase.times * seconds[bound]:.2f}",
        bound,
    ]


def as_json(plan: SlicePlan, chip: Chip) -> dict[str, Any]:
    """Returns a plan as JSON values. Sizes are bytes of a chip."""
    phases = []
    for phase in plan.phases:
        numbers = {name: x for name, x in vars(phase).items() if name != "collectives"}
        phases.append(numbers | {"peak": phase.peak, "sent": phase.sent, "estimated_seconds": phase.seconds(chip)})
    recipe, model = plan.recipe, plan.recipe.model
    return {
        "fits": plan.fits(chip),
        "mesh": dict(plan.models.mesh.shape),
        "config": {"prompts_per_step": recipe.prompts_per_step, "group_size": recipe.sizes.group_size}
        | {"microbatch": recipe.microbatch, "model.remat": model.remat, "model.row_parts": model.row_parts},
        "prompts": plan.prompts._asdict() | {"images": plan.prompts.images and plan.prompts.images._asdict()},
        "memory": chip.memory * GIB,
        "holds": plan.holds,
        "phases": phases,
        "estimated_seconds": plan.seconds(chip),
        "tokens": plan.tokens,
        "sampler": vars(plan.stream) if plan.stream else None,
    }


if __name__ == "__main__":
    run_main(main)
