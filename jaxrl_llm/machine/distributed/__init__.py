"""Several processes, usually one on each host, which run the same program on one mesh over all their devices.

JAX's coordination service connects them (`jax.distributed`). A process that ends by an error tells the others, which
then end too. JAX ends them if it is killed.
"""

from jaxrl_llm.machine.distributed.joining import end, joined
from jaxrl_llm.machine.distributed.processes import count, first, index, part
from jaxrl_llm.machine.distributed.store import exchange, gather, wait

__all__ = ["count", "end", "exchange", "first", "gather", "index", "joined", "part", "wait"]
