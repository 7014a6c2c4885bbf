"""`jaxrl serve`: what it answers, what it refuses, what it records, and that its tokens are those of the sampler."""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import pytest
import uvicorn
from test_templates import of

import jaxrl_llm
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.machine import meshes
from jaxrl_llm.models import hf
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.rollout.jax.open_stream import NewTokens, OpenSequence
from jaxrl_llm.rollout.serving.application import application
from jaxrl_llm.rollout.serving.engine_thread import EngineThread
from jaxrl_llm.rollout.serving.service import ServedModel, Service
from jaxrl_llm.structs import Prompts
from jaxrl_llm.tools.serve import __main__ as serve

MODEL = Path(jaxrl_llm.__file__).parent / "assets" / "arithmetic"
ROWS, WAITING, ROUND = 4, 24, 0.002
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


class ScriptedStream:
    """Stands for an open stream: a sequence answers with the text after the last "say:", 3 tokens a round.

    The answer "forever" never ends by itself.
    """

    def __init__(self, engine: EngineThread, tokenizer: Any):
        self.engine, self.tokenizer, self.running = engine, tokenizer, dict[int, OpenSequence]()
        self.pause = threading.Event()
        self.pause.set()
        self.rounds = 0

    def run(self) -> None:
        answers, rows = {}, set(range(ROWS))
        while (arrived := self.engine.take(ROWS - len(self.running), wait=not self.running)) is not None:
            for sequence in arrived:
                row = min(rows - self.running.keys())
                self.running[row], answers[row] = sequence, self.answer(sequence)
            self.pause.wait()
            time.sleep(ROUND)
            self.rounds += 1
            for row, sequence in list(self.running.items()):
                if not sequence.cancelled:
                    tokens, answers[row] = answers[row][:3], answers[row][3:]
                    end = "" if answers[row] else "stop" if tokens[-1] in sequence.stop_ids else "length"
                    sequence.report(NewTokens(tokens, [-0.25 * (x % 7) for x in tokens], 3, end))
                if sequence.cancelled or not answers[row]:
                    del self.running[row]

    def answer(self, sequence: OpenSequence) -> list[int]:
        text = self.tokenizer.decode(sequence.prompt).rpartition("say:")[2].partition("<|im_end|>")[0]
        if text == "forever":
            return self.tokenizer("x")["input_ids"] * 10_000
        return [*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id][: sequence.max_tokens]


