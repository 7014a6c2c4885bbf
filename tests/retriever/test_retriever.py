"""The retriever: BM25 by its formula, a client and a server that work with those of others, and their faults."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

import anyio
import anyio.to_thread
import httpx
import numpy as np
import pytest

from jaxrl_llm.config.load import load
from jaxrl_llm.errors import UserError
from jaxrl_llm.retriever import client as client_module
from jaxrl_llm.retriever import server as retriever_server
from jaxrl_llm.retriever.client import RetrieverClient, RetrieverError
from jaxrl_llm.retriever.documents import Document, document
from jaxrl_llm.retriever.index import Index, words
from jaxrl_llm.tasks import search as rewards
from jaxrl_llm.tasks.search import Search
from jaxrl_llm.tools import serve_retriever
from jaxrl_llm.train import steps

ROOT = Path(__file__).parents[2]
SMALL_SERVER = ("--model", str(ROOT / "jaxrl_llm" / "assets" / "arithmetic"), "--max-sequences", "2")
DOCUMENTS = [
    Document("a", '"Velm"\nVelm is a river of Orsa. Its bridge is old.'),
    Document("b", '"Orsa"\nOrsa is a land; its king is Tamar, Tamar the tall.'),
    Document("c", '"Tamar"\nTamar was born in Pell.'),
    Document("d", '"Pell"\nPell has a river and a bridge.'),
    Document("e", '"Pell"\nPell has a river and a bridge.'),
]


def ids(found: list) -> list[str]:
    return [one.id for one, _ in found]


def test_scores_are_those_of_the_formula():
    texts = words([one.contents for one in DOCUMENTS])
    assert texts[2] == ["tamar", "tamar", "born", "pell"]
    mean = sum(map(len, texts)) / len(texts)

    def score(word: str, text: list[str]) -> float:
        has = sum(word in other for other in texts)
        idf = math.log(1 + (len(texts) - has + 0.5) / (has + 0.5))
        count = text.count(word)
        return idf * count / (count + 1.5 * (1 - 0.75 + 0.75 * len(text) / mean))

    found = Index.of(DOCUMENTS).search(["Tamar bridge"], 5)[0]
    ours = {one.id: value for one, value in found}
    for one, text in zip(DOCUMENTS, texts, strict=True):
        assert ours.get(one.id, 0.0) == pytest.approx(score("tamar", text) + score("bridge", text), rel=1e-4), one


def test_equal_scores_are_in_the_order_of_the_corpus():
    index = Index.of(DOCUMENTS)
    assert ids(index.search(["Pell"], 2)[0])[:2] in (["d", "e"], ["c", "d"])
    assert ids(index.search(["pell river bridge"], 2)[0]) == ["d", "e"]
    assert index.search(["zzz", "", "the of a", "?!"], 3) == [[], [], [], []]
    assert len(index.search(["bridge"], 99)[0]) == 3


def write(path: Path, documents: list[Document]) -> Path:
    path.write_text(
        "".join(json.dumps(one._asdict(), ensure_ascii=False) + "\n" for one in documents), encoding="utf-8"
    )
    return path


@pytest.fixture
def corpus(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write(tmp_path / "corpus.jsonl", DOCUMENTS)


def test_a_saved_index_finds_the_same_and_a_changed_corpus_is_indexed_again(corpus, monkeypatch):
    here = Index.of(DOCUMENTS).search(["tamar bridge", "Pell"], 4)
    assert Index.open(corpus).search(["tamar bridge", "Pell"], 4) == here
    with monkeypatch.context() as broken:
        broken.setattr("jaxrl_llm.retriever.index._indexed", None)  # it must not be called again
        assert Index.open(corpus).search(["tamar bridge", "Pell"], 4) == here
    write(corpus, [*DOCUMENTS, Document("f", '"Bridge"\nBridge, bridge: übergroß')])
    assert ids(Index.open(corpus).search(["bridge"], 1)[0]) == ["f"]
    assert Index.open(corpus).search(["übergroß"], 1)[0][0][0].contents.endswith("übergroß")


def test_a_row_with_title_and_text_is_a_document_and_another_line_is_named(corpus, refused):
    assert document({"id": 7, "title": "Pell", "text": "A town."}) == Document("7", '"Pell"\nA town.')
    surrogate = '{"id": "1", "contents": "a\\ud800"}'
    for line in ("{}", "[1]", "{", '{"id": 1, "title": "x"}', surrogate, ""):
        corpus.write_text(json.dumps(DOCUMENTS[0]._asdict()) + "\n" + line + "\n")
        with refused("line 2" if line else "corpus.jsonl"):
            Index.open(corpus)


def right(body: dict, scores: bool = True) -> httpx.Response:
    one = {"id": "5", "contents": '"Pell"\nA town.'}
    of_query = [{"document": one, "score": 2.5}] if scores else [one]
    return httpx.Response(200, json={"result": [of_query * body["topk"] for _ in body["queries"]]})


def stall(body: dict) -> httpx.Response:
    assert body["timeout"] <= 0.5, "the client waits longer than it was told"
    time.sleep(body["timeout"])
    raise httpx.ReadTimeout("too slow")


def away(body: dict) -> httpx.Response:
    raise httpx.ConnectError("[Errno 111] Connection refused")


FAULTS = {
    "500": lambda body: httpx.Response(500, text="oops"),
    "no JSON": lambda body: httpx.Response(200, text="<html>"),
    "another shape": lambda body: httpx.Response(200, json={"result": 3}),
    "a wrong length": lambda body: httpx.Response(200, json={"result": []}),
    "a list alone": lambda body: httpx.Response(200, json=[["text"]]),
    "texts alone": lambda body: httpx.Response(200, json={"result": [["text"]]}),
    "too slow": stall,
    "away": away,
}
CLIENT = httpx.Client


@pytest.fixture
def theirs(monkeypatch):
    """Returns what makes a server of others give these answers, the last one again and again, and its requests."""

    def serve(*answers: Callable[[dict], httpx.Response]) -> list[dict]:
        asked: list[dict] = []

        def answer(request: httpx.Request) -> httpx.Response:
            asked.append({"path": request.url.path} | json.loads(request.content))
            timeout = request.extensions["timeout"]["read"]
            return answers[min(len(asked), len(answers)) - 1](asked[-1] | {"timeout": timeout})

        monkeypatch.setattr(httpx, "Client", partial(CLIENT, transport=httpx.MockTransport(answer)))
        return asked

    return serve


def test_the_client_understands_a_server_with_scores_and_without(theirs):
    for scores in (True, False):
        asked = theirs(partial(right, scores=scores))
        found = RetrieverClient("http://there", topk=2, timeout=5.0, retries=0).search(["x", "y"])
        assert asked == [{"path": "/retrieve", "queries": ["x", "y"], "topk": 2, "return_scores": True}]
        assert found == [[(Document("5", '"Pell"\nA town.'), 2.5 if scores else None)] * 2] * 2


def test_a_fault_that_passes_is_tried_again_and_one_that_stays_is_one_line(theirs, monkeypatch):
    monkeypatch.setattr(client_module, "FIRST_WAIT", 0.0)
    for name, fault in FAULTS.items():
        asked = theirs(fault, right, fault)
        client = RetrieverClient("http://there", topk=1, timeout=0.01, retries=1)
        assert ids(client.search(["x"])[0]) == ["5"] and len(asked) == 2, name
        with pytest.raises(RetrieverError) as error:
            client.search(["x"])
        assert len(asked) == 4 and "\n" not in str(error.value), name
        # What has answered is not called dead.
        assert ("gave no answer" in str(error.value)) == (name in ("500", "too slow", "away")), error.value
    asked = theirs(lambda body: httpx.Response(422, text="topk"))
    with pytest.raises(RetrieverError, match="422"):  # what the server refuses is not asked again
        RetrieverClient("http://there", topk=1, timeout=5.0, retries=3).search(["x"])
    assert len(asked) == 1


def test_a_retry_waits_longer_each_time(theirs, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(client_module.time, "sleep", pauses.append)
    theirs(FAULTS["500"])
    with pytest.raises(RetrieverError):
        RetrieverClient("http://there", topk=1, timeout=5.0, retries=3).search(["x"])
    assert pauses == [client_module.FIRST_WAIT * x for x in (1, 2, 4)]


@contextmanager
def started(*arguments: str, folder: Path | None = None) -> Iterator[str]:
    """Yields the address of a server once it answers, and asserts that it ends when it is told to."""
    with socket.create_server(("127.0.0.1", 0)) as free:  # each worker of pytest has a server of its own
        port = free.getsockname()[1]
    environment = os.environ | ({"XDG_CACHE_HOME": str(folder)} if folder else {})
    process = subprocess.Popen([sys.executable, *arguments, "--port", str(port)], cwd=ROOT, env=environment)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + 60
    try:
        while True:
            with suppress(httpx.TransportError):
                assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
                break
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.05)
        yield url
        process.terminate()
        assert process.wait(30) in (0, -15)
    finally:
        process.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    corpus = write(folder / "corpus.jsonl", DOCUMENTS)
    bounds = ["--most-queries", "4", "--most-characters", "100", "--most-topk", "5"]
    command = ["-m", "jaxrl_llm.tools.serve_retriever", "--corpus", str(corpus), *bounds]
    with started(*command, folder=folder / "cache") as url:
        yield url


@pytest.mark.slow
@pytest.mark.parametrize("program", ["serve_retriever", "serve"])
def test_a_connection_stays_open_for_longer_than_clients_keep_it(program, corpus):
    """Otherwise a request may meet a server that is just closing the connection. Clients of httpx keep it for 5 s."""
    arguments = dict(serve_retriever=("--corpus", str(corpus)), serve=SMALL_SERVER)[program]
    with started("-m", f"jaxrl_llm.tools.{program}", *arguments, folder=corpus.parent) as url:
        connection = HTTPConnection(url.removeprefix("http://"))
        for idle_seconds in (0, 6):
            time.sleep(idle_seconds)
            connection.request("GET", "/health")
            with connection.getresponse() as answer:
                assert answer.status == 200 and answer.read()


FORMS = [
    ({"queries": ["river"], "topk": 2, "return_scores": True}, 2),  # Search-R1, veRL
    ({"queries": ["river"], "topk": 2}, 2),  # the flat form, at which Search-R1's own server fails
    ({"queries": ["river"], "topk": 2, "return_scores": False}, 2),
    ({"queries": ["river"], "topk": None, "return_scores": True}, 3), ({"query": "river"}, 3),
    ({"query": "river", "topk": 1, "return_scores": True}, 1),
]  # fmt: skip
REFUSED = [
    (b"{", 400), (b"[]", 422), (b'{"queries": []}', 422), (b'{"queries": [3]}', 422),
    (b'{"queries": ["x"], "topk": 0}', 422), (b'{"queries": ["x"], "topk": 6}', 422),
    (b'{"queries": ["x"], "topk": "3"}', 422), (b'{"queries": ["1", "2", "3", "4", "5"]}', 413),
    (json.dumps({"queries": ["x" * 101]}).encode(), 413), (b" " * 100_000, 413),
    (b"[" * 2_000, 400), (b'{"queries": ["a"], "x": ' + b"[" * 2_000, 400),
    (b'{"queries": ["a"], "topk": [[[1]]]}', 422),
]  # fmt: skip


def test_the_server_answers_in_both_forms_and_refuses_what_exceeds_a_bound(server):
    with httpx.Client() as client:
        for body, count in FORMS:
            answer = client.post(server + "/retrieve", json=body)
            assert answer.status_code == 200, answer.text
            (found,) = answer.json()["result"]
            inner = [one["document"] for one in found] if body.get("return_scores") else found
            assert [one["id"] for one in inner] == ids(Index.of(DOCUMENTS).search(["river"], count)[0])
            assert len(found) == count and all(set(one) == {"id", "contents"} for one in inner)
            if body.get("return_scores"):
                assert [one["score"] for one in found] == sorted((one["score"] for one in found), reverse=True)
        for content, status in REFUSED:
            answer = client.post(server + "/retrieve", content=content)
            assert answer.status_code == status and answer.json()["error"], answer.text


async def asked(app, *parts: dict[str, object]) -> int:
    """Returns the status that the application gives to a request of these parts. After them nothing comes."""
    statuses, left = [], list(parts)

    async def receive():
        if not left:
            await anyio.sleep_forever()
        return left.pop(0)

    async def send(message):
        statuses.append(message.get("status"))

    await app(
        {"type": "http", "method": "POST", "path": "/retrieve", "headers": [], "query_string": b""}, receive, send
    )
    return statuses[0]


WHOLE = {"type": "http.request", "body": b'{"queries": ["river"]}', "more_body": False}
HALF = {"type": "http.request", "body": b'{"queries":', "more_body": True}
LEAVES = {"type": "http.disconnect"}


def test_a_client_that_has_left_or_stops_in_a_body_is_not_searched_for(monkeypatch):
    monkeypatch.setattr(retriever_server, "BODY_SECONDS", 0.2)
    searches, begun, may_end = [], threading.Event(), threading.Event()

    def search(queries: list[str], topk: int) -> list:
        searches.append(queries)
        begun.set()
        assert may_end.wait(30)
        return [[] for _ in queries]

    bounds = retriever_server.Bounds(topk=1, most_topk=1, queries=1, characters=99, waiting=9, workers=1)
    app, statuses = retriever_server.application(search, bounds), {}

    async def record(name: str, *parts: dict[str, object]) -> None:
        statuses[name] = await asked(app, *parts)

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(record, "first", WHOLE)
            await anyio.to_thread.run_sync(begun.wait)
            for name, parts in {"left": (WHOLE, LEAVES), "stopped": (HALF,), "left in a body": (HALF, LEAVES),
                                "patient": (WHOLE,)}.items():  # fmt: skip
                group.start_soon(record, name, *parts)
            while "stopped" not in statuses:
                await anyio.sleep(0.01)
            may_end.set()

    anyio.run(main)
    assert statuses == {"first": 200, "left": 499, "stopped": 408, "left in a body": 499, "patient": 200}
    assert len(searches) == 2


def test_a_server_that_is_told_to_end_ends_while_requests_wait():
    program = textwrap.dedent("""
        import sys, time
        from jaxrl_llm.tools import serve_retriever
        class Slow:
            def __len__(self): return 1
            def search(self, queries, topk): time.sleep(120)
        serve_retriever.open_index = lambda args: Slow()
        serve_retriever.SHUTDOWN_SECONDS = 1
        serve_retriever.main()
    """)
    body = b'POST /retrieve HTTP/1.1\r\nhost: x\r\ncontent-length: 18\r\n\r\n{"queries": ["x"]}'
    with ExitStack() as clients, started("-c", program, "--corpus", "none") as url:
        for _ in range(4):
            port = int(url.rpartition(":")[2])
            clients.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(body)
        time.sleep(0.3)


def test_our_client_and_our_server_agree(server):
    found = RetrieverClient(server + "/retrieve", topk=2, timeout=5.0, retries=0).search(["tamar", "bridge"])
    for ours, here in zip(found, Index.of(DOCUMENTS).search(["tamar", "bridge"], 2), strict=True):
        assert ids(ours) == ids(here)
        assert [score for _, score in ours] == pytest.approx([score for _, score in here], rel=1e-6)


def search(**changes) -> Search:
    usual = dict(corpus="tests.retriever.test_retriever.rows", url="", topk=2, most_searches=2, timeout=0.5, retries=0)
    return Search(**usual | changes)


def rows() -> list[dict]:
    return [one._asdict() for one in DOCUMENTS]


def test_a_search_is_answered_with_documents_and_an_answer_ends_the_episode():
    env = search()
    reply = env.step("<think>who?</think><search> king of Orsa </search>")
    assert reply.observation.startswith('\n\n<information>Doc 1(Title: "Orsa") Orsa is a land')
    assert reply.observation.endswith("</information>\n\n")
    assert reply.metrics == {"valid": 1.0, "searches": 1.0}
    assert env.step("so <answer>Tamar</answer>").done
    assert env.step("<answer>Tamar</answer><search>x</search>").done
    assert not env.step("<search>x</search><answer>Tamar</answer>").done


def test_what_is_neither_search_nor_answer_is_told_so_and_searches_run_out():
    env = search(most_searches=1)
    for text in ("hm", "<search></search>", "</search>", "<search>  </search>"):
        reply = env.step(text)
        assert reply.metrics == {"invalid": 1.0} and not reply.done and "<answer>" in reply.observation
    assert env.step("<search>bridge</search>").metrics["searches"] == 1.0
    assert "No search is left" in env.step("<search>bridge</search>").observation


def test_a_search_that_fails_or_finds_nothing_is_an_observation(theirs):
    theirs(right, FAULTS["500"])
    reply = search(corpus="", url="http://fails").step("<search>x</search>")
    assert reply.metrics == {"valid": 1.0, "searches": 1.0, "errors": 1.0}
    assert "<information>the search failed</information>" in reply.observation
    theirs(lambda body: httpx.Response(200, json={"result": [[]]}))
    reply = search(corpus="", url="http://empty").step("<search>x</search>")
    assert reply.metrics == {"valid": 1.0, "searches": 1.0, "empty": 1.0}


def test_a_retriever_that_is_not_there_is_told_before_a_run_begins(theirs, refused):
    theirs(away)
    with refused("config.env.url = 'http://there'"):
        search(corpus="", url="http://there")
    asked = theirs(right)
    search(corpus="", url="http://there")
    search(corpus="", url="http://there")
    assert len(asked) == 1  # once for all episodes of a process
    for changes in (dict(url="http://x"), dict(corpus="")):  # one of both is needed
        with refused("config.env.corpus"):
            search(**changes)


def test_answers_are_compared_as_in_squad():
    said = ["<answer> The Tall-King!</answer>", "<answer>a</answer> <answer>Tamar the tall</answer>", "Tamar", ""]
    golden = ["tallking", ["Tamar tall", "x"], "Tamar", "x"]
    assert rewards.exact_match(said, golden) == [1.0, 1.0, 0.0, 0.0]
    assert rewards.f1(["<answer>the tall Tamar of Orsa</answer>", "<answer>no</answer>"], ["Tamar, tall", "yes"]) == [
        pytest.approx(2 * 2 / (4 + 2)),
        0.0,
    ]
    assert rewards.answered(said) == [1.0, 1.0, 0.0, 0.0]
    # What the environment said is no answer.
    turns = [{"role": "assistant", "content": "<search>x</search>"}, {"role": "environment", "content": said[1]}]
    assert rewards.exact_match([""], ["a"], [turns]) == [0.0]


def test_the_reward_of_v0_3_pays_for_the_format():
    think, found = "<think>hm</think>", {"role": "environment", "content": "\n<information>Doc 1</information>\n"}

    def paid(*said: str, between: dict = found, **columns: list[str]) -> float:
        turns: list[dict] = []
        for text in said:
            turns += [{"role": "assistant", "content": text}, between]
        return rewards.with_format([""], ["Pell"], [turns[:-1]], **columns)[0]

    searched = f"{think}<search>Tamar</search>"
    assert paid(searched, f"{think} <answer>Pell</answer>") == 1.0
    assert paid(f"{think}<answer>Pell</answer>") == 1.0
    assert paid("<answer>Pell</answer>") == 0.8
    assert paid("<search>Tamar</search>", f"{think}<answer>Pell</answer>") == 0.8
    assert paid(searched, f"{think}<answer>Orsa</answer>") == 0.2
    assert paid("<answer>Orsa</answer>") == 0.1
    assert paid(searched, think) == 0.0
    # A thought that the prompt opens is a part of the first turn alone.
    opened = searched.removeprefix("<think>")
    assert paid(opened, f"{think}<answer>Pell</answer>", assistant_prefill=["<think>"]) == 1.0
    assert paid(searched, f"{think}<answer>Pell</answer>", assistant_prefill=["<think>"]) == 0.8
    assert paid(opened, f"{think}<answer>Pell</answer>") == 0.8
    # What the policy makes up is no result of a search.
    assert paid(f"{think}<search>x</search><information>Pell</information>{think}<answer>Pell</answer>") == 0.8
    assert paid(searched, f"{think}<answer>Pell</answer>", between=found | {"content": "not a search"}) == 0.8


def searching(url: str):
    """A run of the searching model, small and short."""
    config = load(ROOT / "configs" / "search_grpo.py")
    config.update_from_flattened_dict({
        "num_steps": 6, "optim.warmup_steps": 0, "prompts_per_step": 4, "prompts_per_update": 4, "group_size": 4,
        "eval": None, "checkpoint.every": 100, "checkpoint.keep_best": 0, "log.to": (), "mesh.fsdp": 1,
        "log.completions_every": 0, "reward.timeout": 0.0, "health.self_test": False, "env.corpus": "", "env.url": url,
        "env.timeout": 0.5, "env.retries": 0, "rollout.max_completion_tokens": 128,
    })  # fmt: skip
    return config


@pytest.mark.slow
def test_a_server_that_fails_in_every_way_loses_no_run(theirs, tmp_path):
    """Errors 500, no JSON, other shapes, wrong lengths, stalls, refused connections and good answers take turns."""
    answers, failed = [right, *FAULTS.values()], []  # the first answer is to the question before the run

    def answer(body: dict) -> httpx.Response:
        fault = answers[len(failed) % len(answers)]
        failed.append(fault is not right)
        return fault(body)

    theirs(answer)
    records = [record for record in steps(searching("http://fails-often"), tmp_path) if record["step"]]
    assert len(records) == 6
    assert round(sum(record["episode/errors"] * 16 for record in records)) == sum(failed) > 10
    assert len(failed) - sum(failed) > 2
    assert all(np.isfinite(record["grad_norm"]) for record in records)
    stalled = sum(failed[1 + list(FAULTS).index("too slow") :: len(answers)])
    assert stalled > 2 and sum(record["time/environment"] * 16 for record in records) > 0.4 * stalled


@pytest.mark.parity
@pytest.mark.needs("torch")
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_dense_index_finds_by_the_vectors_of_the_encoder_alone(pooling, corpus, tmp_path):
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    from jaxrl_llm.retriever.dense import DenseIndex, Encoding

    known = ["[PAD]", "[UNK]", *sorted({word for one in words([x.contents for x in DOCUMENTS]) for word in one})]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    folder = tmp_path / "encoder"
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(folder)
    sizes = dict(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, initializer_range=1.0
    )
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(vocab_size=len(known), **sizes)).eval()
    model.save_pretrained(folder)

    def vector(text: str) -> np.ndarray:
        """Of a text alone, so without padding."""
        with torch.inference_mode():
            states = model(**fast([text], return_tensors="pt")).last_hidden_state[0]
        pooled = (states[0] if pooling == "cls" else states.mean(0)).numpy()
        return pooled / np.linalg.norm(pooled)

    encoding = Encoding(str(folder), pooling)
    index = DenseIndex.open(corpus, encoding)
    (found,) = index.search(["river bridge"], 9)
    expected = {one.id: float(vector("passage: " + one.contents) @ vector("query: river bridge")) for one in DOCUMENTS}
    assert len(index) == len(found) == 5
    assert {one.id: score for one, score in found} == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 3) for score in expected.values()}) == 4  # d and e have one text
    assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)
    again = DenseIndex.open(corpus, encoding)  # the second time from its file
    assert again.search(["river bridge"], 9) == [found]
    with pytest.raises(UserError, match="--dense"):
        DenseIndex.open(corpus, Encoding(str(tmp_path / "nothing")))


def test_a_server_that_others_can_reach_needs_a_word(monkeypatch, refused):
    monkeypatch.setattr(sys, "argv", ["serve_retriever", "--corpus", "none.jsonl", "--host", "0.0.0.0"])
    with refused("--host 0.0.0.0", "--public"):
        serve_retriever.main()
    sys.argv.append("--public")
    with refused("none.jsonl"):
        serve_retriever.main()
