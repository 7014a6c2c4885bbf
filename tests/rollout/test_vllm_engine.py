"""The vLLM engine against servers that only look like vLLM; tests/rollout/test_vllm.py asks real ones."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from threading import Event, Thread, Timer
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError

import httpx
import jax
import numpy as np
import pytest

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import distributed, meshes
from jaxrl_llm.models import hf
from jaxrl_llm.rollout import engines
from jaxrl_llm.rollout.protocol import EngineInputs
from jaxrl_llm.rollout.vllm import address, connection, engine, weights
from jaxrl_llm.rollout.vllm.engine import VllmEngine
from jaxrl_llm.rollout.weight_check import WeightCheck
from jaxrl_llm.structs import Prompts

GENERATE = "/inference/v1/generate"
ROOT = Path(__file__).parents[2]
FOLDER = Path(hf.__file__).parent.parent / "assets" / "arithmetic"
MODEL = hf.load_model(FOLDER)
CONFIG = {"model_config": {"logprobs_mode": "processed_logprobs", "generation_config": "vllm", "max_model_len": 10**6,
                           "dtype": "torch.float32"}, "weight_transfer_config": {"backend": "pull"}}  # fmt: skip


open_client = address.client


class Server:
    """Answers as vLLM does, while it is up. Its completions have `length` tokens."""

    def __init__(self, length: int):
        self.up, self.version, self.length = True, "default", length
        self.config_json = json.loads((FOLDER / "config.json").read_text())
        self.asked: Counter[str] = Counter()
        self.faults: dict[str, int] = {}  # by path: the status of its next answer, 0 for a connection that breaks
        self.spoiled: dict[str, Callable[[Any], Any]] = {}  # by path: what its next answer becomes
        self.before: dict[str, Callable[[], Any]] = {}  # by path: what happens before each answer
        self.settings, self.works = CONFIG, False

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if not self.up:
            raise httpx.ConnectError("[Errno 111] Connection refused")
        path, body = request.url.path, json.loads(request.content or b"null")
        self.asked[path] += 1
        self.before.get(path, bool)()
        if path == GENERATE:
            self.parameters = body["sampling_params"]
        if path in self.faults:
            self.version = "default"  # as after a restart
            if status := self.faults.pop(path):
                return httpx.Response(status)
            raise httpx.ReadError("[Errno 104] Connection reset by peer")
        if path in ("/finish_weight_update", "/update_weight_version"):
            self.version = body.get("weight_version") or body["new_version"]
        answers = {
            "/weight_info": lambda: {"weight_version": self.version},
            "/collective_rpc": lambda: {"results": [self.config_json]},
            "/server_info": lambda: {"vllm_config": self.settings},
            "/metrics": lambda: f'vllm:generation_tokens_total{{engine="0"}} {self.asked[path] * self.works}.0\n',
            GENERATE: lambda: {"choices": self.choices(body["sampling_params"]["n"])},
        }
        answer = answers[path]() if path in answers else ""
        if path in self.spoiled:
            answer = self.spoiled.pop(path)(answer)
        return httpx.Response(200, content=answer if isinstance(answer, str) else json.dumps(answer))

    def choices(self, n: int) -> list[dict[str, Any]]:
        content = [{"token": f"token_id:{t}", "logprob": -t / 7, "bytes": None, "top_logprobs": []}
                   for t in range(self.length)]  # fmt: skip
        spans = [{"start": 0, "end": self.length, "version": self.version}]
        tokens = [2 + t % 16 for t in range(self.length)]
        one = {"finish_reason": "length", "token_ids": tokens, "logprobs": {"content": content}}
        return [one | {"index": i, "weight_versions": spans} for i in range(n)]


@pytest.fixture(scope="module")
def params():
    return hf.load_params(FOLDER, MODEL, meshes.make_mesh(data=1, fsdp=1, tensor=1))


@contextmanager
def connected(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *servers: Any, length: int = 4, model: Any = MODEL, **changes: Any
) -> Iterator[VllmEngine]:
    """An engine with servers, each of which is a function of requests or the address of one that is `listening`."""
    named = {server if isinstance(server, str) else f"http://server{i}": server for i, server in enumerate(servers)}

    def client(server: str, *patience: Any, **options: Any) -> httpx.Client:
        if isinstance(named[server], str):
            return open_client(server, *patience, **options)
        return httpx.Client(base_url=server, transport=httpx.MockTransport(named[server]), **options)

    monkeypatch.setattr(address, "client", client)
    monkeypatch.setattr(connection, "SHORT_TIMEOUT", changes.pop("short_timeout", 0.3))
    monkeypatch.setattr(connection, "RETRY_PAUSES", (0.02, 0.05))
    usual = dict(weights_dir=str(folder), push_address="", concurrency=2, timeout=5.0, patience=30.0)
    inputs = EngineInputs(model, None, FOLDER, folder, 4, length, (1,), 0)
    with closing(VllmEngine(tuple(named), inputs, run="test", **usual | changes)) as made:
        yield made


def sample(engine: VllmEngine, prompts: int = 8, group_size: int = 2, **options: Any):
    shape = (prompts, 3)
    of = Prompts(np.ones(shape, np.int32), np.ones(shape, bool), [{"prompt": "?"}] * prompts, np.arange(prompts))
    return engine.sample(of, jax.random.key(0), group_size=group_size, sampling=Sampling(), **options)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_server_that_misses_a_push_samples_nothing_until_it_has_the_weights(
    params, tmp_path, monkeypatch, capsys, wording
):
    there, away = Server(4), Server(4)
    generated = lambda: [server.asked[GENERATE] for server in (there, away)]  # noqa: E731
    with connected(tmp_path, monkeypatch, there, away) as engine:
        engine.update_weights(params, 1)
        sample(engine)
        assert generated() == [4, 4]
        away.up = False
        for version in (2, 3):
            engine.update_weights(params, version)
            assert (sample(engine).versions == version).all()
        assert generated() == [20, 4]
        away.up = True  # with the weights of step 1, as after a network that was cut
        sample(engine)
        assert generated() == [28, 4]
        until(lambda: away.version.endswith(":3"))  # the push of step 3 still waited for it
        engine.update_weights(params, 4)
        assert (sample(engine).versions == 4).all()
        assert generated() == [32, 8]
    notes = [line for line in capsys.readouterr().out.splitlines() if "http://server" in line]
    assert len(notes) == 2 and all("server1" in note for note in notes)  # away, and back
    wording("\n".join(notes))


@pytest.mark.parametrize("statuses", [(0, 0), (500, 500), (0, 408), (0, 429)], ids=str)
def test_a_server_that_dies_in_a_push_or_in_requests_gets_the_weights_again(params, tmp_path, monkeypatch, statuses):
    server = Server(4)
    with connected(tmp_path, monkeypatch, server) as engine:
        server.faults["/update_weights"], server.faults[GENERATE] = statuses
        engine.update_weights(params, 1)
        assert server.version.endswith(":1") and server.asked["/update_weights"] == 2
        assert (sample(engine).versions == 1).all()
        assert server.version.endswith(":1") and server.asked["/update_weights"] == 3
        server.version = "default"  # somebody took its weights away
        assert (sample(engine).versions == 1).all()
        assert server.asked["/update_weights"] == 4
        server.version = "jaxrl_llm:another:1"
        with pytest.raises(UserError, match=server.version):
            sample(engine)


def test_a_refusal_is_told_where_the_connection_breaks_after_it(params, tmp_path, monkeypatch):
    """As vLLM does: it answers 500, closes the connection, and the next request may find it reset."""
    server = Server(4)

    def refuses(request: httpx.Request) -> httpx.Response:
        answer = server(request)  # /resume breaks once for each refusal
        if request.url.path != "/update_weights":
            return answer
        server.faults["/resume"] = 0
        return httpx.Response(500, text="ValueError: refused: head is not finite")

    with connected(tmp_path, monkeypatch, refuses) as engine:
        with pytest.raises(UserError):
            engine.update_weights(params, 1)
        assert server.asked["/update_weights"] == 1


@pytest.mark.parametrize("count", [1, 3, 6])
def test_the_weight_check_asks_every_server_that_samples(params, tmp_path, monkeypatch, count):
    servers, rows = [Server(4) for _ in range(count)], np.ones((16, 3), np.int32)
    collate = lambda numbers: Prompts(rows[numbers], rows[numbers] > 0, [{}] * len(numbers), np.asarray(numbers))  # noqa: E731
    with connected(tmp_path, monkeypatch, *servers) as engine:
        engine.update_weights(params, 1)
        WeightCheck(engine, MODEL, meshes.make_mesh(data=1, fsdp=1, tensor=1), collate, rows=16, bound=1.0).ask()
    assert all(server.asked[GENERATE] for server in servers)


@pytest.mark.parametrize(
    ("dtype", "given", "bound"), [("float32", 0.0, 1e-3), ("bfloat16", 0.0, 0.5), ("bfloat16", 0.1, 0.1)]
)
def test_the_bound_of_the_weight_check_follows_the_dtype(tmp_path, dtype, given, bound):
    choice = engines.vllm(managed=False, servers=("http://127.0.0.1:1",), weights_dir=str(tmp_path), max_gap=given)
    model = SimpleNamespace(cfg=replace(MODEL.cfg, dtype=dtype))
    with closing(choice.start(EngineInputs(model, None, FOLDER, tmp_path, 4, 4, (1,), 0))) as made:
        assert made.max_gap == bound


def member(**fields: Any) -> Callable[[Any], Any]:
    """Changes fields of the last completion of an answer."""
    return lambda answer: {"choices": [*answer["choices"][:-1], answer["choices"][-1] | fields]}


def scored(*logprobs: float | None) -> dict[str, Any]:
    return {"content": [{"logprob": x} for x in logprobs]}


BROKEN = [
    lambda answer: "<html>try again later</html>",
    lambda answer: json.dumps(answer)[:-9],
    lambda answer: {"error": "busy"},
    lambda answer: None,
    lambda answer: {"choices": answer["choices"][:1]},
    member(index=0),
    member(index=7),
    member(logprobs=None),
    member(logprobs=scored(-1.0)),
    member(token_ids=[2] * 5, logprobs=scored(*[-1.0] * 5)),  # of at most four
    member(token_ids=[], logprobs=scored()),
    member(token_ids=[10**12] * 4),
    member(finish_reason="abort"),
    member(weight_versions=[{"start": 0, "end": 4, "version": "default"}]),
]


@pytest.mark.parametrize("spoil", BROKEN)
def test_a_broken_answer_is_asked_for_again(params, tmp_path, monkeypatch, spoil):
    server = Server(4)
    with connected(tmp_path, monkeypatch, server) as engine:
        for path in ("/weight_info", "/server_info"):  # a page of a proxy, while vLLM starts
            server.spoiled[path] = BROKEN[0]
        engine.update_weights(params, 1)
        server.spoiled[GENERATE] = spoil
        rollouts = sample(engine, prompts=1)
    assert server.asked[GENERATE] == 2
    assert (rollouts.completions == [2, 3, 4, 5]).all() and rollouts.completion_mask.all()


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("norm_eps = 1e-05", {"rms_norm_eps": 1e-5}),
        ("rope", {"rope_theta": 12_000.0}),
        ("family = llama", {"model_type": "llama"}),
        ("rope", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),  # the trainer has none of the kind
        ("accepts 7 tokens, .* 4 .* 4", {"max_model_len": 7}),  # settings of the server
        ("torch.bfloat16", {"dtype": "torch.bfloat16"}),
    ],
)
def test_a_server_of_another_model_or_setting_is_refused_before_a_push(params, tmp_path, monkeypatch, field, change):
    server, is_setting = Server(4), change.keys() <= CONFIG["model_config"].keys()
    server.config_json |= {} if is_setting else change
    server.settings = CONFIG | {"model_config": CONFIG["model_config"] | (change if is_setting else {})}
    with connected(tmp_path, monkeypatch, server) as engine, pytest.raises(UserError, match=f"http://server0.*{field}"):
        engine.update_weights(params, 1)
    assert not server.asked["/update_weights"]


@pytest.mark.parametrize(
    "folder", sorted((ROOT / "tests" / "references").glob("*/config.json")), ids=lambda x: x.parent.name
)
def test_a_server_of_the_runs_model_is_accepted_in_every_family(params, tmp_path, monkeypatch, folder):
    """vLLM reads config.json with transformers, which adds defaults and moves fields."""
    from transformers import AutoConfig

    server, raw = Server(4), json.loads(folder.read_text())
    server.config_json = json.loads(AutoConfig.from_pretrained(folder.parent).to_json_string(use_diff=False))
    family = import_module(f"jaxrl_llm.models.{raw['model_type']}")
    with connected(tmp_path, monkeypatch, server, model=SimpleNamespace(cfg=family.decoder_config(raw))) as engine:
        engine._servers[0].check()


@pytest.mark.parametrize("page", ["", "<html></html>", "{}", "null", '{"weight_version": null}'])
def test_an_address_of_another_program_or_without_tls_ends_in_one_line(params, tmp_path, monkeypatch, page):
    def program(request: httpx.Request) -> httpx.Response:
        if not page:
            raise httpx.ConnectError("[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)")
        return httpx.Response(200, content=page)

    refused = pytest.raises(UserError, match=r"http://server0.* /weight_info " if page else r"config\.engine\.servers")
    patience = 0.1 if page else 30.0  # without TLS it is refused at once
    with connected(tmp_path, monkeypatch, program, patience=patience) as engine, refused:
        engine.update_weights(params, 1)


def ends(tokens: list[int], reason: str) -> dict[str, Any]:
    return dict(token_ids=tokens, logprobs=scored(*[-1.0] * len(tokens)), finish_reason=reason)


@pytest.mark.parametrize(
    "fields",
    [
        *({"logprobs": scored(-1.0, -1.0, -1.0, x)} for x in (float("nan"), None, -9999.0, float("-inf"), 5.0)),
        *({"token_ids": [2, 2, 2, x]} for x in (-1, 18)),
        ends([2, 3, 7], "stop"),  # the end token of the server's tokenizer
        ends([2, 1, 3], "length"),  # a stop token did not end it
        ends([2, 3], "length"),  # of four
        ends([2, 3, 4, 5], "stop"),
    ],
)
def test_tokens_and_ends_that_the_trainer_does_not_have_end_the_run(params, tmp_path, monkeypatch, fields):
    server = Server(4)
    with connected(tmp_path, monkeypatch, server) as engine:
        engine.update_weights(params, 1)
        server.spoiled[GENERATE] = member(**ends([2, 3, 1], "stop"))
        rollouts = sample(engine, prompts=1)
        assert rollouts.completions[0, 1].tolist() == [2, 3, 1, 0] and not rollouts.truncated[0, 1]
        assert server.parameters["ignore_eos"] and server.parameters["stop_token_ids"] == [1]
        server.spoiled[GENERATE] = member(**fields)
        words = f"http://server0.* token {fields['token_ids'][-1]}" if "finish_reason" in fields else "http://server0"
        with pytest.raises(UserError, match=words) as error:
            sample(engine, prompts=1)
    assert "\n" not in str(error.value)


class Ends:
    """Turns end with token 9, and a turn ends the episode."""

    turn_tokens = 8

    def stops(self, episode: int) -> tuple[str, ...]:
        return (".",)

    def find_turn_ends(self, episodes: list[int], turns: list[list[int]]) -> list[int]:
        return [turn.index(9) + 1 if 9 in turn else 0 for turn in turns]

    def answer(self, episode: int, turn: list[int]) -> Future[None]:
        future: Future[None] = Future()
        future.set_result(None)
        return future


def test_a_turn_goes_on_where_the_server_alone_sees_a_stop_string(params, tmp_path, monkeypatch):
    server = Server(4)
    with connected(tmp_path, monkeypatch, server, length=8) as engine:
        engine.update_weights(params, 1)
        ends = [lambda answer, x=x: member(token_ids=[2, x], logprobs=scored(-1, -1), finish_reason="stop")(answer)
                for x in (5, 9)]  # fmt: skip
        server.choices = lambda n: [ends.pop(0)({"choices": Server.choices(server, n)})["choices"][-1]]
        rollouts = sample(engine, prompts=1, group_size=1, environments=Ends(), report_ended=lambda count: None)
    assert rollouts.completions[0, 0].tolist() == [2, 5, 2, 9, 0, 0, 0, 0]
    assert rollouts.loss_mask.sum() == 4 and not rollouts.truncated.any()


def pull(source: dict[str, str]) -> None:
    """Takes the weights from the trainer."""
    with address.open_weights(source["url"], source["token"], 5.0) as response:
        response.read()


@contextmanager
def listening(answer: Callable[[httpx.Request], httpx.Response]) -> Iterator[str]:
    """Serves over TCP, where reads have time-outs."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            url = f"http://server{self.path}"
            response = answer(httpx.Request(self.command, url, headers=dict(self.headers), content=content))
            with suppress(BrokenPipeError):
                self.send_response(response.status_code)
                for name, value in response.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(response.content)

        do_GET = do_POST

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}).start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()  # its thread would keep a failed test from ending


