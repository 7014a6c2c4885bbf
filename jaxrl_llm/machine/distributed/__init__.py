"""Runs of several processes, usually one per host, which run the same program on one mesh over all their devices.

JAX's coordination service connects the processes (`jax.distributed`). A process that ends by an error informs the other
processes, which then end too. They also end if a process is killed.
"""

from jaxrl_llm.machine.distributed.joining import end, join_processes
from jaxrl_llm.machine.distributed.processes import count, first, index, part
from jaxrl_llm.machine.distributed.store import exchange, gather, wait

__all__ = ["count", "end", "exchange", "first", "gather", "index", "join_processes", "part", "wait"]
