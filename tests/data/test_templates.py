"""Results of tools in the chat templates of published models: tests/templates states their behaviour anew."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_tools import LIMITS, call
from tiny import byte_tokenizer

from jaxrl_llm import recipe as recipes
from jaxrl_llm.config.load import load
from jaxrl_llm.data import encoding, examples
from jaxrl_llm.data import prompts as data
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.environments import EnvironmentPool
from jaxrl_llm.tasks.protocol import Reply
from jaxrl_llm.tasks.tools import Tools

FOLDER = Path(__file__).parents[1] / "templates"
ENDS = {"qwen": "<|im_end|>", "llama": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>"}
SPECIALS = {
    "qwen": ["<|im_start|>", "<|endoftext|>"],
    "llama": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"],
    "mistral": ["<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]"],
    "gemma": ["<bos>", "<start_of_turn>"],
}
THINKING, QUIET, NONE = {"enable_thinking": True}, {"enable_thinking": False}, {}
EMPTY = "<think>\n\n</think>\n\n"  # a thought
RESULTS = [
    ("14",),
    ('error: TypeError: can only concatenate str (not "int") to str',),
    ('a "quoted" \\ back\\nslash\nand\n\tlines',),
    ("  blanks at both ends \n",),
    ("Zürich 東京 🙂 {{ braces }}",),
    ("",),
    ("5", '{"a": [1, null]}', "", " x"),
]


def of(name: str) -> Any:
    """A tokenizer with the template and the special tokens of a family."""
    family = next(family for family in ENDS if name.startswith(family))
    made = byte_tokenizer((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"))
    made.add_special_tokens({"eos_token": ENDS[family], "additional_special_tokens": SPECIALS[family]})
    made.bos_token = SPECIALS[family][0]
    return made


def qwen(results: Sequence[str]) -> str:
    shown = "".join(f"\n<tool_response>\n{x}\n</tool_response>" for x in results)
    return f"\n<|im_start|>user{shown}<|im_end|>\n<|im_start|>assistant\n"


def llama(results: Sequence[str]) -> str:
    begin = "<|start_header_id|>{}<|end_header_id|>\n\n".format
    shown = "".join(f"{begin('ipython')}{json.dumps(x, ensure_ascii=False)}<|eot_id|>" for x in results)
    return shown + begin("assistant")


def mistral(results: Sequence[str]) -> str:
    return "".join(
        f'[TOOL_RESULTS] {{"content": {x}, "call_id": "{i:09}"}}[/TOOL_RESULTS]' for i, x in enumerate(results)
    )


# template, arguments of the template, and what stands between two turns
FORMS: list[tuple[str, dict[str, Any], Callable[[Sequence[str]], str]]] = [
    ("qwen2_5", NONE, qwen),
    ("qwen3", NONE, qwen),
    ("qwen3", THINKING, qwen),
    ("qwen3", QUIET, lambda results: qwen(results) + EMPTY),
    ("llama3_1", NONE, llama),
    ("llama3_1", {"date_string": "24 Nov 2026"}, llama),
    ("llama3_2", NONE, llama),
    ("mistral", NONE, mistral),
]


class Told(Tools):
    """Answers with the results that the row holds."""

    stops = ()

    def __init__(self):
        super().__init__(functions=("tests.sandbox.test_tools.add",))

    def reset(self, row: dict[str, Any]) -> None:
        self.results = list(row["results"])

    def step(self, text: str) -> Reply:
        return Reply(tuple(self.results.pop(0))) if self.results else Reply(done=True)


def pool(name: str, given: dict[str, Any], make: Callable[[], Any] = Told) -> EnvironmentPool:
    return EnvironmentPool(of(name), make, given, **LIMITS | dict(most=20, observation_tokens=10**4))


def row(results: Sequence[Sequence[str]], **columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": "1+1?"}], "results": results, **columns}


def ids(made: EnvironmentPool, text: str) -> list[int]:
    return made.tokenizer(text, add_special_tokens=False)["input_ids"]


def answered(made: EnvironmentPool, one: dict[str, Any], turns: Sequence[str]) -> list[str]:
    """The text that follows each turn of an episode."""
    batch, said = made.start_batch([one], 1), []
    for turn in turns:
        observation = batch.answer(0, ids(made, turn)).result()
        assert observation
        said.append(made.tokenizer.decode(observation))
    return said


@pytest.mark.parametrize(("name", "given", "form"), FORMS, ids=lambda x: x if isinstance(x, str) else "")
def test_after_a_turn_stands_what_the_template_writes_there(name, given, form):
    end = ENDS[name.rstrip("0123456789_")]
    of_run, of_row = pool(name, given), pool(name, {})
    turns = ["<think>\nhm\n</think>\n\n" + call("add", a=1), call("add", a=2), "I add."] * 3
    turns = [turn + end for turn in turns][: len(RESULTS)]
    expected = [form(results) for results in RESULTS]
    assert answered(of_run, row(RESULTS), turns) == expected
    assert answered(of_row, row(RESULTS, chat_template_kwargs=given), turns) == expected  # of the row alone
    # In a whole conversation it stands behind each turn, whatever the template made of the turns before.
    for turn, results, text in zip(turns, RESULTS, expected, strict=True):
        tools = [{"role": "tool", "content": x, "tool_call_id": f"{i:09}"} for i, x in enumerate(results)]
        messages = [*row([])["prompt"], {"role": "assistant", "content": turn.removesuffix(end)}, *tools]
        args = dict(tools=of_run.schemas, tokenize=False, add_generation_prompt=True)
        whole = of_run.tokenizer.apply_chat_template(messages, **args | given)
        assert whole.endswith(turn.split("</think>")[-1].strip() + text)


@pytest.mark.parametrize("name", [*dict.fromkeys(name for name, *_ in FORMS), "gemma3"])
def test_an_answer_to_a_chat_ends_as_the_template_ends_it(name):
    made, end = of(name), ENDS[name.rstrip("0123456789_")]
    # As published for Gemma: the tokenizer's own end token is that of texts.
    made.add_special_tokens({"additional_special_tokens": [end, "<eos>"]})
    # Mistral's template writes the tokenizer's end token, whatever it is.
    end = end if name != "mistral" else "<eos>"
    made.eos_token = "<eos>"
    ends, eos = made.convert_tokens_to_ids(end), made.eos_token_id
    assert encoding.turn_end(made, {}) == ends
    rows = [{"prompt": [{"role": "user", "content": "1+1?"}], "completion": "2"}, {"prompt": "1+1=", "completion": "2"}]
    dataset = data.tokenize(rows, made, max_prompt_tokens=999, overlong="error")
    settings = recipes.read_sft(load("sft")).data
    for stops, last in (((ends, eos), [ends, eos]), ((eos,), [eos, eos])):
        answers = examples.tokenize_answers(dataset, made, settings, 9, stops)
        assert [answer.tokens[-1] for (answer,) in answers] == last
        notes = data.check_turn_end(dataset, made, {}, stops).notes[len(dataset.notes) :]
        assert [end in note for note in notes] == [True] * (ends not in stops)
    of_text = replace(dataset, rows=rows[1:])
    assert data.check_turn_end(of_text, made, {}, (eos,)) is of_text


def test_a_turn_that_a_string_ends_gets_the_end_token_of_the_template_too():
    made = pool("qwen2_5", {})
    (said,) = answered(made, row([("3",)]), [call("add", a=1)])
    assert said == "<|im_end|>" + qwen(["3"])


class Undescribed(Told):
    """Its tools stand in the rows, or nowhere."""

    schemas = ()  # type: ignore[assignment]


def test_an_environment_may_answer_calls_of_tools_that_the_rows_describe():
    made = pool("qwen3", QUIET, Undescribed)
    one = row([("3",)], tools=[{"type": "function", "function": {"name": "f"}}])
    assert answered(made, one, ["x<|im_end|>"]) == [qwen(["3"]) + EMPTY]
    assert answered(made, row([("3",)]), ["x<|im_end|>"]) == [qwen(["3"]) + EMPTY]
    refused = pool("gemma3", {}, Undescribed)  # nothing says beforehand that it answers with results
    with pytest.warns(UserWarning, match="roles must alternate"):
        assert refused.start_batch([row([("3",)])], 1).answer(0, ids(refused, "x<end_of_turn>")).result() is None


def test_a_template_without_results_of_tools_is_refused_before_a_run():
    with pytest.raises(UserError, match="roles must alternate"):
        pool("gemma3", {})


def test_a_template_that_ends_turns_without_a_special_token_is_refused(refused):
    made = of("qwen2_5")
    made.chat_template = made.chat_template.replace("<|im_end|>", "(end)")
    with refused("'(end)"):
        EnvironmentPool(made, Told, **LIMITS)


REFUSES = "{% if effort is defined %}{{ raise_exception('no effort') }}{% endif %}"
COUNTS = "{% for m in messages if '7' in m.content %}{{ raise_exception('no 7') }}{% endfor %}"


def test_arguments_of_a_row_that_the_template_refuses_are_told_before_a_run():
    made = pool("qwen2_5", {})
    made.tokenizer.chat_template += REFUSES
    rows = [row([]), row([], chat_template_kwargs={"effort": 1})]
    made.check(rows[:1])
    with pytest.raises(UserError, match="no effort"):
        made.check(rows)


def test_a_template_that_fails_in_an_episode_ends_this_episode_only():
    made = pool("qwen2_5", {})
    made.tokenizer.chat_template += COUNTS
    batch = made.start_batch([row([("7",)]), row([("8",)])], 1)
    with pytest.warns(UserWarning, match="no 7"):
        failed = batch.answer(0, ids(made, "x<|im_end|>")).result()
    assert failed is None
    assert batch.answer(1, ids(made, "x<|im_end|>")).result()
    assert batch.truncated.tolist() == [[True], [False]]
    assert batch.metrics()["errors"].tolist() == [[1.0], [0.0]]


@pytest.mark.parametrize(("name", "given", "form"), FORMS, ids=lambda x: x if isinstance(x, str) else "")
def test_results_that_are_too_long_are_cut_and_what_stands_around_them_is_not(name, given, form):
    long, short = '"long"\n' * 300, "short"
    made = EnvironmentPool(of(name), Told, given, **LIMITS | dict(observation_tokens=400))
    batch, turn = made.start_batch([row([(long, short)])], 1), ids(made, "x" + ENDS[name.rstrip("0123456789_")])
    observation = batch.answer(0, turn).result()
    assert observation and 390 < len(observation) <= 400
    said = made.tokenizer.decode(observation)
    assert said == next(form([long[:n], short]) for n in range(400) if len(form([long[:n], short])) == len(said))
    assert batch.truncated.all()


def test_more_results_than_have_room_end_the_episode():
    made = EnvironmentPool(of("qwen2_5"), Told, **LIMITS | dict(observation_tokens=100))
    batch = made.start_batch([row([("3",) * 20])], 1)
    assert batch.answer(0, ids(made, "x<|im_end|>")).result() is None
    assert batch.truncated.all()


def test_room_for_a_result_is_asked_for_before_a_run(refused):
    with refused("observation_tokens = 20"):
        EnvironmentPool(of("qwen2_5"), Told, **LIMITS | dict(observation_tokens=20))


def test_a_failed_step_is_a_result_of_a_tool_where_turns_have_a_chats_form():
    made = pool("qwen3", QUIET)
    batch = made.start_batch([row([3])], 1)  # type: ignore[list-item]
    with pytest.warns(UserWarning, match="'int' object is not iterable"):
        observation = batch.answer(0, ids(made, "x<|im_end|>")).result()
    assert made.tokenizer.decode(observation) == qwen(["error: TypeError: 'int' object is not iterable"]) + EMPTY