IMPATIENT = dict(push_address="127.0.0.1", timeout=0.3, patience=0.2, short_timeout=0.5)


@pytest.mark.parametrize("works", [True, False])
def test_a_push_may_last_for_longer_than_a_time_out_while_bytes_are_sent(params, tmp_path, monkeypatch, works):
    monkeypatch.setattr(weights, "BLOCK", 2**16)
    whole, server = weights.WeightServer.send, Server(4)

    def slowly(self: Any, vllm: str, source: Any, sink: Any) -> None:
        whole(self, vllm, SimpleNamespace(read=lambda size: time.sleep(0.04) or source.read(size)), sink)

    monkeypatch.setattr(weights.WeightServer, "send", slowly)
    with listening(server) as url, connected(tmp_path, monkeypatch, url, **IMPATIENT) as client:
        pulls = partial(pull, client._weight_file.source(url)) if works else partial(time.sleep, 1)
        server.before["/update_weights"] = pulls
        with nullcontext() if works else pytest.raises(UserError, match="/update_weights"):
            client.update_weights(params, 1)
        assert server.version.endswith(":1") == works
    assert server.asked["/update_weights"] == 1 or not works


def test_each_process_starts_a_server_with_a_log_and_weights_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "count", lambda: 2)
    inputs = EngineInputs(MODEL, None, FOLDER, tmp_path, 4, 4, (1,), 0)
    settings = dict(weights_dir=str(tmp_path), push_address="", concurrency=2, timeout=5.0, patience=5.0, max_gap=0.0)
    logs, folders = [], set()
    for index in range(2):
        monkeypatch.setattr(distributed, "index", lambda index=index: index)

        def start(folder: Path, *, log: Path, **_: Any) -> Any:
            logs.append(log.name)
            return SimpleNamespace(url="http://server", stop=lambda: None)

        with closing(engine.start(inputs, managed=start, servers=(), **settings)) as made:
            folders.add(made._weight_file.folder)
    assert logs == ["vllm-0.log", "vllm-1.log"] and len(folders) == 2


