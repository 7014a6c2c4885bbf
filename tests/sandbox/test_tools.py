"""Tools: programs of the policy in a sandbox, and functions in the form of the chat template."""

from __future__ import annotations

import json
import sys

import pytest
from tiny import byte_tokenizer

from jaxrl_llm import recipe as recipes
from jaxrl_llm.config.load import load
from jaxrl_llm.data import prompts as data
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.environments import EnvironmentPool
from jaxrl_llm.sandbox import program as sandbox
from jaxrl_llm.tasks.protocol import OwnError
from jaxrl_llm.tasks.python import Python
from jaxrl_llm.tasks.tools import Tools

linux = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


def run(code: str, seconds: float = 5.0) -> sandbox.ProgramResult:
    return sandbox.run_program(code, seconds=seconds, memory=512, characters=400)


@linux
def test_a_program_prints_bounded_text_and_keeps_files_in_its_own_folder():
    result = run("open('a', 'w').write('mine'); import math; print(open('a').read(), math.comb(5, 2))")
    assert result == ("mine 10\n", "", "", "")
    assert "FileNotFoundError" in run("open('a')").errors  # the folder of another program
    assert run("print('x' * 10**6 + 'y', end='')").output == "x" * 200 + "\n...\n" + "x" * 199 + "y"
    assert run("import os; os.write(1, b'\\xff\\xfea')").output == "\ufffd\ufffda"
    assert run("print('\\ud800')").error


@linux
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("1 +", "SyntaxError"),
        ("raise KeyError('x')", 'File "program", line 1'),
        ("import os\nwhile True: os.fork()", "BlockingIOError"),
        ("x = bytearray(10 * 2**30)", "MemoryError"),
        ("open('/etc/passwd')", "FileNotFoundError"),
        ("open('/x', 'w')", "Read-only"),
        ("open('big', 'wb').write(b'0' * 2**26)", "File too large"),
        ("while True: pass", "longer than"),
        ("import ctypes; ctypes.string_at(0)", "signal 11"),
        ("i = 0\nwhile True:\n  i += 1\n  open(str(i), 'w')", "wrote too much"),
    ],
)
def test_a_program_that_fails_is_told_why(code, reason):
    result = run(code, seconds=1.0)
    assert result.error and reason in result.error + result.errors
    assert "<string>" not in result.errors  # no line of what runs it


@linux
def test_the_python_tool_answers_with_output_and_counts_errors():
    tool = Python(seconds=5.0, memory=512, most_characters=100)
    good = tool.step("I compute. <python>\nprint(2 ** 10)\n</python>")
    assert (good.observation, good.done) == ("<output>1024</output>", False)
    assert good.metrics == {"programs": 1.0, "own_errors": 0.0}
    bad = tool.step("<python>1 / 0</python>")
    assert "ZeroDivisionError" in bad.observation
    assert bad.metrics == {"programs": 1.0, "own_errors": 1.0}  # the tool has not failed
    assert tool.step("the answer is 4").done


TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{% if loop.previtem['role'] != 'tool' %}<|im_start|>user{% endif %}\n<tool_response>\n{{ m['content'] }}\n"
    "</tool_response>{% if loop.last or loop.nextitem['role'] != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% for call in m['tool_calls'] or () %}"
    "<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


NO_RESULTS = "{% for m in messages %}{{ m['content'] if m['role'] != 'tool' }}<|im_end|>{% endfor %}{{ tools }}"