class Served:
    """A running server of this process."""

    def __init__(self, service: Service, port: int, stream: Any = None):
        self.service, self.stream, self.url = service, stream, f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=60)

    def chat(self, text: str, **fields: Any) -> dict[str, Any]:
        body = {"model": "tiny", "messages": [{"role": "user", "content": f"say:{text}"}]} | fields
        answer = self.http.post(fields.pop("path", "/v1/chat/completions"), json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def gauge(self, name: str) -> int:
        lines = dict(line.split() for line in self.http.get("/metrics").text.splitlines() if line[0] != "#")
        return int(lines[f"jaxrl_{name}"])


@contextmanager
def running(service: Service, stream: Any = None, **options: Any) -> Iterator[Served]:
    listener = serve.listen("127.0.0.1", 0)
    config = uvicorn.Config(application(service, **options), log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    made = Served(service, listener.getsockname()[1], stream)
    try:
        yield made
    finally:
        made.http.close()
        server.should_exit = True
        thread.join()
        service.engine.close()
        listener.close()


@contextmanager
def scripted(**options: Any) -> Iterator[Served]:
    tokenizer, engine = of("qwen2_5"), EngineThread(WAITING)
    model = ServedModel(
        name="tiny", tokenizer=tokenizer, stop_ids=frozenset({tokenizer.eos_token_id}), vocab_size=len(tokenizer),
        max_prompt_tokens=700, max_completion_tokens=600, sampling=Sampling(), max_sessions=3,
    )  # fmt: skip
    stream = ScriptedStream(engine, tokenizer)
    engine.start(stream)  # pyright: ignore[reportArgumentType]
    with running(Service(model, engine), stream, **options) as made:
        yield made


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with scripted(max_body_bytes=20_000) as made:
        yield made


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_chat_has_text_usage_and_what_was_asked_of_its_tokens(served):
    answer = served.chat("Grüße 🙂", logprobs=True, return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Grüße 🙂"} and choice["finish_reason"] == "stop"
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == len(choice["logprobs"]["content"])
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    plain = served.chat("Grüße 🙂")["choices"][0]
    assert plain["logprobs"] is None and "token_ids" not in plain
    assert served.chat("Grüße", max_completion_tokens=2)["choices"][0]["finish_reason"] == "length"


def test_a_stop_string_ends_the_text_before_it_and_the_tokens_after_it(served):
    full = served.chat("one two STOP three", return_token_ids=True)["choices"][0]
    cut = served.chat("one two STOP three", stop=["zzz", "STOP"], return_token_ids=True)["choices"][0]
    assert cut["message"]["content"] == "one two " and cut["finish_reason"] == "stop"
    assert cut["token_ids"] == full["token_ids"][: len(cut["token_ids"])]
    assert served.service.model.tokenizer.decode(cut["token_ids"]).endswith("STOP")


def test_a_stream_has_the_pieces_of_the_whole_answer(served):
    fields = dict(stop=["STOP"], logprobs=True, return_token_ids=True, n=2)
    whole = served.chat("Grüße 🙂 an STO alle STOP", **fields)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "say:Grüße 🙂 an STO alle STOP"}]} | fields
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with served.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert chunks[-1]["usage"] == whole["usage"] and chunks[-1]["choices"] == []
    assert len(chunks) > 8
    for index, choice in enumerate(whole["choices"]):
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
        assert [x for part in parts for x in part.get("token_ids", [])] == choice["token_ids"]
        told = [x for part in parts if part.get("logprobs") for x in part["logprobs"]["content"]]
        assert told == choice["logprobs"]["content"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["stop"]


def test_texts_and_token_ids_can_be_completed(served):
    answer = served.http.post("/v1/completions", json={"model": "tiny", "prompt": ["say:a", "say:b"], "n": 2})
    assert [x["text"] for x in answer.json()["choices"]] == ["a", "a", "b", "b"]
    ids = served.service.model.tokenizer("say:hello")["input_ids"]
    answer = served.http.post("/v1/completions", json={"model": "tiny", "prompt": ids, "logprobs": 0}).json()
    assert answer["choices"][0]["text"] == "hello"
    assert answer["choices"][0]["logprobs"]["token_logprobs"][-1] <= 0
    answer = served.http.post("/inference/v1/generate", json={"token_ids": ids, "sampling_params": {"logprobs": 1}})
    (choice,) = answer.json()["choices"]
    assert served.service.model.tokenizer.decode(choice["token_ids"]) == "hello<|im_end|>"
    told = choice["logprobs"]["content"]
    assert [x["token"] for x in told] == [f"token_id:{x}" for x in choice["token_ids"]]
    assert choice["weight_versions"] == [{"version": 3, "start": 0, "end": len(told)}]


CHAT, TEXT, IDS = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
HELLO = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> tuple[str, Any]:
    return CHAT, {"model": "tiny", "messages": HELLO} | fields


def text(**fields: Any) -> tuple[str, Any]:
    return TEXT, {"model": "tiny", "prompt": "hi"} | fields


def ids(**fields: Any) -> tuple[str, Any]:
    return IDS, {"token_ids": [1, 2]} | fields


MALFORMED = [
    (400, (CHAT, b"{")),
    (400, (CHAT, [1])),
    (400, (CHAT, b'{"model": "tiny", "messages": "\xff"}')),
    (400, (CHAT, {"model": "tiny"})),
    (400, (CHAT, {"messages": HELLO})),
    (404, chat(model="gpt-5")),
    (400, chat(messages=[])),
    (400, chat(messages=[{"role": "robot", "content": "x"}])),
    (400, chat(messages=[{"role": "user", "content": 7}])),
    (400, chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])),
    (400, chat(messages=[{"role": "user", "content": "\ud800"}])),
    (400, chat(messages=[{"role": "user", "content": "x" * 2000}])),
    (413, chat(messages=[{"role": "user", "content": "x" * 30_000}])),
    (400, chat(n=0)),
    (400, chat(n=129)),
    (400, chat(n=True)),
    (429, chat(n=WAITING + 1)),
    (400, chat(max_tokens=0)),
    (400, chat(max_tokens=601)),
    (400, chat(temperature=-1)),
    (400, chat(temperature=1e-6)),
    (400, (CHAT, b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}')),
    (400, chat(top_p=0.9)),
    (400, chat(top_k=5)),
    (400, chat(min_p=0.1)),
    (400, chat(frequency_penalty=0.5)),
    (400, chat(logit_bias={"5": 1})),
    (400, chat(seed=-1)),
    (400, chat(seed=2**31)),
    (400, chat(seed=2**31 - 1, n=2)),
    (400, chat(stop="")),
    (400, chat(stop=["x"] * 17)),
    (400, chat(logprobs=True, top_logprobs=3)),
    (400, chat(response_format={"type": "json_object"})),
    (400, chat(tool_choice="required", tools=[ADD])),
    (400, chat(tools=[])),
    (400, chat(tools=[{"type": "retrieval"}])),
    (400, chat(chat_template_kwargs={"enable_thinking": False})),
    (400, chat(stream_options={"include_usage": True})),
    (400, chat(reasoning_effort="high")),
    (400, text(prompt="")),
    (400, text(prompt=[])),
    (400, text(prompt=[-1])),
    (400, text(prompt=[10**6])),
    (400, text(echo=True)),
    (400, text(echo=0)),
    (400, text(best_of=2)),
    (400, text(logprobs=5)),
    (400, ids(token_ids=[])),
    (400, ids(sampling_params={"logprobs": 4})),
    (400, ids(sampling_params={"stop": ["x"]})),
    (400, ids(stream=True)),
    (404, ("/v1/embeddings", {"model": "tiny", "input": "x"})),
    (400, ("/sessions/a%20b/v1/chat/completions", chat()[1])),
]