def test_a_silent_server_is_lost_while_another_one_receives_bytes(params, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "BLOCK", 2**13)
    whole, silent, slow, was_lost, test_ends = weights.WeightServer.send, Server(4), Server(4), [], Event()

    def send(self: Any, vllm: str, source: Any, sink: Any) -> None:
        """Takes eight seconds, or ends soon after the silent server is lost."""
        is_lost = made._pushes[made._servers[0]].done
        whole(self, vllm, SimpleNamespace(read=lambda n: (is_lost() or time.sleep(0.02), source.read(n))[1]), sink)
        was_lost.append(is_lost())

    monkeypatch.setattr(weights.WeightServer, "send", send)
    with (
        listening(silent) as silent_url,
        listening(slow) as slow_url,
        connected(tmp_path, monkeypatch, silent_url, slow_url, **IMPATIENT) as made,
    ):
        silent.before["/update_weights"] = test_ends.wait
        slow.before["/update_weights"] = partial(pull, made._weight_file.source(slow_url))
        made.update_weights(params, 1)
        assert was_lost == [True]
        assert slow.version.endswith(":1") and silent.version == "default"
        test_ends.set()


@pytest.mark.parametrize("writes", [True, False])
def test_a_managed_server_may_start_for_as_long_as_its_log_grows(params, tmp_path, monkeypatch, writes):
    server, log = Server(4), tmp_path / "vllm.log"
    server.up = False
    managed = SimpleNamespace(check=lambda: None, has_log_grown=lambda: writes, log=log, stop=lambda: None)
    if writes:
        Timer(0.6, lambda: setattr(server, "up", True)).start()
    with connected(tmp_path, monkeypatch, server, patience=0.2, managed=managed) as made:
        with nullcontext() if writes else pytest.raises(UserError, match=r"vllm\.log"):
            made.update_weights(params, 1)
        assert server.version.endswith(":1") == writes
        if writes:
            # Once it has answered, it is away.
            server.up = False
            with pytest.raises(UserError, match=r"vllm\.log"):
                made.update_weights(params, 2)