def add(a: int, b: int = 0) -> int:
    """
    Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def undocumented(a):
    return a


def loop() -> list:
    """
    Returns what no JSON can say.
    """
    made: list = []
    made.append(made)
    return made


def broken() -> str:
    """
    Says that the call is wrong.
    """
    raise OwnError("no such thing")


HERE = "tests.sandbox.test_tools"
LIMITS = dict(most=4, tokens=100, observation_tokens=200, workers=2, timeout=5.0)


def pool(functions: tuple[str, ...] = (f"{HERE}.add", "tools.calculate"), template: str = TEMPLATE) -> EnvironmentPool:
    return EnvironmentPool(byte_tokenizer(template), lambda: Tools(functions=functions), **LIMITS)


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_the_chat_template_describes_the_functions_in_the_prompt():
    made = pool()
    rows = [{"prompt": [{"role": "user", "content": "1+1?"}]}]
    dataset = data.tokenize(
        rows, made.tokenizer, max_prompt_tokens=2000, overlong="error", template_args={"tools": made.schemas}
    )
    text = made.tokenizer.decode(dataset.ids[0])
    assert '"name": "add"' in text
    assert "numbers joined by + - * / // % ** and brackets" in text


def test_results_have_the_form_that_the_template_gives_to_a_conversation():
    made = pool()
    said = [call("add", a=2, b=3) + call("calculate", expression="2*(3+4)"), call("add", a="x"), "fourteen"]
    batch = made.start_batch([{}], 1)
    ids = [made.tokenizer(turn + "<|im_end|>", add_special_tokens=False)["input_ids"] for turn in said]
    observations = [batch.answer(0, turn).result() for turn in ids]
    assert observations[2] is None
    results = [["5", "14"], ['error: TypeError: can only concatenate str (not "int") to str']]
    messages = [{"role": "user", "content": "?"}]
    whole = made.tokenizer.apply_chat_template(messages, tools=made.schemas, add_generation_prompt=True, tokenize=False)
    for turn, observation, result in zip(said, observations[:2], results, strict=False):
        messages += [{"role": "assistant", "content": turn}, *({"role": "tool", "content": text} for text in result)]
        whole += turn + "<|im_end|>" + made.tokenizer.decode(observation)
    assert whole == made.tokenizer.apply_chat_template(
        messages, tools=made.schemas, add_generation_prompt=True, tokenize=False
    )
    assert {name: float(x[0, 0]) for name, x in batch.metrics().items() if name != "seconds"} == {
        "calls": 3.0, "errors": 1.0, "invalid": 0.0, "own_errors": 0.0, "turns": 3.0,
    }  # fmt: skip


def test_each_call_of_a_turn_has_its_own_result_or_error():
    tools = Tools(functions=(f"{HERE}.loop", f"{HERE}.broken", f"{HERE}.add"))
    reply = tools.step(call("loop") + call("broken") + call("add", a=1))
    no_json, own = "error: ValueError: Circular reference detected", "error: OwnError: no such thing"
    assert reply.observation == (no_json, own, "1")
    assert reply.metrics == {"calls": 3.0, "invalid": 0.0, "errors": 1.0, "own_errors": 1.0}


@pytest.mark.parametrize(
    "text",
    ["<tool_call>{1}</tool_call>", call("none"), "<tool_call>[1]</tool_call>", f"<tool_call>{'[' * 10**5}</tool_call>"],
    ids=["no JSON", "no such function", "a list", "too deep"],
)
def test_a_call_that_means_nothing_is_told_so(text):
    reply = Tools(functions=(f"{HERE}.add",)).step(text)
    assert "error: this is no call of add" in reply.observation[0]
    assert reply.metrics["invalid"] == 1.0


@pytest.mark.parametrize(
    ("named", "given"),
    [
        ("tools.none", dict(functions=("tools.none",))),
        ("test_tools.add", dict(functions=(f"{HERE}.add", f"{HERE}.add"))),
        ("", dict(template=NO_RESULTS)),
    ],
    ids=["unknown", "twice", "template"],
)
def test_tools_that_cannot_work_are_refused_before_a_run_begins(named, given, refused):
    with refused(named):
        pool(**given)


def test_a_tool_without_types_and_a_docstring_is_refused():
    # The rest of the message names a file of transformers.
    with pytest.raises(UserError, match=r"config\.env\.functions: .*undocumented"):
        pool((f"{HERE}.undocumented",))


def test_prompts_without_a_chat_show_no_tools(tmp_path, refused):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1"}\n')
    config = load("grpo")
    config.data.source = str(tmp_path / "rows.jsonl")
    with refused("config.env.functions"):
        data.load(recipes.read(config).data, byte_tokenizer(TEMPLATE), pool().schemas)