def test_malformed_requests_get_4xx_with_a_reason_and_leave_nothing(served):
    wrong = []
    for status, (path, body) in MALFORMED:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = served.http.post(path, content=content, headers={"content-type": "application/json"})
        reason = answer.json()["error"]["message"]
        if answer.status_code != status or len(reason) < 10:
            wrong.append((path, str(body)[:80], status, answer.status_code, answer.text))
    assert wrong == []
    assert (served.gauge("running"), served.gauge("waiting")) == (0, 0)
    assert served.chat("still there")["choices"][0]["message"]["content"] == "still there"


def test_a_client_that_leaves_frees_its_slot(served):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "say:forever"}], "max_tokens": 600}
    before = served.gauge("cancelled_total")
    for stream in (True, False):
        content = json.dumps(body | {"stream": stream})
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
        with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as client:
            client.sendall(f"{head}\r\n\r\n{content}".encode())
            eventually(lambda: served.gauge("running") == 1)
            served.stream.rounds = 0
        eventually(lambda: served.gauge("running") == 0)
        assert served.stream.rounds < 200  # of the 3,334 that the answer takes
    assert served.gauge("cancelled_total") == before + 2


CLIENT = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"content-type": "application/json"})
urllib.request.urlopen(request).read()
"""


def test_clients_killed_at_random_free_their_slots_within_a_round(served):
    draw, body = random.Random(0), chat(messages=[{"role": "user", "content": "say:forever"}])[1]
    for _ in range(4):
        bodies = [json.dumps(body | {"stream": draw.random() < 0.5}) for _ in range(draw.randint(1, ROWS))]
        clients = [subprocess.Popen([sys.executable, "-c", CLIENT, served.url + CHAT, x]) for x in bodies]
        eventually(lambda: served.gauge("running") == len(bodies))  # noqa: B023
        time.sleep(draw.uniform(0, 0.1))
        sequences = [*served.stream.running.values()]
        served.stream.pause.clear()
        try:
            for client in clients:
                client.kill()
                client.wait()
            eventually(lambda: all(sequence.cancelled for sequence in sequences))  # noqa: B023
            rounds = served.stream.rounds
        finally:
            served.stream.pause.set()
        eventually(lambda: served.gauge("running") == 0)
        assert served.stream.rounds <= rounds + 2  # the round in which the kill came, and the one that sees it


def test_a_full_queue_refuses_and_a_failed_engine_says_so():
    with scripted() as served, ThreadPoolExecutor(2) as threads:
        served.stream.pause.clear()
        waits = threads.submit(served.chat, "x", n=ROWS)
        eventually(lambda: served.gauge("running") == ROWS)
        more = threads.submit(served.chat, "y", n=WAITING)
        eventually(lambda: served.gauge("waiting") == WAITING)
        assert served.http.post(*chat()[:1], json=chat()[1]).status_code == 429
        served.stream.pause.set()
        assert len(waits.result()["choices"]) == ROWS and len(more.result()["choices"]) == WAITING
        served.stream.answer = None  # the thread of the engine raises at the next request
        assert served.http.post(CHAT, json=chat()[1]).status_code == 500
        assert served.http.post(CHAT, json=chat()[1]).status_code == 503
        assert served.http.get("/health").status_code == 503


def test_a_session_is_a_trace_that_continues_token_for_token(served):
    path = "/sessions/episode-1/v1/chat/completions"
    talk = [{"role": "user", "content": "say:one"}]
    for reply in ("two", "three"):
        answer = served.http.post(path, json={"model": "tiny", "messages": talk}).json()
        talk += [answer["choices"][0]["message"], {"role": "user", "content": f"say:{reply}"}]
    trace = served.http.get("/sessions/episode-1").json()
    assert (trace["calls"], trace["branches"], trace["restarts"]) == (2, 1, 0)
    sampled = [node for node in trace["nodes"] if "logprobs" in node]
    decoded = [served.service.model.tokenizer.decode(node["token_ids"]) for node in sampled]
    assert decoded == ["one<|im_end|>", "two<|im_end|>"]
    assert all(len(x["token_ids"]) == len(x["logprobs"]) == len(x["weight_versions"]) for x in sampled)
    talk[1] = {"role": "assistant", "content": "another history"}
    served.http.post(path, json={"model": "tiny", "messages": talk})
    trace = served.http.delete("/sessions/episode-1").json()
    assert (trace["calls"], trace["branches"], trace["restarts"]) == (3, 2, 1)
    assert served.http.get("/sessions/episode-1").status_code == 404
    assert served.gauge("restarts_total") == 1 and served.gauge("sessions") == 0
    paths = [f"/sessions/s{i}" for i in range(4)]  # their number is bounded
    assert [served.http.post(f"{path}{CHAT}", json=chat()[1]).status_code for path in paths] == [200, 200, 200, 429]
    assert [served.http.delete(path).status_code for path in paths] == [200, 200, 200, 404]


def test_a_key_is_required_of_all_but_the_health_check():
    with scripted(key="sesame") as served:
        assert served.http.get("/health").status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer sesame"}):
            status = served.http.get("/v1/models", headers=headers).status_code
            assert status == (200 if headers.get("authorization") == "Bearer sesame" else 401)


@pytest.mark.needs("openai")
def test_the_openai_package_chats_streams_and_calls_a_tool(served):
    from openai import OpenAI

    client = OpenAI(base_url=f"{served.url}/sessions/sdk/v1", api_key="none")
    (model,) = client.models.list().data
    talk: list[Any] = [{"role": "user", "content": "say:hello"}]
    answer = client.chat.completions.create(model=model.id, messages=talk, seed=3, temperature=0.5, max_tokens=50)
    assert answer.choices[0].message.content == "hello"
    stream = client.chat.completions.create(model=model.id, messages=talk, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "hello"
    talk = [{"role": "user", "content": f"say:I add.\n{CALL}"}]
    made = client.chat.completions.create(model=model.id, messages=talk, tools=[ADD])  # pyright: ignore
    choice = made.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I add."
    (call,) = choice.message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 1, "b": 2}
    talk += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    talk += [{"role": "user", "content": "say:three"}]
    last = client.chat.completions.create(model=model.id, messages=talk, tools=[ADD])  # pyright: ignore
    assert last.choices[0].message.content == "three"
    # The template writes the answer with the call as it was sampled, so the last call continues the one before.
    assert served.http.delete("/sessions/sdk").json()["restarts"] == 1
    stream = client.chat.completions.create(model=model.id, messages=talk[:1], tools=[ADD], stream=True)  # pyright: ignore
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == "I add."
    assert [x.function.name for delta in deltas for x in delta.tool_calls or []] == ["add"]
    served.http.delete("/sessions/sdk")


def test_tokens_through_the_endpoint_equal_those_of_the_sampler():
    length, width, count = 40, 12, 3 * ROWS
    args = argparse.Namespace(
        name="", dtype="float32", max_prompt_tokens=width, max_completion_tokens=length, max_sequences=ROWS,
        max_waiting=64, max_sessions=8, top_k=0, top_p=0.9, seed=5,
    )  # fmt: skip
    service = serve.open_service(args, MODEL)
    prompts = [[1, *range(4, 4 + 2 + i % 7), 2] for i in range(count)]
    with running(service) as served:

        def ask(i: int) -> dict[str, Any]:
            params = {"seed": i, "temperature": 0.8}
            answer = served.http.post(IDS, json={"token_ids": prompts[i], "sampling_params": params})
            return answer.json()["choices"][0]

        with ThreadPoolExecutor(5) as threads:
            answers = list(threads.map(ask, range(count)))
    mesh = meshes.make_mesh(data=1, fsdp=-1, tensor=1)
    model = hf.load_model(MODEL, mesh, dtype="float32")
    stop_ids = tuple(sorted(service.model.stop_ids))
    sizes = dict(max_completion_tokens=length, max_sequences=ROWS)
    sampler = Sampler(model, mesh, stop_ids=stop_ids, pad_id=service.model.tokenizer.pad_token_id, **sizes)
    sampler.update_weights(hf.load_params(MODEL, model, mesh, learns=False))
    tokens, mask = np.zeros((count, width), np.int32), np.zeros((count, width), bool)
    for row, prompt in enumerate(prompts):
        tokens[row, -len(prompt) :], mask[row, -len(prompt) :] = prompt, True
    sampling, key = Sampling(0.8, top_p=0.9), jax.random.key(5, impl="threefry2x32")
    expected = sampler.sample(Prompts(tokens, mask, [], np.arange(count)), key, group_size=1, sampling=sampling)
    for i, answer in enumerate(answers):
        count = expected.completion_mask[i, 0].sum()
        logprobs = np.array([x["logprob"] for x in answer["logprobs"]["content"]], np.float32)
        assert answer["token_ids"] == expected.completions[i, 0, :count].tolist()
        if i >= ROWS:  # the call's first prompts run in a program of another size, which may differ in the last bits
            assert logprobs.tobytes() == expected.logprobs[i, 0, :count].tobytes()
        assert (answer["finish_reason"] == "length") == expected.truncated[i, 0]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--host", "0.0.0.0"],
        ["--port", "70000"],
        ["--max-prompt-tokens", "0"],
        ["--top-p", "0"],
        ["--max-prompt-tokens", "400", "--max-completion-tokens", "400"],
    ],
)
def test_a_wrong_command_line_is_refused_before_the_server_listens(arguments, monkeypatch, refused):
    monkeypatch.delenv(serve.KEY_VARIABLE, raising=False)
    monkeypatch.setattr("sys.argv", ["jaxrl serve", "--model", str(MODEL), "--port", "0", *arguments])
    with refused(arguments[0]):
        serve.main()