@pytest.mark.parametrize("works", [True, False])
def test_a_time_out_drops_a_request_only_if_no_token_comes(params, tmp_path, monkeypatch, capsys, works):
    server = Server(4)
    server.works = works
    server.before[GENERATE] = lambda: server.asked[GENERATE] == 1 and time.sleep(3)
    limits = dict(timeout=0.4, short_timeout=1.0)
    with listening(server) as url, connected(tmp_path, monkeypatch, url, **limits) as made:
        made.update_weights(params, 1)
        rollouts = sample(made, prompts=1)
    assert rollouts.completion_mask.all()
    assert server.asked[GENERATE] == (1 if works else 2)
    assert capsys.readouterr().out.count("0.4 s") == works


def test_a_server_that_makes_other_tokens_of_an_image_is_refused(params, tmp_path, monkeypatch):
    server, expanded = Server(4), [2, 3]
    request = {"content_parts": [{}], "sampling_params": {"n": 1, "max_tokens": 4, "stop_token_ids": [1]}}
    with connected(tmp_path, monkeypatch, server) as engine:
        engine.update_weights(params, 1)
        server.spoiled[GENERATE] = lambda answer: answer | {"prompt_token_ids": expanded}
        assert len(engine._request_group(0, request, expanded)) == 1
        server.spoiled[GENERATE] = lambda answer: answer | {"prompt_token_ids": [2, 3, 3]}
        with pytest.raises(UserError, match="--mm-processor-kwargs"):
            engine._request_group(0, request, expanded)


