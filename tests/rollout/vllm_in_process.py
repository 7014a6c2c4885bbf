"""Serves models in one process of vLLM, one after another, which imports vLLM once: `vllm_in_process.py JOBS ANSWERS`.

It runs in vLLM's environment, with the settings that serve_vllm gives to a server.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.models import registry

# vLLM looks at the class of a model in a process that it starts for that, which would import vLLM once more.
registry._run_in_subprocess = lambda inspect: inspect()


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Loads a model, pushes weights to it, and samples."""
    llm = LLM(
        job["model"],
        dtype=job["dtype"],
        max_model_len=job["max_model_len"],
        enforce_eager=True,
        enable_chunked_prefill=False,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        worker_extension_cls="jaxrl_llm.rollout.vllm.receive.Extension",
        weight_transfer_config={"backend": "pull"},
    )
    refusal = ""
    try:
        llm.init_weight_transfer_engine({"init_info": {"tensors": job["tensors"]}})
        llm.start_weight_update()
        llm.update_weights({"update_info": job["source"]})
        llm.finish_weight_update("1")
    except ValueError as error:
        refusal = str(error)
    requests = [{"prompt_token_ids": tokens} for tokens in job["prompts"]]
    outputs = llm.generate(requests, SamplingParams(**job["sampling"], logprobs=0), use_tqdm=False)
    completions = [
        [
            [(token, place[token].logprob) for token, place in zip(one.token_ids, one.logprobs, strict=True)]
            for one in output.outputs
        ]
        for output in outputs
    ]
    return {"config_json": llm.collective_rpc("config_json")[0], "refusal": refusal, "completions": completions}


answers = []
for job in json.loads(Path(sys.argv[1]).read_text()):
    answers.append(answer(job))
    cleanup_dist_env_and_memory()
Path(sys.argv[2]).write_text(json.dumps(answers))
