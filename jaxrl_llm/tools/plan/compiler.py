"""Programs of a step on TPUs or GPUs: memory, operations, traffic and an estimated time of each."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm.errors import UserError
from jaxrl_llm.learner.learning import Models
from jaxrl_llm.machine.compilation import Program, needed_memory
from jaxrl_llm.machine.memory import device_bytes
from jaxrl_llm.rollout.jax.compiled import decoding_name
from jaxrl_llm.rollout.jax.sizes import StreamSizes
from jaxrl_llm.structs import Sizes
from jaxrl_llm.tools.plan.chips import GIB, Chip
from jaxrl_llm.tools.plan.collectives import BETWEEN_SLICES, Collective, collectives
from jaxrl_llm.tools.plan.expected import Usage
from jaxrl_llm.tools.plan.flops import flops

SAMPLING = ("prompts", "decoding")  # phases of the sampler


@dataclass(frozen=True)
class Phase:
    """What a program of a step costs on one chip. Its time is the largest of arithmetic, memory and collectives.

    Traffic between TPU slices takes no time here, because the speed of their network is not published.
    """

    name: str
    times: int  # number of times that a step runs the program
    error: str = ""  # reason why the compiler refuses the program; "" if it fits
    compile_seconds: float = 0.0
    instructions: int = 0  # number of instructions in the compiled text
    program: int = 0  # bytes of the program at its peak: arguments, temporaries and results
    beside: int = 0  # bytes of other arrays that are in memory while the program runs
    fused: bool = False  # whether attention is the fused kernel
    turns: float = 0.0  # for decoding: turns of the loop over tokens in one run of the program; otherwise 0
    tokens: int = 0  # tokens that a step samples with the program
    flops: float = 0.0  # operations of matrix products in one run of the program
    traffic: float = 0.0  # bytes of weights, optimizer state and KV cache that the program reads and writes
    collectives: tuple[Collective, ...] = ()
    meanwhile: bool = False  # whether the sampler's own chips run the program while other chips score and learn

    @property
    def peak(self) -> int:
        """Bytes that are in memory at the program's peak, with the arrays that it does not use."""
        return self.program + self.beside

    @property
    def sent(self) -> dict[str, float]:
        """Bytes that a chip sends, by kind of collective."""
        total: defaultdict[str, float] = defaultdict(float)
        for collective in self.collectives:
            total[collective.kind] += collective.bytes * collective.times
        return dict(total)

    @property
    def sent_in_slice(self) -> float:
        """Bytes that a chip sends to others of its slice."""
        return sum(size for kind, size in self.sent.items() if kind != BETWEEN_SLICES)

    @property
    def sent_to_hosts(self) -> float:
        """Bytes that a GPU sends to other hosts."""
        return sum(collective.to_hosts * collective.times for collective in self.collectives)

    def seconds(self, chip: Chip) -> dict[str, float]:
        """Returns {resource: seconds} of one run of the program at the chip's published speeds.

        The resource "network", which joins the hosts of GPUs, is left out if its speed is unknown.
        """
        seconds = {
            "arithmetic": self.flops / chip.flops,
            "memory": self.traffic / chip.bandwidth,
            "collectives": self.sent_in_slice / chip.ring,
        }
        return seconds | ({"network": self.sent_to_hosts / chip.network} if chip.network else {})


@dataclass(frozen=True)
class StepSampling:
    """Work of the in-JAX engine in a step, on a chip."""

    stream: StreamSizes
    usage: dict[str, Usage]  # usage of each program, by its name
    cached: int  # bytes of a token in the KV cache
    weights: int  # bytes of the sampler's copy of the weights
    read: int  # bytes of this copy that decoding reads per token: all weights except those of the vision tower
    mesh: Mesh  # mesh of the chips that sample

    def holds(self, *, apart: bool) -> dict[str, int]:
        """Returns {name: bytes on a chip} of the sampler's arrays. apart: whether the sampler has its own chips."""
        condition = "on chips of its own" if apart else "while it samples"
        cache_tokens = self.stream.pages * self.stream.page + self.stream.prompts * self.stream.prompt_width
        return {f"sampler's copy ({condition})": self.weights, f"KV cache ({condition})": cache_tokens * self.cached}

    def leaves_out(self, program: Program) -> bool:
        """Returns whether a program is one of the smaller decode programs, and a step is expected never to call it."""
        largest_program = decoding_name(self.stream.slots[0])
        return program.phase == "decoding" and program.name not in (largest_program, *self.usage)

    def traffic(self, name: str) -> float:
        """Returns the bytes that a chip must read and write in a call of a decode program, on average."""
        if name not in self.usage:
            return 0.0
        usage, stream = self.usage[name], self.stream
        slots = next(slots for slots in stream.slots if decoding_name(slots) == name)
        # Each token reads the weights, the prompts and the pages. A smaller program copies prompts first.
        prompt_tokens = slots.prompts * stream.prompt_width
        copied_tokens = prompt_tokens if slots.prompts < stream.prompts else 0
        cache_tokens = usage.turns * prompt_tokens + usage.pages * stream.page + usage.calls * 2 * copied_tokens
        return (usage.turns * self.read + cache_tokens * self.cached) / usage.calls


