"""The `Engine` protocol over HTTP, for vLLM servers that may fail and restart."""

from __future__ import annotations

import hashlib
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
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
from jaxrl_llm.models import hf, names
from jaxrl_llm.rollout.episodes import TURN, Episodes
from jaxrl_llm.rollout.protocol import EngineInputs, Environments
from jaxrl_llm.rollout.vllm import address, weights
from jaxrl_llm.rollout.vllm.answers import Completion, Unavailable, read_choices, reading
from jaxrl_llm.rollout.vllm.managed_server import ManagedServer
from jaxrl_llm.rollout.vllm.pictures import check_pictures, server_arguments, server_prompt
from jaxrl_llm.rollout.weight_check import MAX_GAP
from jaxrl_llm.structs import Prompts, PyTree, Rollouts

# Seconds: timeout of short requests, and of the wait for a server's lock.
SOON = 10.0
# Seconds: the first and the longest pause before a retry; each retry doubles it.
WAITS = (0.5, 5.0)
SETTINGS = {  # required settings of a server, and the reason: its samples must mean the same as ours
    "logprobs_mode": ("processed_logprobs", "its log-probabilities would not be of the distribution sampled"),
    "generation_config": ("vllm", "the model folder's generation_config.json would change the sampling"),
}
BUSY = (408, 429)  # statuses that a proxy gives to a request that it may take later
# Counters of a server's tokens in /metrics, of prompts and completions.
TOKENS = re.compile(r"^vllm:(?:prompt|generation)_tokens_total\b.*", re.MULTILINE)
NEVER = -100.0  # the least bias of a logit that vLLM takes
# Fields of a model's config that may differ between server and trainer: both read the same prompts and weights.
TRAINER_FIELDS = ("max_positions", "dtype", "remat", "transposed", "row_parts")
T = TypeVar("T")


class Away(PeerLost):
    """A server was unavailable for as long as the run is patient."""


def start(
    inputs: EngineInputs, *, managed: Callable[..., ManagedServer] | None, servers: tuple[str, ...], **settings: Any
) -> VllmEngine:
    """Starts the engine, and its server by managed(folder, ...). settings: fields of `engines.vllm`.

    Raises: UserError.
    """
    check_pictures(inputs.pictures)
    settings["max_gap"] = settings["max_gap"] or MAX_GAP[inputs.model.cfg.dtype]
    servers = tuple(own_address(server, "servers") for server in servers)
    if settings["push_address"]:
        settings["push_address"] = own_address(settings["push_address"], "push_address")
    server = managed and managed(
        inputs.folder,
        dtype=inputs.model.cfg.dtype,
        max_model_len=inputs.max_prompt_tokens + inputs.max_completion_tokens,
        more=server_arguments(inputs.pictures),
        log=inputs.workdir / (f"vllm-{distributed.index()}.log" if distributed.count() > 1 else "vllm.log"),
    )
    # Does not change when the run resumes. Each process has its own servers, and a file of weights for them.
    where = f"{socket.gethostname()} {inputs.workdir.absolute()} {distributed.index() or ''}".strip()
    try:
        return VllmEngine(
            (server.url,) if server else servers,
            inputs,
            run=hashlib.sha256(where.encode()).hexdigest()[:12],
            managed=server,
            **settings,
        )
    except UserError:
        if server:
            server.stop()
        raise


def own_address(template: str, field: str) -> str:
    """Returns an address of the config for this process: {process} becomes its number.

    Raises: UserError, if all processes of a run would have the same one.
    """
    if distributed.count() > 1 and "{process}" not in template:
        raise UserError(
            f"config.engine.{field}: {template!r} is the same in all {distributed.count()} processes: write "
            "{process} where the number of the process belongs, as in 'http://gpu-{process}:8000'"
        )
    return template.replace("{process}", str(distributed.index()))


