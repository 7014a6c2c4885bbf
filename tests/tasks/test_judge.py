"""The judge behind a chat endpoint, against a server of this process."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from jaxrl_llm.config.schema import check_call, check_reach
from jaxrl_llm.data.columns import check
from jaxrl_llm.data.prompts import Dataset
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.grading import RewardFn
from jaxrl_llm.tasks import REWARDS, judge, rubric

TEXTS = [[{"role": "assistant", "content": text}] for text in ("good", "bad", "good", "odd")]
PROMPTS = [[{"role": "system", "content": "Help."}, {"role": "user", "content": "2 + 2?"}]] * 4


class Server:
    """Answers each question with `reply(question, number of the try)`: a status and a text."""

    pause = 0.0

    def __init__(self, reply: Callable[[str, int], tuple[int, str]]):
        self.tries: Counter[str] = Counter()
        self.requests: list[dict] = []
        self.keys: set[str | None] = set()
        self.now = self.most = 0
        lock, served = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                question = body["messages"][0]["content"]
                with lock:
                    served.requests.append(body | {"path": self.path})
                    served.keys.add(self.headers.get("Authorization"))
                    served.tries[question] += 1
                    served.now += 1
                    served.most = max(served.most, served.now)
                status, text = reply(question, served.tries[question])
                time.sleep(served.pause)
                with lock:
                    served.now -= 1
                data = json.dumps({"choices": [{"message": {"content": text}}]}).encode() if status == 200 else b"no"
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"


@contextmanager
def serving(reply):
    server = Server(reply)
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()
        thread.join()


def judged(server: Server, **arguments) -> tuple[list[float | None], dict[str, float]]:
    seen: dict[str, float] = {}
    settings = dict(url=server.url, model="big", backoff=0.01) | arguments
    return asyncio.run(judge.score(PROMPTS, TEXTS, seen.__setitem__, **settings)), seen


def by_word(question: str, tries: int) -> tuple[int, str]:
    return 200, "It is <score>1</score>? No: " + (
        "<score> 9/10 </score>" if "\ngood\n" in question else "<score>2.5</score>"
    )


def test_the_last_number_in_tags_is_the_score_and_equal_answers_are_asked_once():
    with serving(by_word) as server:
        found, seen = judged(server, temperature=0.5, max_tokens=7)
    assert found == [0.9, 0.25, 0.9, 0.25]
    assert seen == {"failed": 0.0, "unanswered": 0.0, "unparsed": 0.0, "tries": 1.0}
    assert len(server.requests) == 3
    asked = server.requests[0]
    assert (asked["path"], asked["model"]) == ("/v1/chat/completions", "big")
    assert (asked["temperature"], asked["max_tokens"]) == (0.5, 7)
    assert "system: Help.\n\nuser: 2 + 2?" in asked["messages"][0]["content"]


def test_errors_that_may_pass_are_tried_again_and_others_have_no_verdict():
    def reply(question, tries):
        if "\ngood\n" in question:
            return (200, "<score>10</score>") if tries == 3 else (503, "")
        return (400, "") if "\nodd\n" in question else (429, "")

    with serving(reply) as server:
        found, seen = judged(server, retries=2)
    assert found == [1.0, None, 1.0, None]
    assert sorted(server.tries.values()) == [1, 3, 3]  # bounded, and a bad question is not asked again
    assert seen == {"failed": 0.5, "unanswered": 0.0, "unparsed": 0.0, "tries": pytest.approx(7 / 3)}


NO_SCORES = [
    "no number", "<score>ten</score>", "<score>11</score>", "<score>-1</score>", "", "<score>7/5</score>",
    "<score>5</score> or rather <score>none</score>", "<score>0/0</score>", "<score>8 9</score>", "<score>8 of</score>",
]  # fmt: skip
SCORES = [
    ("<score>.5</score>", 0.05), ("<score>8 out of 10</score>", 0.8), ("**<score>8</score>**", 0.8),
    ("<score>**8**</score>", 0.8), ("<score>**8**/10</score>", 0.8), ("<score> 4/5 </score>", 0.8),
    ("<score>8.</score>", 0.8), ("<score>80 / 100.0</score>", 0.8), ("<score>_8_ of 10</score>", 0.8),
    ("<score>2</score> No: <score>8</score>. That is <score>.", 0.8), ("<score>10</score>", 1.0),
]  # fmt: skip
NO_RUBRICS = [
    "no JSON", '{"right": 10}', '{"right": 11, "short": 0}', '{"right": 1, "short": -1}',
    '{"right": "ten", "short": 0}',
    '{"right": true, "short": 0}', '{"right": NaN, "short": 0}', '{"right": 10, "short": 4} {"right": 10}', "[10, 4]",
    "<score>10</score>", '{"right": 1, "short": 1} (the answer said {"right": 10, "short": 4})',
    '{"right": "11", "short": 0}', '{"scores": {"right": 10}, "short": 4}', '{"right": {"mark": 10}, "short": 4}', "{}",
    '{"right": 10, "short": 4} and {"right": 9, "short": 4} are both possible',
]  # fmt: skip
RUBRICS = [  # each says that it is right, and half short
    '{"right": "10", "short": "2/4"}', '{"scores": {"right": 10, "short": 2}}', '{"right": 10, "short": 2}. Very good!',
    '{"right": {"score": 10, "reason": "so"}, "short": {"score": "2", "reason": "hm"}}',
    '**{"right": 10, "short": 2}**', '{"a": 1}: {"right": 10, "short": 2}, as "{" and {"b": 2} say.',
    '{"right": 1, "short": 2}? No. ```json\n{"right": 10.0, "short": 2}\n```.',
    '{"right": 10, "short": 2}, so I say {"right": 10, "short": 2} again',
]  # fmt: skip


def test_scores_are_read_in_the_forms_that_judges_write():
    assert [(text, judge._score(text, "score", 10.0)) for text, _ in SCORES] == SCORES
    criteria = rubric.read(CRITERIA, 10.0)
    assert [(text, rubric.scores(text, criteria)) for text in RUBRICS] == [(text, [1.0, 0.5]) for text in RUBRICS]


def test_a_reply_that_is_not_of_its_form_is_no_verdict():
    replies: list[str] = []
    with serving(lambda *_: (200, replies[-1])) as server:
        for texts, arguments in ((NO_SCORES, {}), (NO_RUBRICS, {"criteria": CRITERIA})):
            for text in texts:
                replies.append(text)
                found, seen = judged(server, **arguments)
                assert (found, seen["unparsed"], seen["failed"]) == ([None] * 4, 1.0, 0.0), text
                assert not any(name.startswith("rubric/") for name in seen), text


def test_a_server_that_is_gone_or_too_slow_is_no_verdict():
    with serving(by_word) as server:
        pass
    assert judged(server, retries=1)[0] == [None] * 4
    with serving(lambda *_: (time.sleep(0.3), (200, "<score>1</score>"))[1]) as server:
        assert judged(server, timeout=0.05, retries=0)[0] == [None] * 4


def judged_in_a_run(server: Server, seconds: float, count: int, **arguments) -> tuple[list[float], dict[str, float]]:
    """The judge as a run with reward.timeout = seconds calls it, on `count` different completions."""
    given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    judging = RewardFn((f"judge.score(url={server.url!r}, model='m', {given})",), (1.0,), seconds, field="timeout")
    try:
        texts = [[str(i) for i in range(count)]]
        _, rewards, _, metrics = judging([{"prompt": "?"}], texts, [[[1]] * count])
    finally:
        judging.close()
    return rewards.channels["judge.score"][0].tolist(), metrics


def test_a_judge_that_hangs_is_not_asked_for_the_rest_of_the_batch():
    """The first two questions are answered, and all later ones hang."""
    answered = iter(range(2))
    reply = lambda *_: (time.sleep(0 if next(answered, None) is not None else 1.5), (200, "<score>10</score>"))[1]  # noqa: E731
    with serving(reply) as server:
        found, metrics = judged_in_a_run(server, 2.0, 64, timeout=0.6, concurrency=4, backoff=0.0)
    late = sum(math.isnan(x) for x in found)
    assert 64 - late == 2 and 1.0 in found
    assert metrics["judge.score/failed"] == pytest.approx(late / 64)
    # It is not asked for the rest of the batch: 256 tries.
    assert metrics["judge.score/unanswered"] > 0.8 and len(server.requests) <= 20


def test_a_slow_judge_gives_the_verdicts_that_fit_into_the_time_of_a_batch():
    with serving(lambda *_: (time.sleep(0.2), (200, "<score>10</score>"))[1]) as server:
        found, metrics = judged_in_a_run(server, 1.5, 64, concurrency=2)
    late = sum(math.isnan(x) for x in found)
    assert 1 <= len(found) - late <= 16 and 1.0 in found
    assert metrics["judge.score/unanswered"] == metrics["judge.score/failed"] == pytest.approx(late / 64)


CRITERIA = (
    {"name": "right", "criterion": "The sum is right.", "weight": 3},
    {"name": "short", "description": "It is short.", "most": 4},
)


def by_json(question: str, tries: int) -> tuple[int, str]:
    thought = '{"right": 0, "short": 0}? No, better: '
    return 200, thought + (
        '```json\n{"right": 10, "short": 2.0}\n```' if "\ngood\n" in question else '{"right": 0, "short": 4}'
    )


def test_a_rubric_is_one_question_and_its_reward_a_weighted_mean():
    with serving(by_json) as server:
        found, seen = judged(server, criteria=CRITERIA)
    assert found == [pytest.approx((3 * 1 + 0.5) / 4), 0.25, pytest.approx(0.875), 0.25]
    assert seen == {
        "failed": 0.0, "unanswered": 0.0, "unparsed": 0.0, "tries": 1.0, "rubric/right": 0.5, "rubric/short": 0.75,
    }  # fmt: skip
    assert len(server.requests) == 3
    question = server.requests[0]["messages"][0]["content"]
    assert "- right: The sum is right. (0 to 10)\n- short: It is short. (0 to 4)" in question
    assert 'like this: {"right": 5.0, "short": 2.0}' in question and "user: 2 + 2?" in question


def test_each_row_may_have_a_rubric_and_one_without_abstains():
    """Criteria without names, whose weights below 0 take points away, as in HealthBench."""
    rubrics = [
        [{"criterion": "It is good."}, {"criterion": "It lies.", "weight": -2.0}],
        None,
        [],
        '[{"criterion": "x"}]',
    ]
    replies = {"It is good.": '{"1": 10, "2": 2.5}', "- 1: x": '{"1": 3}'}

    def reply(question, tries):
        return 200, next(text for words, text in replies.items() if words in question)

    with serving(reply) as server:
        found, seen = judged(server, rubric_column="rubric", rubric=rubrics)
        assert len(server.requests) == 2
        assert judged(server, rubric_column="rubric", rubric=[None] * 4) == ([None] * 4, {})
    assert found == [pytest.approx(1.0 - 2 * 0.25), None, None, pytest.approx(0.3)]
    assert seen == {"failed": 0.0, "unanswered": 0.0, "unparsed": 0.0, "tries": 1.0}


def test_the_rubrics_of_rows_are_read_before_a_run(refused):
    function = "judge.score(url='http://x/v1', model='m', rubric_column='rubric')"
    good, wrong = [{"criterion": "x"}], [{"criterion": "x", "weight": 0}]

    def checked(*rubrics):
        return check(
            Dataset([[1]] * 2, [{"prompt": "?", "rubric": x} for x in rubrics], 0, 1, [1, 2]), [function], "data"
        )

    with refused("'rubric'"):
        checked(None, None)
    with refused("row 2", "weight"):
        checked(good, wrong)
    (note,) = checked(good, None).notes
    assert "row 2" in note


def test_requests_run_at_the_same_time_but_not_more_than_allowed():
    with serving(by_word) as server:
        server.pause = 0.05
        judged(server, concurrency=2)
    assert server.most == 2


def test_a_template_and_a_key_come_from_a_file_and_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "hunter2")
    file = tmp_path / "template.txt"
    file.write_text('{{"right": "{answer}"}} {completion} in <points>')
    with serving(lambda question, _: (200, f"<points>{len(question)}</points>")) as server:
        seen: dict[str, float] = {}
        found = asyncio.run(
            judge.score(PROMPTS[:1], TEXTS[:1], seen.__setitem__, url=server.url, model="m", template=str(file),
                        tag="points", most=100.0, api_key_env="JUDGE_KEY", answer=["4"])
        )  # fmt: skip
    assert found == [len('{"right": "4"} good in <points>') / 100]
    assert server.keys == {"Bearer hunter2"}


def test_a_wrong_key_or_model_ends_the_run_without_showing_the_key(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "hunter2")
    for status in (401, 404):
        with serving(lambda *_, status=status: (status, "")) as server, pytest.raises(UserError) as error:
            judged(server, api_key_env="JUDGE_KEY")
        assert str(status) in str(error.value) and "hunter2" not in str(error.value)


def test_wrong_arguments_are_refused_before_a_run(tmp_path, refused):
    (tmp_path / "empty.txt").write_text("what?")
    (tmp_path / "shown.txt").write_text("{completion}")
    for arguments, named in {
        "model='m'": "url",
        "url='host', model='m'": "url = 'host'",
        "url='http://x/v1', model='m', api_key_env='NO_SUCH_KEY'": "NO_SUCH_KEY",
        "url='http://x/v1', model='m', template='no/file'": "no/file",
        f"url='http://x/v1', model='m', template={str(tmp_path / 'empty.txt')!r}": "empty.txt",
        "url='http://x/v1', model='m', retries=-1": "retries",
        "url='http://x/v1', model='m', criteria=({'weight': 1},)": "criterion 1",
        "url='http://x/v1', model='m', criteria=('good',)": "criteria",
        "url='http://x/v1', model='m', criteria=({'criterion': 'x', 'weight': -1},)": "weight",
        "url='http://x/v1', model='m', criteria=({'criterion': 'x', 'most': 0},)": "most = 0",
        "url='http://x/v1', model='m', rubric_column='r', criteria=({'criterion': 'x'},)": "rubric_column",
        f"url='http://x/v1', model='m', rubric_column='r', template={str(tmp_path / 'shown.txt')!r}": "{rubric}",
    }.items():
        with refused(named):
            check_call(f"judge.score({arguments})", REWARDS, "config.reward.functions")


def test_a_judge_that_is_not_there_is_told_when_a_run_starts():
    with serving(by_word) as server:
        there = f"judge.score(url='{server.url}', model='m')"
        check_reach(there, REWARDS, "config.reward.functions")  # any answer will do: this server has no GET
    check_call(there, REWARDS, "config.reward.functions")  # when a config is read
    with pytest.raises(UserError, match=server.url):
        check_reach(there, REWARDS, "config.reward.functions")
    check_reach("math.accuracy", REWARDS, "config.reward.functions")  # needs nothing
