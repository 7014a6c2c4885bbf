"""A trainer's connection to one vLLM server: its requests, what their errors mean, and the weights that it has."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Lock
from typing import Any

import httpx

from jaxrl_llm.errors import UserError
from jaxrl_llm.machine.hang import WATCHDOG
from jaxrl_llm.rollout.protocol import EngineInputs
from jaxrl_llm.rollout.vllm import address, weights
from jaxrl_llm.rollout.vllm.answers import Unavailable, reading_answer
from jaxrl_llm.rollout.vllm.server_checks import check_model, check_settings

# Seconds: timeout of short requests, and longest wait for a server's lock.
SHORT_TIMEOUT = 10.0
# Seconds: the first and the longest pause before a retry. Each retry doubles the pause.
RETRY_PAUSES = (0.5, 5.0)
RETRY_STATUSES = (408, 429)  # HTTP statuses of a proxy that may accept the request later
# Lines of /metrics that count a server's prompt and completion tokens.
TOKEN_COUNTERS = re.compile(r"^vllm:(?:prompt|generation)_tokens_total\b.*", re.MULTILINE)


class ServerConnection:
    """A connection to a server, which may fail and restart during a run."""

    def __init__(
        self,
        url: str,
        inputs: EngineInputs,
        weight_file: weights.WeightFile,
        *,
        run: str,
        limits: httpx.Limits,
        timeout: float,
        engine_closed: Event,
    ):
        """weight_file: the weights that the run offers. run: id of the run. limits: most connections. timeout: seconds
        without an answer, a token or a byte after which a request fails. engine_closed: is set when the run ends.
        """
        self.url = url.rstrip("/")
        self.has_answered = False  # whether the server has answered since the run started
        # Version of the server's weights; None before the first push, and after an unfinished one.
        self.ready_version: int | None = None
        self._inputs, self._weight_file, self._closed = inputs, weight_file, engine_closed
        self._tag_prefix, self._timeout, self._noted_slow = f"jaxrl_llm:{run}:", timeout, False
        # pool=None lets a request wait for a free connection without a limit.
        timeouts = httpx.Timeout(timeout, connect=5.0, pool=None)
        self._client = address.client(self.url, limits, self._is_working, timeout=timeouts)
        # The monitor is a separate client, because a client whose read timed out asks the monitor.
        self._monitor = address.client(self.url, timeout=SHORT_TIMEOUT)
        self._lock = Lock()

    def request(self, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """Returns the server's answer with status 200. Raises: Unavailable, if a retry may help; UserError, if not."""

        def send() -> httpx.Response:
            return self._client.request(method, path, json=body, **options)

        try:
            try:
                answer = send()
            except httpx.RemoteProtocolError:
                # The server has closed this idle connection, so send the request on a new one.
                answer = send()
        except httpx.ReadTimeout:
            seconds = options.get("timeout", self._timeout)
            raise Unavailable(f"neither an answer nor a new token for {seconds:g} s at {path}") from None
        except (httpx.TransportError, RuntimeError) as error:
            if "[SSL: " in str(error):
                raise UserError(
                    f"config.engine.servers: {self.url}: {error}; use http:// for a server without TLS, or https:// "
                    "with a certificate that this host trusts"
                ) from None
            # httpx raises RuntimeError if the client was closed.
            raise Unavailable(f"{type(error).__name__} {error} at {path}") from None
        if answer.status_code == 200:
            return answer
        message = " ".join(answer.text[:400].split())
        if answer.status_code == 404:
            raise UserError(f"vLLM at {self.url} has no {path}: start it with jaxrl serve-vllm and vLLM 0.32")
        # vLLM answers 500 if `vllm.receive` refuses a push, whose text starts with this word. A retry would fail too.
        if "refused: " in message or (answer.status_code < 500 and answer.status_code not in RETRY_STATUSES):
            raise UserError(f"the vLLM server at {self.url} refuses a request to {path}: {message}")
        raise Unavailable(f"{answer.status_code} {message} at {path}")

    def _is_working(self) -> bool:
        """Returns whether the server computes a token or receives a byte of weights within SHORT_TIMEOUT seconds.

        If so, the request that timed out only takes long.
        """
        first_counts, end, sent_before = None, time.monotonic() + SHORT_TIMEOUT, self._weight_file.sent(self.url)
        with suppress(httpx.TransportError, RuntimeError):  # RuntimeError: the client was closed
            while time.monotonic() < end and not self._closed.is_set():
                if self._weight_file.sent(self.url) != sent_before:
                    WATCHDOG.report_progress()
                    return True
                counts = TOKEN_COUNTERS.findall(self._monitor.get("/metrics").text)
                first_counts = counts if first_counts is None else first_counts
                if counts != first_counts:
                    WATCHDOG.report_progress()
                    if not self._noted_slow:
                        self._noted_slow = True
                        print(f"note: vLLM at {self.url} needs more than {self._timeout:g} s for an answer", flush=True)
                    return True
                self._closed.wait(RETRY_PAUSES[0])
        return False

    def push(self) -> None:
        """Pushes the newest weights to the server, unless it has them."""

        def post(path: str, body: Any = None) -> httpx.Response:
            return self.request("POST", path, body)

        with self._exclusive():
            server_version = self._read_version()
            # A fresh server has no weights of this run (version below 0, after a restart) or an unfinished push.
            is_fresh = server_version < 0 or self.ready_version is None
            # Read the version before the push: the file may be newer than this version, but never older.
            version = self._weight_file.version
            if server_version == version and not is_fresh:
                return
            # Mark the server as not ready, so that after a failed push the next push checks it again.
            self.ready_version = None
            if is_fresh:
                self.check()
                # A trainer that was killed during a push has left the server paused.
                post("/resume")
                post("/collective_rpc", {"method": "forget_push"})
                post("/init_weight_transfer_engine", {"init_info": {"tensors": self._weight_file.tensor_shapes}})
            weights.pull(post, self._weight_file.source(self.url), f"{self._tag_prefix}{version}")
            self.ready_version = version

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Holds the server's lock. Raises: Unavailable, if another thread holds it for SHORT_TIMEOUT seconds."""
        if not self._lock.acquire(timeout=SHORT_TIMEOUT):
            raise Unavailable("another request still waits for it")
        try:
            yield
        finally:
            self._lock.release()

    def _read_version(self) -> int:
        """Returns the weight version that the server reports, -1 if no run has pushed its weights."""
        path = "/weight_info"
        answer = self.request("GET", path, timeout=SHORT_TIMEOUT)
        with reading_answer(path):
            version = self.version_of(answer.json()["weight_version"])
        self.has_answered = True
        return version

    def version_of(self, tag: str) -> int:
        """Returns the version in a weight tag, -1 if no run has pushed these weights.

        Raises: UserError, if the weights are of another run.
        """
        if tag.startswith("jaxrl_llm:") and not tag.startswith(self._tag_prefix):
            raise UserError(
                f"config.engine.servers: the vLLM server serves another run ({tag}); start one server per run. If that "
                "run has ended, free the server: curl -X POST SERVER/update_weight_version "
                """-H 'content-type: application/json' -d '{"new_version": "default"}'"""
            )
        return int(tag.removeprefix(self._tag_prefix)) if tag.startswith(self._tag_prefix) else -1

    def check(self) -> None:
        """Raises: UserError, if the server's settings or its model do not fit the run."""
        path = "/server_info?config_format=json"
        answer, model = self.request("GET", path), self._inputs.model.cfg
        with reading_answer(path):
            server_config = answer.json()["vllm_config"]
            limits = self._inputs.max_prompt_tokens, self._inputs.max_completion_tokens
            check_settings(self.url, server_config, model.dtype, *limits)
        path = "/collective_rpc"
        answer = self.request("POST", path, {"method": "config_json"})
        with reading_answer(path):
            check_model(self.url, answer.json()["results"][0], model)

    def free(self) -> None:
        """Aborts the run's requests, and lets another run use the server."""
        with self._exclusive():
            if self._read_version() >= 0:
                for path, body in (("/abort_requests", {}), ("/update_weight_version", {"new_version": "default"})):
                    self.request("POST", path, body, timeout=SHORT_TIMEOUT)

    def close(self) -> None:
        self._client.close()
        self._monitor.close()