@dataclass(frozen=True)
class Compiler:
    """Compiles the programs of a step, and measures them."""

    models: Models
    sizes: Sizes
    dump: Path  # folder in which XLA's compiler for TPUs reports the memory of programs
    chip: Chip | None  # None if the chip is unknown, so that nothing bounds the memory
    gathered: int  # bytes of the weights that a pass gathers on a chip
    sampled: StepSampling | None = None  # None if the step samples nothing

    def measure(self, program: Program, beside: int, parts: int = 1) -> Phase:
        """Compiles a program, and returns its `Phase`: what it costs, or the error if it does not fit.

        beside: bytes of arrays that a chip holds although the program does not use them. parts: number of micro-batches
        over which the rows of a prompt are spread.
        """
        # `times` is how often a step runs the program. `turns` is how often one run goes through its inner loop, over
        # micro-batches or over the tokens of a decode round. The compiler counts such a loop once.
        sizes, chip, usage = self.sizes, self.chip, Usage()
        prompts = sizes.prompts_per_update if program.phase == "update" else sizes.prompts_per_step
        turns = prompts // (sizes.microbatch or prompts) * parts
        times, mesh = program.repetitions, self.models.mesh
        if program.phase == "update":
            times = sizes.updates_per_rollout
        elif self.sampled and program.phase in SAMPLING:
            usage, mesh = self.sampled.usage.get(program.name, usage), self.sampled.mesh
            times, turns = usage.calls, usage.turns / max(usage.calls, 1)
        hosts = [device.process_index for device in mesh.devices.flat]
        # If the chip's own compiler refuses programs that do not fit, no limit is checked here.
        limit = 0 if chip is None or chip.refuses else int(chip.memory * GIB)
        traced, compile_start = program.trace(), time.perf_counter()
        try:
            compiled = program.compile(limit)
        except UserError as error:
            return Phase(program.name, times, error=str(error), beside=beside)
        seconds, text = time.perf_counter() - compile_start, compiled.as_text() or ""
        return Phase(
            program.name,
            times,
            compile_seconds=seconds,
            instructions=text.count(" = "),
            program=needed_memory(compiled) if limit else allocated(compiled, self.dump),
            beside=beside,
            fused=any(kernel in text for kernel in (chip.kernels if chip else ())),
            flops=flops(traced, turns) / mesh.size,
            traffic=self.traffic(program, compiled, turns),
            collectives=tuple(collectives(text, turns, hosts)),
            turns=turns if program.phase == "decoding" else 0.0,
            tokens=usage.tokens,
        )

    def traffic(self, program: Program, compiled: jax.stages.Compiled, turns: float) -> float:
        """Returns the bytes that a chip must at least read and write in one run of a program.

        Activations are not counted. A scoring program counts only the weights that its layers gather from other chips.
        """
        memory: Any = compiled.memory_analysis()
        if self.sampled and program.phase == "decoding":
            return self.sampled.traffic(program.name)
        if program.phase == "push":
            return memory.argument_size_in_bytes + memory.output_size_in_bytes
        # The KV cache is an argument and a result of the program, which writes only a few prompts into it.
        if program.phase == "prompts":
            return memory.argument_size_in_bytes + memory.output_size_in_bytes - 2 * memory.alias_size_in_bytes
        # Each pass writes and reads the gathered weights. Scoring has one pass. Learning has three: forward, the
        # recomputed forward and backward.
        pass_bytes = 2 * self.gathered
        if program.phase == "scoring":
            return turns * pass_bytes
        # Each micro-batch reads and writes the sum of gradients.
        gradient_bytes = 2 * device_bytes(program.states[0].params)
        state_bytes = memory.argument_size_in_bytes + memory.output_size_in_bytes
        return turns * (3 * pass_bytes + gradient_bytes) + state_bytes


def allocated(compiled: jax.stages.Compiled, dump: Path) -> int:
    """Returns the bytes of memory that a program needs on a chip, according to the compiler.

    If neither JAX nor a report of XLA has this number, returns the sum of arguments, temporaries and results.
    dump: folder in which XLA's compiler for TPUs reports the memory of programs.
    """
    memory: Any = compiled.memory_analysis()
    if hasattr(memory, "total_allocation_bytes"):  # JAX 0.12
        return memory.total_allocation_bytes
    # The newest report is that of this program. Reports with ".cpu_" are about helper functions of JAX.
    reports = [file for file in dump.glob("*memory-usage-report.txt") if ".cpu_" not in file.name]
    text = max(reports, key=lambda file: file.stat().st_mtime).read_text() if reports else ""
    match = re.search(r"Memory Space: default.*?Total bytes[^\d]*([\d,]+)", text, re.DOTALL)
    if match:
        return int(match[1].replace(",", ""))
    return needed_memory(compiled)