class VllmEngine:
    """Samples from vLLM servers and pushes weights to them. Each server belongs to one run.

    The server reports, for every token, the version of the weights that sampled it. If a server is down, restarts or
    loses its weights, the engine pushes them again and repeats its requests, for at most `patience` seconds. Of several
    servers, those that are away miss a push. They sample nothing until they have the newest weights.
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
        """run: id of the run; push_address: address of this host, for a push over HTTP; max_gap: largest difference of
        log-probabilities (`protocol.Engine`), None to check none.

        Raises: UserError, like `WeightFile`.
        """
        self.max_gap = max_gap
        self._servers = tuple(server.rstrip("/") for server in servers)
        self.servers = len(servers)
        model = inputs.model.cfg
        self._run = f"jaxrl_llm:{run}:"
        self._table = names.family_table(model.family)
        self._offer = weights.WeightFile(
            Path(weights_dir) / f"{address.FOLDER}{run}", model.dtype, self._table, address=push_address
        )
        self._length, self._width = inputs.max_completion_tokens, inputs.max_prompt_tokens
        self._stops, self._pad, self._patience, self._managed = inputs.stop_ids, inputs.pad_id, patience, managed
        self._model = model
        at_once = concurrency * len(servers)
        limits = httpx.Limits(max_connections=at_once + len(servers), max_keepalive_connections=at_once)
        # pool=None: a request may wait for a free connection as long as the others run.
        times = httpx.Timeout(timeout, connect=5.0, pool=None)
        self._timeout, self._slow = timeout, set[str]()
        self._clients = {
            server: address.client(server, limits, partial(self._works, server), timeout=times)
            for server in self._servers
        }
        # Other clients, because a time-out of the first ones asks these.
        self._monitors = {server: address.client(server, timeout=SOON) for server in self._servers}
        # One thread more for each server: a push that waits for a server that is away takes no place of a request.
        self._pool = ThreadPoolExecutor(at_once + len(servers))
        # One answer is JSON at a time.
        self._reading = Lock()
        self._locks = {server: Lock() for server in self._servers}
        # Versions of the servers that have been checked, with no unfinished push.
        self._ready: dict[str, int] = {}
        # The last push to each server.
        self._pushes: dict[str, Future[None]] = {}
        # Servers that have missed the last push.
        self._away: set[str] = set()
        self._tensors: dict[str, list[int]] = {}
        self._version, self._closed = 0, Event()
        # Whether a server has answered since the run began.
        self._answered = False

    def sample(
        self,
        prompts: Prompts,
        key: jax.Array,
        *,
        group_size: int,
        sampling: Sampling,
        environments: Environments | None = None,
        max_tokens: np.ndarray | None = None,
        ended: Callable[[int], None] = lambda count: None,
    ) -> Rollouts:
        """Samples group_size completions of each prompt, or episodes, on the host. See `protocol.Engine`."""
        if environments:
            return self._sample_episodes(prompts, key, group_size, sampling, environments, ended)
        shape = (len(prompts.tokens), group_size, self._length)
        limits = np.full(shape[:2], self._length) if max_tokens is None else np.minimum(max_tokens, self._length)
        # vLLM gives member i of a request the seed plus i: leave room below 2**31.
        count = len(prompts.tokens) * distributed.count()
        seeds = np.asarray(jax.random.randint(key, (count,), 0, 2**31 - 1 - group_size))[distributed.part(count)]
        # The text is made here: the server need not make it too.
        body = self._sampling_params(sampling) | {"detokenize": False}
        # A group may have several requests.
        prompt_of = cache(partial(server_prompt, prompts))

        def request(b: int, first: int, members: np.ndarray, limit: int) -> dict[str, Any]:
            mine = {"n": len(members), "max_tokens": limit, "seed": int(seeds[b] + first)}
            return prompt_of(b).request([]) | {"sampling_params": body | mine}

        # One request for all members of a group with the same limit, so that they share the prompt on the server.
        # Seeds of a group's requests follow each other: two members never have the same one.
        parts = [
            (b, int(np.sum(row < n)), np.flatnonzero(row == n), int(n))
            for b, row in enumerate(limits)
            for n in np.unique(row)
        ]
        jobs = [self._pool.submit(self._group, part[0], request(*part), prompt_of(part[0]).expanded) for part in parts]
        # An error ends the wait: the other requests may take minutes.
        for job in as_completed(jobs):
            ended(len(job.result()))
        answers = [job.result() for job in jobs]
        tokens, logprobs = np.full(shape, self._pad, np.int32), np.zeros(shape, np.float32)
        versions = np.full(shape, self._version, np.int32)
        mask, truncated = np.zeros(shape, bool), np.zeros(shape[:2], bool)
        for (b, _, members, _), completions in zip(parts, answers, strict=True):
            for completion in completions:
                at = b, members[completion.index], slice(len(completion.tokens))
                tokens[at], logprobs[at], mask[at] = completion.tokens, completion.logprobs, True
                truncated[at[:2]] = completion.truncated
        return Rollouts(tokens, mask, mask, logprobs, truncated, versions)

    def _sample_episodes(
        self,
        prompts: Prompts,
        key: jax.Array,
        group_size: int,
        sampling: Sampling,
        environments: Environments,
        ended: Callable[[int], None],
    ) -> Rollouts:
        # A turn is a request with all tokens before it: the server finds their keys and values in its prefix cache.
        local_prompts = len(prompts.tokens)
        count = local_prompts * group_size * distributed.count()
        seeds = np.asarray(jax.random.randint(key, (count,), 0, 2**31 - 1))[distributed.part(count)]
        episodes = Episodes.empty(np.full(local_prompts * group_size, self._length), self._length, self._pad)
        versions = np.full(episodes.tokens.shape, self._version, np.int32)
        body, prompt_of = self._sampling_params(sampling), cache(partial(server_prompt, prompts))
        # Strings end a turn on the server too, so that it does not sample on. They are looked for in the text.
        body |= {"stop": list(environments.stops), "include_stop_str_in_output": True, "detokenize": True}

        def ask(i: int) -> Completion:
            b, length = i // group_size, int(episodes.length[i])
            before = episodes.tokens[i, :length].tolist()
            max_tokens = int(episodes.limits(environments.turn_tokens)[i]) - length
            # Another seed for each turn: the server counts its random numbers from the seed in each request, so that
            # all turns would be drawn with the same ones.
            mine = {"n": 1, "max_tokens": max_tokens, "seed": int((int(seeds[i]) + length) % (2**31 - 1))}
            request = prompt_of(b).request(before) | {"sampling_params": body | mine}
            return self._group(b, request, prompt_of(b).expanded + before)[0]

        requests = {self._pool.submit(ask, i): i for i in range(local_prompts * group_size)}
        while requests or episodes.answers:
            pending: list[Future[Any]] = [*requests, *episodes.answers]
            wait(pending, return_when=FIRST_COMPLETED)
            for request in [request for request in requests if request.done()]:
                i, completion = requests.pop(request), request.result()
                episodes.append(i, completion.tokens, completion.logprobs)
                episodes.end_turns(np.array([i]), environments, self._stops)
                # The server's tokenizer made a stop string of tokens whose text has none for the trainer.
                if episodes.state[i] == TURN:
                    requests[self._pool.submit(ask, i)] = i
            requests |= {self._pool.submit(ask, i): i for i in episodes.take_answers()}
            ended(episodes.newly_ended())
        return episodes.rollouts(group_size, versions)

    def _sampling_params(self, sampling: Sampling) -> dict[str, Any]:
        """Returns the parameters of a request that are the same for all."""
        # NEVER is so low that a token of `hidden_tokens` has the probability 0, as in the trainer.
        never = (
            {"logit_bias": {str(token): NEVER for token in self._model.hidden_tokens}}
            if self._model.hidden_tokens
            else {}
        )
        return never | {
            # 0 asks for the log-probability of the sampled token alone. 1 would also send the most likely token.
            "logprobs": 0,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": list(self._stops),
            # The end token is that of the server's tokenizer, which may be none of the run's stops.
            "ignore_eos": True,
        }

    def _group(self, b: int, request: dict[str, Any], expanded: list[int]) -> list[Completion]:
        """Returns the completions of prompt b's group. If a server is unavailable, asks the next one.

        expanded: the tokens of the request as the trainer has them.
        """

        def once(server: str) -> list[Completion]:
            path = "/inference/v1/generate"
            answer = self.request(server, "POST", path, request)
            WATCHDOG.moved()
            with self._reading, reading(path):
                body = answer.json()
                if "content_parts" in request and (theirs := body.get("prompt_token_ids") or []) != expanded:
                    raise UserError(
                        f"vLLM at {server} makes {len(theirs)} tokens of a prompt with pictures, and the trainer other "
                        f"{len(expanded)}: start it with the run's model, and with the arguments --mm-processor-kwargs "
                        "that docs/vllm.md gives for pictures"
                    )
                self._check_versions(body["choices"])
                return read_choices(server, body["choices"], request["sampling_params"], self._model.vocab_size)

        # A prompt always begins at the same server of those that answer, so that its prefix cache serves all turns.
        servers = [server for server in self._servers if server not in self._away]
        return self._persist(once, islice(cycle(servers), b % len(servers), None))

    def _check_versions(self, choices: list[dict[str, Any]]) -> None:
        """Raises: Unavailable, if a token is of other weights than the last pushed; UserError, if vLLM is too old."""
        for choice in choices:
            if not (spans := choice.get("weight_versions")):
                raise UserError("the vLLM server does not say which weights made a token: take vLLM 0.32 or newer")
            if any(self._number(span["version"]) != self._version for span in spans):
                raise Unavailable("a completion came from other weights than the last pushed")

    def _number(self, tag: str) -> int:
        """Returns the version of weights with this tag; -1: of no run. Raises: UserError, if of another run."""
        if tag.startswith("jaxrl_llm:") and not tag.startswith(self._run):
            raise UserError(
                f"the vLLM server serves another run ({tag}): start a server for each run; if that one is over, free "
                """it: curl -X POST SERVER/update_weight_version -H 'content-type: application/json' """
                """-d '{"new_version": "default"}'"""
            )
        return int(tag.removeprefix(self._run)) if tag.startswith(self._run) else -1

    def update_weights(self, params: PyTree, version: int = 0) -> None:
        """Pushes the parameters to all servers. Returns when every server has them, or one has and others are away."""
        self._tensors = {name: list(shape) for name, shape in names.tensor_shapes(params, self._table).items()}
        # The weights are written before the version changes. `_bring` reads the version first, so old weights never go
        # out under a new number.
        self._offer.write(params)
        self._version = version
        for server in self._servers:
            # A push that still waits for its server brings these weights when the server answers.
            if server not in self._pushes or self._pushes[server].done():
                self._pushes[server] = self._pool.submit(self._persist, self._bring, cycle([server]))
        with progress.task("waiting until vLLM has the weights"):
            # A server that starts takes minutes.
            self._wait_for_pushes()
        away = {server for server in self._servers if self._ready.get(server) != version}
        for server in sorted(away - self._away):
            print(f"note: vLLM at {server} is away: the other servers sample until it answers again", flush=True)
        for server in sorted(self._away - away):
            print(f"note: vLLM at {server} is back", flush=True)
        self._away = away

    def _wait_for_pushes(self) -> None:
        """Waits for the last push to each server, but only SOON seconds more once one server has the weights.

        Raises: UserError, if a server refuses the weights, or if all servers are away.
        """
        pending = set(self._pushes.values())
        while pending:
            some = self._version in self._ready.values()
            finished, pending = wait(pending, timeout=SOON if some else None, return_when=FIRST_COMPLETED)
            if not finished:
                return
            for job in finished:
                error = job.exception()
                all_away = not pending and self._version not in self._ready.values()
                if error and (all_away or not isinstance(error, Away)):
                    raise error

    def release(self) -> None:
        """Does nothing: the servers manage their own memory."""

    def close(self) -> None:
        """Cancels the requests, frees the servers for another run, and stops a managed server."""
        # First: what fails from now on is not tried again.
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for server in () if self._managed else self._servers:
            with suppress(Unavailable, UserError), self._alone(server):
                if self._has(server) >= 0:
                    self.request(server, "POST", "/abort_requests", {}, timeout=SOON)
                    self.request(server, "POST", "/update_weight_version", {"new_version": "default"}, timeout=SOON)
        if self._managed:
            self._managed.stop()
        for client in (*self._clients.values(), *self._monitors.values()):
            client.close()
        self._offer.close()

    def _persist(self, action: Callable[[str], T], servers: Iterable[str]) -> T:
        """Returns action(server). On Unavailable, tries the next of the endless `servers`, until patience ends."""
        end, pause = 0.0, WAITS[0]
        for server in servers:
            try:
                if end:
                    # A retry pushes first, because the server may have lost its weights.
                    self._bring(server)
                return action(server)
            except Unavailable as error:
                end = end or time.monotonic() + self._patience
                if self._managed:
                    self._managed.check()
                    # A managed server loads and compiles before its first answer, for as long as its log grows.
                    if not self._answered and self._managed.writes():
                        WATCHDOG.moved()
                        end = time.monotonic() + self._patience
                if time.monotonic() > end or self._closed.wait(pause):
                    where = f"see {self._managed.log}" if self._managed else "look at its log and start it again"
                    raise Away(
                        f"vLLM at {server}: {error}, for {self._patience:g} s: {where}; the same command resumes"
                    ) from None
                pause = min(2 * pause, WAITS[1])
        raise AssertionError("servers is endless")

    def _bring(self, server: str) -> None:
        """Pushes the current weights to a server that does not have them."""

        def post(path: str, body: Any = None) -> httpx.Response:
            return self.request(server, "POST", path, body)

        with self._alone(server):
            has = self._has(server)
            # A fresh server was restarted, or has an unfinished push.
            fresh = has < 0 or server not in self._ready
            # The file may be newer than this version, but not older.
            version = self._version
            if has == version and not fresh:
                return
            # The server stops being ready before the push, so that after a failure the next push starts from the check.
            self._ready.pop(server, None)
            if fresh:
                self._check(server)
                # A trainer killed during a push leaves the server paused.
                post("/resume")
                post("/collective_rpc", {"method": "forget_push"})
                post("/init_weight_transfer_engine", {"init_info": {"tensors": self._tensors}})
            weights.pull(post, self._offer, f"{self._run}{version}")
            self._ready[server] = version

    @contextmanager
    def _alone(self, server: str) -> Iterator[None]:
        """Holds the lock of a server. Raises: Unavailable, if another thread keeps it too long."""
        if not self._locks[server].acquire(timeout=SOON):
            raise Unavailable("another request waits for it")
        try:
            yield
        finally:
            self._locks[server].release()

    def _has(self, server: str) -> int:
        """Returns the weight version that the server reports; -1: of no run."""
        path = "/weight_info"
        answer = self.request(server, "GET", path, timeout=SOON)
        with reading(path):
            number = self._number(answer.json()["weight_version"])
        self._answered = True
        return number

    def _check(self, server: str) -> None:
        """Raises: UserError, if the server's settings would change the samples or do not fit the run."""
        path = "/server_info?config_format=json"
        answer = self.request(server, "GET", path)
        with reading(path):
            self._check_settings(server, answer.json()["vllm_config"])
        path = "/collective_rpc"
        answer = self.request(server, "POST", path, {"method": "config_json"})
        with reading(path):
            self._check_model(server, answer.json()["results"][0])

    def _check_model(self, server: str, config_json: dict[str, Any]) -> None:
        """Compares all that the trainer reads from a config.json: models of equal shapes may compute otherwise."""
        ours = self._model
        try:
            theirs = hf.read_decoder_config(ours.family, config_json)
            theirs = replace(theirs, **{name: getattr(ours, name) for name in TRAINER_FIELDS})
        except UserError as error:
            raise UserError(f"vLLM at {server} serves another model ({error}): serve the run's model") from None
        if theirs.vision and ours.vision:
            # preprocessor_config.json has these.
            theirs = replace(
                theirs,
                vision=replace(theirs.vision, pixel_mean=ours.vision.pixel_mean, pixel_std=ours.vision.pixel_std),
            )
        pairs = {field.name: (getattr(theirs, field.name), getattr(ours, field.name)) for field in fields(ours)}

        def shown(name: str, their_value: Any, our_value: Any) -> str:
            # The value of a rotary embedding is left out, because it is a long list of frequencies.
            plain = isinstance(their_value, int | float | str)
            return f"{name} = {their_value}, not {our_value}" if plain else name

        if other := [shown(name, *pair) for name, pair in pairs.items() if pair[0] != pair[1]]:
            raise UserError(f"vLLM at {server} serves another model ({'; '.join(other)}): serve the run's model")

    def _check_settings(self, server: str, server_config: dict[str, Any]) -> None:
        model, backend = server_config["model_config"], (server_config["weight_transfer_config"] or {}).get("backend")
        for name, (required, reason) in SETTINGS.items():
            if model[name] != required:
                raise UserError(f"vLLM at {server} has {name} {model[name]!r}: start it with {required!r}: {reason}")
        if backend != "pull":  # that of `receive`
            raise UserError(
                f"vLLM at {server} has the weight-transfer backend {backend!r}: start it with jaxrl serve-vllm"
            )
        if self._length + self._width > model["max_model_len"]:
            raise UserError(
                f"vLLM at {server} takes {model['max_model_len']} tokens, prompt and completion may have "
                f"{self._width} + {self._length}: start it with a larger --max-model-len"
            )
        if model["dtype"] != f"torch.{self._model.dtype}":
            raise UserError(
                f"vLLM at {server} computes in {model['dtype']}, and config.model.dtype is {self._model.dtype!r}: make "
                "them one"
            )

    def _works(self, server: str) -> bool:
        """Returns whether a server computes tokens, or one takes weights, within SOON seconds: it only takes long."""
        first, end, sent = None, time.monotonic() + SOON, self._offer.sent
        with suppress(httpx.TransportError, RuntimeError):  # RuntimeError: the client was closed
            while time.monotonic() < end and not self._closed.is_set():
                if self._offer.sent != sent:
                    WATCHDOG.moved()
                    return True
                count = TOKENS.findall(self._monitors[server].get("/metrics").text)
                first = count if first is None else first
                if count != first:
                    WATCHDOG.moved()
                    if server not in self._slow:
                        self._slow.add(server)
                        print(f"note: vLLM at {server} samples an answer for over {self._timeout:g} s", flush=True)
                    return True
                self._closed.wait(WAITS[0])
        return False

    def request(self, server: str, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """Returns the answer of a server. Raises: Unavailable, if a retry may help; otherwise UserError."""

        def send() -> httpx.Response:
            return self._clients[server].request(method, path, json=body, **options)

        try:
            try:
                answer = send()
            except httpx.RemoteProtocolError:
                # The server has closed this kept connection.
                answer = send()
        except httpx.ReadTimeout:
            seconds = options.get("timeout", self._timeout)
            raise Unavailable(f"neither an answer nor a new token for {seconds:g} s at {path}") from None
        except (httpx.TransportError, RuntimeError) as error:
            if "[SSL: " in str(error):
                raise UserError(
                    f"config.engine.servers: {server}: {error}; take http:// for a server without TLS, and https:// "
                    "with a certificate that this host trusts"
                ) from None
            # RuntimeError: the client was closed.
            raise Unavailable(f"{type(error).__name__} {error} at {path}") from None
        if answer.status_code == 200:
            return answer
        message = " ".join(answer.text[:400].split())
        if answer.status_code == 404:
            raise UserError(f"vLLM at {server} has no {path}: start it with jaxrl serve-vllm and vLLM 0.32")
        # vLLM answers 500 for an error of our backend, whose text begins with this word. It would fail again.
        if "refused: " in message or (answer.status_code < 500 and answer.status_code not in BUSY):
            raise UserError(f"vLLM at {server} refuses {path}: {message}")
        raise Unavailable(f"{answer.status_code} {message} at {path}")
