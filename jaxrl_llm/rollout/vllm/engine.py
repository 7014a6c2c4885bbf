"""The engine that samples from vLLM servers over HTTP. The servers may fail and restart during a run."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from contextlib import suppress
from functools import cache, partial
from itertools import cycle, islice
from pathlib import Path
from threading import Event, Lock
from typing import Any, TypeVar

import httpx
import jax
import numpy as np

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.errors import PeerLost, UserError
from jaxrl_llm.machine import distributed, progress
from jaxrl_llm.machine.hang import WATCHDOG
from jaxrl_llm.models import names
from jaxrl_llm.rollout.episodes import IN_TURN, Episodes
from jaxrl_llm.rollout.protocol import EngineInputs, EpisodeEnvironments
from jaxrl_llm.rollout.vllm import connection, weights
from jaxrl_llm.rollout.vllm.address import FOLDER
from jaxrl_llm.rollout.vllm.answers import Completion, Unavailable, read_choices, reading_answer
from jaxrl_llm.rollout.vllm.connection import ServerConnection
from jaxrl_llm.rollout.vllm.images import check_images, server_arguments, server_prompt
from jaxrl_llm.rollout.vllm.managed_server import ManagedServer
from jaxrl_llm.rollout.weight_check import MAX_GAP
from jaxrl_llm.structs import Prompts, PyTree, Rollouts

MIN_LOGIT_BIAS = -100.0  # the lowest logit bias that vLLM accepts
T = TypeVar("T")


class ServerLost(PeerLost):
    """A server was unavailable for longer than config.engine.patience. The run ends, and its command resumes it."""


def start(
    inputs: EngineInputs, *, managed: Callable[..., ManagedServer] | None, servers: tuple[str, ...], **settings: Any
) -> VllmEngine:
    """Starts the engine, and its server if `managed` is given. Raises: UserError.

    managed(folder, ...): starts a server, None if the user's `servers` are used. settings: further fields of
    `engines.vllm`.
    """
    check_images(inputs.image_limits)
    settings["max_gap"] = settings["max_gap"] or MAX_GAP[inputs.model.cfg.dtype]
    servers = tuple(process_address(server, "servers") for server in servers)
    if settings["push_address"]:
        settings["push_address"] = process_address(settings["push_address"], "push_address")
    server = managed and managed(
        inputs.folder,
        dtype=inputs.model.cfg.dtype,
        max_model_len=inputs.max_prompt_tokens + inputs.max_completion_tokens,
        run_args=server_arguments(inputs.image_limits),
        log=inputs.workdir / (f"vllm-{distributed.index()}.log" if distributed.count() > 1 else "vllm.log"),
    )
    # The identity stays the same when the run resumes. It differs between processes, because each process has its own
    # servers and its own file of weights for them.
    run_identity = f"{socket.gethostname()} {inputs.workdir.absolute()} {distributed.index() or ''}".strip()
    try:
        return VllmEngine(
            (server.url,) if server else servers,
            inputs,
            run=hashlib.sha256(run_identity.encode()).hexdigest()[:12],
            managed=server,
            **settings,
        )
    except UserError:
        if server:
            server.stop()
        raise


def process_address(template: str, field: str) -> str:
    """Returns an address of config.engine for this process, with the process number in place of {process}.

    Raises: UserError, if all processes of a run would have the same address.
    """
    if distributed.count() > 1 and "{process}" not in template:
        raise UserError(
            f"config.engine.{field}: {template!r} is the same for all {distributed.count()} processes, but each "
            "process needs its own; write {process} in place of the process number, as in 'http://gpu-{process}:8000'"
        )
    return template.replace("{process}", str(distributed.index()))


class VllmEngine:
    """Samples from vLLM servers and pushes weights to them. Each server belongs to one run.

    A server reports, for every token, the version of the weights that sampled it. If a server fails, restarts or loses
    its weights, the engine pushes the weights again and repeats its requests, for at most `patience` seconds. With
    several servers, a push skips the unavailable ones. They sample nothing until they have the newest weights.
    """

    def __init__(
        self,
        servers: tuple[str, ...],
        inputs: EngineInputs,
        *,
        run: str,
        weights_dir: str,
        push_address: str,
        concurrency: int,
        timeout: float,
        patience: float,
        max_gap: float | None = None,
        managed: ManagedServer | None = None,
    ):
        """run: id of the run. weights_dir: folder for the file of weights. push_address: address of this host for
        pushes over HTTP, "" for pushes by file. concurrency: most requests per server. timeout, patience: seconds.
        max_gap: largest difference of log-probabilities (`protocol.Engine`), None = no check. managed: the server if
        the run has started it.

        Raises: UserError, if the file of weights cannot be made.
        """
        self.max_gap = max_gap
        self.server_count = len(servers)
        self._model = inputs.model.cfg
        self._max_completion_tokens = inputs.max_completion_tokens
        self._stop_ids, self._pad_id, self._patience, self._managed = inputs.stop_ids, inputs.pad_id, patience, managed
        self._weight_file = weights.WeightFile(
            Path(weights_dir) / f"{FOLDER}{run}",
            self._model.dtype,
            names.family_table(self._model.family),
            address=push_address,
        )
        self._closed = Event()
        max_requests = concurrency * len(servers)
        limits = httpx.Limits(max_connections=max_requests + len(servers), max_keepalive_connections=max_requests)
        self._servers = [
            ServerConnection(
                url, inputs, self._weight_file, run=run, limits=limits, timeout=timeout, engine_closed=self._closed
            )
            for url in servers
        ]
        # One more thread per server, so that a push to an unavailable server takes no thread from requests.
        self._request_threads = ThreadPoolExecutor(max_requests + len(servers))
        # The lock lets one thread parse JSON at a time, because parsed answers take much memory.
        self._json_lock = Lock()
        # Server -> job of the last push to it.
        self._pushes: dict[ServerConnection, Future[None]] = {}
        # Servers without the weights of the last push.
        self._unavailable: set[ServerConnection] = set()

    def sample(
        self,
        prompts: Prompts,
        key: jax.Array,
        *,
        group_size: int,
        sampling: Sampling,
        environments: EpisodeEnvironments | None = None,
        max_tokens: np.ndarray | None = None,
        report_ended: Callable[[int], None] = lambda count: None,
    ) -> Rollouts:
        """Samples `group_size` completions or episodes of each prompt. Arguments are those of `Engine.sample`."""
        if environments:
            return self._sample_episodes(
                prompts,
                key,
                group_size=group_size,
                sampling=sampling,
                environments=environments,
                report_ended=report_ended,
            )
        shape = (len(prompts.tokens), group_size, self._max_completion_tokens)
        limits = (
            np.full(shape[:2], self._max_completion_tokens)
            if max_tokens is None
            else np.minimum(max_tokens, self._max_completion_tokens)
        )
        # vLLM adds a completion's index in its request to the seed, so leave room below 2**31.
        count = len(prompts.tokens) * distributed.count()
        seeds = np.asarray(jax.random.randint(key, (count,), 0, 2**31 - 1 - group_size))[distributed.part(count)]
        # The trainer decodes the tokens, so the server need not.
        body = self._sampling_params(sampling) | {"detokenize": False}
        # Cache the prompts, because a group may have several requests.
        prompt_of = cache(partial(server_prompt, prompts))

        # All members of a group with the same token limit share one request, so that they share the prompt on the
        # server. The seeds of a group's requests follow each other, so two members never have the same seed.
        parts: list[tuple[int, np.ndarray]] = []  # prompt and members of each request
        jobs = []
        for prompt, group_limits in enumerate(limits):
            for limit in np.unique(group_limits):
                members, members_before = np.flatnonzero(group_limits == limit), int(np.sum(group_limits < limit))
                seed = int(seeds[prompt] + members_before)
                own_parameters = {"n": len(members), "max_tokens": int(limit), "seed": seed}
                request = prompt_of(prompt).request([]) | {"sampling_params": body | own_parameters}
                parts.append((prompt, members))
                jobs.append(
                    self._request_threads.submit(self._request_group, prompt, request, prompt_of(prompt).expanded)
                )
        # The first error ends the wait, because the other requests may take minutes.
        for job in as_completed(jobs):
            report_ended(len(job.result()))
        answers = [job.result() for job in jobs]
        tokens, logprobs = np.full(shape, self._pad_id, np.int32), np.zeros(shape, np.float32)
        versions = np.full(shape, self._weight_file.version, np.int32)
        mask, truncated = np.zeros(shape, bool), np.zeros(shape[:2], bool)
        for (prompt, members), completions in zip(parts, answers, strict=True):
            for completion in completions:
                member = members[completion.index]
                place = prompt, member, slice(len(completion.tokens))
                tokens[place], logprobs[place], mask[place] = completion.tokens, completion.logprobs, True
                truncated[prompt, member] = completion.truncated
        return Rollouts(
            completions=tokens,
            completion_mask=mask,
            loss_mask=mask,
            logprobs=logprobs,
            truncated=truncated,
            versions=versions,
        )

    def _sample_episodes(
        self,
        prompts: Prompts,
        key: jax.Array,
        *,
        group_size: int,
        sampling: Sampling,
        environments: EpisodeEnvironments,
        report_ended: Callable[[int], None],
    ) -> Rollouts:
        """Samples `group_size` episodes of each prompt: turns of the policy, and observations of the environments."""
        # Each turn is a request with all earlier tokens. The server finds their keys and values in its prefix cache.
        local_prompts = len(prompts.tokens)
        count = local_prompts * group_size * distributed.count()
        seeds = np.asarray(jax.random.randint(key, (count,), 0, 2**31 - 1))[distributed.part(count)]
        episodes = Episodes.empty(
            np.full(local_prompts * group_size, self._max_completion_tokens), self._max_completion_tokens, self._pad_id
        )
        versions = np.full(episodes.tokens.shape, self._weight_file.version, np.int32)
        body, prompt_of = self._sampling_params(sampling), cache(partial(server_prompt, prompts))
        # The server ends a turn at its stop strings too, so that it does not sample more. It must decode text for that.
        body |= {"include_stop_str_in_output": True, "detokenize": True}

        def request_turn(number: int) -> Completion:
            """Requests the next turn of the episode with this number."""
            prompt, length = number // group_size, int(episodes.lengths[number])
            earlier_tokens = episodes.tokens[number, :length].tolist()
            max_tokens = int(episodes.turn_limits(environments.turn_tokens)[number]) - length
            # Each turn has another seed. The server restarts its random numbers from the seed in each request, so equal
            # seeds would sample all turns with the same random numbers.
            seed = int((int(seeds[number]) + length) % (2**31 - 1))
            stop = list(environments.stops(number))
            own_parameters = {"n": 1, "max_tokens": max_tokens, "seed": seed, "stop": stop}
            request = prompt_of(prompt).request(earlier_tokens) | {"sampling_params": body | own_parameters}
            return self._request_group(prompt, request, prompt_of(prompt).expanded + earlier_tokens)[0]

        def submit_turn(number: int) -> Future[Completion]:
            return self._request_threads.submit(request_turn, number)

        # {pending request: number of its episode}
        requests = {submit_turn(number): number for number in range(local_prompts * group_size)}
        while requests or episodes.pending_answers:
            pending: list[Future[Any]] = [*requests, *episodes.pending_answers]
            wait(pending, return_when=FIRST_COMPLETED)
            for request in [request for request in requests if request.done()]:
                number, completion = requests.pop(request), request.result()
                episodes.append(number, completion.tokens, completion.logprobs)
                episodes.end_turns(np.array([number]), environments, self._stop_ids)
                # The turn continues if only the server's tokenizer saw a stop string in these tokens.
                if episodes.states[number] == IN_TURN:
                    requests[submit_turn(number)] = number
            requests |= {submit_turn(number): number for number in episodes.append_answers()}
            report_ended(episodes.count_newly_ended())
        return episodes.rollouts(group_size, versions)

    def _sampling_params(self, sampling: Sampling) -> dict[str, Any]:
        """Returns the sampling parameters that all requests of a call share."""
        # This bias gives tokens that the model never samples the probability 0, as in the trainer.
        biases = {str(token): MIN_LOGIT_BIAS for token in self._model.hidden_tokens}
        return ({"logit_bias": biases} if biases else {}) | {
            # 0 requests the log-probability of the sampled token alone; 1 would add the most likely token.
            "logprobs": 0,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": list(self._stop_ids),
            # Ignore the end token of the server's tokenizer, because it may not be a stop token of the run.
            "ignore_eos": True,
        }

    def _request_group(self, prompt: int, request: dict[str, Any], expanded: list[int]) -> list[Completion]:
        """Returns the completions of a request. If a server is unavailable, sends the request to the next one.

        prompt: index of the prompt in the batch. expanded: tokens of the request as the trainer has them, with all
        tokens of images.
        """

        def request_once(server: ServerConnection) -> list[Completion]:
            path = "/inference/v1/generate"
            answer = server.request("POST", path, request)
            WATCHDOG.report_progress()
            with self._json_lock, reading_answer(path):
                body = answer.json()
                if "content_parts" in request and (server_tokens := body.get("prompt_token_ids") or []) != expanded:
                    raise UserError(
                        f"vLLM at {server.url} turns a prompt with images into {len(server_tokens)} tokens that differ "
                        f"from the trainer's {len(expanded)}: start it with the run's model, and with the argument "
                        "--mm-processor-kwargs of docs/vllm.md"
                    )
                self._check_versions(server, body["choices"])
                return read_choices(server.url, body["choices"], request["sampling_params"], self._model.vocab_size)

        # Each prompt has a server that it asks first, so that the server's prefix cache serves all turns of the prompt.
        servers = [server for server in self._servers if server not in self._unavailable]
        return self._retry(request_once, islice(cycle(servers), prompt % len(servers), None))

    def _check_versions(self, server: ServerConnection, choices: list[dict[str, Any]]) -> None:
        """Checks that the last pushed weights sampled all tokens.

        Raises: Unavailable, if other weights sampled a token; UserError, if vLLM is too old to report the weights.
        """
        for choice in choices:
            if not (spans := choice.get("weight_versions")):
                raise UserError(
                    "config.engine: the vLLM server does not report the weights that sampled a token; use vLLM 0.32 or "
                    "newer"
                )
            if any(server.version_of(span["version"]) != self._weight_file.version for span in spans):
                raise Unavailable("a completion came from other weights than those of the last push")

    def update_weights(self, params: PyTree, version: int = 0) -> None:
        """Pushes the parameters to all servers. Returns when one server has them and no available server lacks them."""
        self._weight_file.write(params, version)
        for server in self._servers:
            # A push that still waits for its server will push these weights when the server answers.
            if server not in self._pushes or self._pushes[server].done():
                self._pushes[server] = self._request_threads.submit(self._retry, ServerConnection.push, cycle([server]))
        with progress.task("waiting until vLLM has the weights"):
            # The wait may take minutes while a server starts.
            self._wait_for_pushes()
        unavailable = {server for server in self._servers if server.ready_version != version}
        for server in self._servers:
            if server in unavailable - self._unavailable:
                others = "the other servers sample until it answers again"
                print(f"note: vLLM at {server.url} is unavailable: {others}", flush=True)
            elif server in self._unavailable - unavailable:
                print(f"note: vLLM at {server.url} is available again", flush=True)
        self._unavailable = unavailable

    def _wait_for_pushes(self) -> None:
        """Waits for the last push to each server, but only SHORT_TIMEOUT more seconds once a server has the weights.

        Raises: UserError, if a server refuses the weights, or if all servers are unavailable.
        """
        pending = set(self._pushes.values())
        while pending:
            timeout = connection.SHORT_TIMEOUT if self._is_some_server_ready() else None
            finished, pending = wait(pending, timeout=timeout, return_when=FIRST_COMPLETED)
            if not finished:
                return
            for job in finished:
                error = job.exception()
                all_unavailable = not pending and not self._is_some_server_ready()
                if error and (all_unavailable or not isinstance(error, ServerLost)):
                    raise error

    def _is_some_server_ready(self) -> bool:
        return any(server.ready_version == self._weight_file.version for server in self._servers)

    def release(self) -> None:
        """Does nothing: the servers manage their own memory."""

    def close(self) -> None:
        """Cancels the requests, frees the servers for another run, and stops a managed server."""
        # Set this first, so that requests that fail from now on are not repeated.
        self._closed.set()
        self._request_threads.shutdown(wait=False, cancel_futures=True)
        for server in () if self._managed else self._servers:
            with suppress(Unavailable, UserError):
                server.free()
        if self._managed:
            self._managed.stop()
        for server in self._servers:
            server.close()
        self._weight_file.close()

    def _retry(self, action: Callable[[ServerConnection], T], servers: Iterable[ServerConnection]) -> T:
        """Returns action(server). If the server is unavailable, tries the next of the endless `servers`.

        Raises: ServerLost, after config.engine.patience seconds without success.
        """
        end, pause = 0.0, connection.RETRY_PAUSES[0]  # time at which retries end, 0 before the first failure; seconds
        for server in servers:
            try:
                if end:
                    # A retry pushes first, because the server may have lost its weights.
                    server.push()
                return action(server)
            except Unavailable as error:
                end = end or time.monotonic() + self._patience
                if self._managed:
                    self._managed.check()
                    # A managed server loads and compiles before its first answer. Wait as long as its log grows.
                    if not server.has_answered and self._managed.has_log_grown():
                        WATCHDOG.report_progress()
                        end = time.monotonic() + self._patience
                if time.monotonic() > end or self._closed.wait(pause):
                    remedy = f"see {self._managed.log}" if self._managed else "see its log and restart it"
                    raise ServerLost(
                        f"config.engine.patience = {self._patience:g} seconds have passed, and vLLM at {server.url} "
                        f"still fails ({error}): {remedy}; the same command resumes the run"
                    ) from None
                pause = min(2 * pause, connection.RETRY_PAUSES[1])
        raise AssertionError("servers is endless")
