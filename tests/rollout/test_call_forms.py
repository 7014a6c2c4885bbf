"""Calls of tools in the form of each chat template: tests/templates states the behaviour of published ones anew."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_linear_time import is_slow
from test_templates import FOLDER, LIMITS, of
from tiny import byte_tokenizer

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.call_forms import FORMS, HERMES, choose_form
from jaxrl_llm.rollout.environments import EnvironmentPool
from jaxrl_llm.tasks.tools import Tools

# Special tokens of templates that test_templates has not, and the token at which the model stops after a call.
GEMMA = ["<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<tool_response|>", '<|"|>']
HARMONY = ["<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|end|>", "<|return|>"]
OTHERS = {"gemma4": (GEMMA, "<|tool_response>"), "gpt_oss": (HARMONY, "<|call|>"), "qwen3_coder": ([], "<|im_end|>")}
ENDS = {"qwen2_5": "<|im_end|>", "qwen3": "<|im_end|>", "llama3_1": "<|eot_id|>", "mistral": "</s>"}
ENDS |= {name: end for name, (_, end) in OTHERS.items()}
ONE_CALL = ("llama3_1", "gpt_oss")  # their templates write one call a message
ARGUMENTS = [
    {"text": "two words", "count": 3},
    {"text": 'a "quoted" {b: [1]} \\ back\nand 東京', "count": -1},
    {"text": "12"},
    {"text": "", "count": 0},
    {"text": "x", "flags": [1, 2], "options": {"deep": True}},
]


def note(text: str, count: int = 0, flags: list[int] | None = None, options: dict | None = None) -> str:
    """
    Returns its arguments.

    Args:
        text: any text
        count: any number
        flags: any numbers
        options: any object
    """
    return json.dumps([text, count, flags, options], ensure_ascii=False)


def made(name: str) -> Any:
    if name not in OTHERS:
        return of(name)
    specials, end = OTHERS[name]
    one = byte_tokenizer((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"))
    one.add_special_tokens({"additional_special_tokens": [*specials, end]})
    one.bos_token = "<|endoftext|>"
    return one


def pool(name: str) -> EnvironmentPool:
    functions = ("tests.rollout.test_call_forms.note",)
    limits = LIMITS | dict(observation_tokens=2000)
    return EnvironmentPool(made(name), lambda: Tools(functions=functions), **limits)


def calls_of(*arguments: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "function", "id": f"{i:09}", "function": {"name": "note", "arguments": given}}
        for i, given in enumerate(arguments)
    ]


@pytest.mark.parametrize("name", ENDS)
def test_a_call_as_the_template_writes_it_is_called_and_answered(name):
    """The episode is the conversation that the template writes, and each function gets the arguments of the call."""
    environments = pool(name)
    render = environments.tokenizer.apply_chat_template
    args = dict(tools=environments.schemas, tokenize=False)
    question = {"role": "user", "content": "Go."}
    batches = [(given,) for given in ARGUMENTS] + ([] if name in ONE_CALL else [tuple(ARGUMENTS[:2])])
    for given in batches:
        message = {"role": "assistant", "content": "", "tool_calls": calls_of(*given)}
        prompt = render([question], add_generation_prompt=True, **args)
        results = [{"role": "tool", "tool_call_id": c["id"], "name": "note", "content": note(**a)}
                   for c, a in zip(message["tool_calls"], given, strict=True)]  # fmt: skip
        whole = render([question, message, *results], add_generation_prompt=True, **args)
        turn = whole.removeprefix(prompt).partition(ENDS[name])[0] + ENDS[name]
        ids = environments.tokenizer(turn, add_special_tokens=False)["input_ids"]
        batch = environments.start_batch([{}], 1)
        observation = batch.answer(0, ids).result()
        assert observation and prompt + turn + environments.tokenizer.decode(observation) == whole
        assert batch.metrics()["calls"] == len(given) and not batch.metrics()["errors"] + batch.metrics()["invalid"]


# Calls that models write in another way than their templates, and calls that cannot be read.
WRITTEN = {
    "gpt_oss": "<|channel|>analysis<|message|>hm to=functions.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.note <|constrain|>json<|message|>{"text": "x"}<|call|>',
    "llama3_1": '<|python_tag|>{"type": "function", "name": "note", "parameters": {"text": "x"}}<|eom_id|>',
    "mistral": '[TOOL_CALLS][{"name": "note", "arguments": {"text": "x"}}]</s>',
    "gemma4": '<|channel>thought\nhm<channel|><|tool_call>call:note{text:<|"|>x<|"|>}<tool_call|><|tool_response>',
    "qwen3_coder": "<think>hm</think>\n<tool_call><function=note><parameter=text>x</parameter></function></tool_call>",
}
BROKEN = {
    "gpt_oss": "to=functions.note<|channel|>commentary json<|message|>{text<|call|>",
    "llama3_1": '{"name": "note", "parameters": {"text": ',
    "mistral": '[TOOL_CALLS] [{"name": "note"',
    "gemma4": "<|tool_call>call:note{text:<tool_call|>",
    "qwen3_coder": "<tool_call>\n<function=note>\n<parameter=count>\nthree\n</parameter>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_read_as_models_write_them_and_broken_ones_are_counted(name):
    environments = pool(name)
    for text, metric in ((WRITTEN[name], "calls"), (BROKEN[name], "invalid")):
        batch = environments.start_batch([{}], 1)
        ids = environments.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert batch.answer(0, ids).result()
        assert [int(batch.metrics()[k][0, 0]) for k in ("calls", "invalid")] == [1, metric == "invalid"]
    batch = environments.start_batch([{}], 1)
    ids = environments.tokenizer("The note is x." + ENDS[name], add_special_tokens=False)["input_ids"]
    assert batch.answer(0, ids).result() is None  # a turn without a call


def test_an_unknown_form_is_refused_before_a_run(refused):
    unknown = made("qwen2_5")
    unknown.chat_template = unknown.chat_template.replace("<tool_call>", "<call>").replace("</tool_call>", "</call>")
    with refused("is unknown", "<call>", "Hermes"):
        choose_form(unknown, {})
    silent = byte_tokenizer("{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}{{ tools }}")
    with refused("'nothing'"):
        choose_form(silent, {})
    with pytest.raises(UserError, match="roles must alternate"):
        choose_form(of("gemma3"), {})


def test_the_response_template_of_a_tokenizer_describes_a_form_of_its_own():
    own = made("qwen2_5")
    own.chat_template = own.chat_template.replace("<tool_call>", "<call>").replace("</tool_call>", "</call>")
    own.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open": "<call>", "close": "</call>", "repeats": True, "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close": "<|im_end|>", "content": "text"},
        },
    }  # fmt: skip
    form = choose_form(own, {})
    text = 'hm<call>{"name": "note", "arguments": {"text": "x"}}</call><|im_end|>'
    assert [part.calls for part in form.find(text, {})] == [[{"name": "note", "arguments": {"text": "x"}}]]
    assert [part.calls for part in form.find("<call>{</call>", {})] == [None]


OPENINGS = (
    "<tool_call>{", "<tool_call><function=note>", "<tool_call>note", "[TOOL_CALLS][", "[TOOL_CALLS]note[ARGS]",
    "<|tool_call>call:note", "<start_function_call>call:note", "to=functions.note<|message|>", "to=functions.note ",
    '|> {"name":', "} ",
)  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_reading_calls_takes_linear_time(form):
    texts = [(unit * 8000)[:8000] for unit in OPENINGS]
    assert [text[:60] for text in texts if is_slow(lambda text: form.find(text, {}), text)] == []


def test_the_first_form_is_the_one_that_environments_read():
    assert FORMS[0] is HERMES and choose_form(made("qwen3"), {}) is HERMES