def test_when_all_servers_are_away_one_line_ends_the_run(params, tmp_path, monkeypatch):
    servers = Server(4), Server(4)
    with connected(tmp_path, monkeypatch, *servers, patience=0.1) as engine:
        engine.update_weights(params, 1)
        for server in servers:
            server.up = False
        with pytest.raises(UserError, match=r"http://server\d .*ConnectError "):
            engine.update_weights(params, 2)


def test_an_answer_is_arrays_before_the_next_one_is_read(params, tmp_path, monkeypatch):
    """The JSON of all answers together would take 390 bytes for each token."""
    length, prompts, group_size = 500, 16, 4
    with connected(tmp_path, monkeypatch, Server(length), length=length) as engine:
        engine.update_weights(params, 1)
        tracemalloc.start()
        try:
            rollouts = sample(engine, prompts, group_size)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert (rollouts.completions == 2 + np.arange(length) % 16).all() and rollouts.truncated.all()
    np.testing.assert_allclose(
        rollouts.logprobs, np.broadcast_to(-np.arange(length) / 7, rollouts.logprobs.shape), 1e-6
    )
    assert peak / rollouts.completions.size < 200


def test_a_server_loads_weights_only_of_a_run_of_its_user(tmp_path, monkeypatch, refused):
    def made(folder: str, name: str = "model.safetensors", mode: int = 0o700) -> Path:
        file = tmp_path / folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("weights")
        file.parent.chmod(mode)
        return file

    right = made("jaxrl_llm-0123456789ab")
    assert address.check_weights(str(right)) == str(right)
    link = tmp_path / "jaxrl_llm-link" / "model.safetensors"
    link.parent.mkdir(mode=0o700)
    link.symlink_to(right)
    folder_link = tmp_path / "jaxrl_llm-folder"
    folder_link.symlink_to(right.parent)
    wrong = [
        link, folder_link / "model.safetensors", made("other"), made("jaxrl_llm-a", "other.safetensors"),
        made("jaxrl_llm-b", mode=0o755), Path("/etc/passwd"),
    ]  # fmt: skip
    for file in wrong:
        with refused("refused", str(file), error=ValueError):
            address.check_weights(str(file))
    monkeypatch.setattr(address.os, "geteuid", lambda: 12345)
    with refused("refused", str(right), error=ValueError):
        address.check_weights(str(right))


def test_a_server_opens_no_other_address_than_http_and_follows_no_redirect(tmp_path, refused):
    (tmp_path / "weights").write_text("secret")
    for url in (f"file://{tmp_path}/weights", "ftp://127.0.0.1/weights", f"{tmp_path}/weights", "data:,x"):
        with refused("refused", url, error=ValueError):
            address.open_weights(url, "token", 1.0)
    asked = []

    def redirect(request: httpx.Request) -> httpx.Response:
        asked.append((request.url.path, request.headers["Authorization"]))
        is_moved = request.url.path == "/weights"
        return httpx.Response(302 if is_moved else 200, headers={"Location": "/elsewhere"}, content=b"ok")

    with listening(redirect) as url:
        with pytest.raises(HTTPError):
            address.open_weights(f"{url}/weights", "token", 5.0)
        with address.open_weights(f"{url}/other", "token", 5.0) as answer:
            assert answer.read() == b"ok"
    assert asked == [("/weights", "Bearer token"), ("/other", "Bearer token")]
