"""Tools: programs of the policy in a sandbox, and functions in the form of the chat template."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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
def test_a_program_prints_and_keeps_files_in_a_folder_of_its_own(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")  # of the trainer
    assert "hunter2" not in run("import os; print(os.environ)").output
    result = run("open('a', 'w').write('mine'); import math; print(open('a').read(), math.comb(5, 2))")
    assert result == ("mine 10\n", "", "", "")
    assert "FileNotFoundError" in run("open('a')").errors  # the folder of another program


@linux
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os\nwhile True: os.fork()", "BlockingIOError"),
        ("import subprocess; subprocess.run(['true'])", "BlockingIOError"),
        ("import os; print(os.system('echo hello'))", "32512"),
        ("import multiprocessing as m; m.Process(target=print).start()", "BlockingIOError"),
        ("x = bytearray(10 * 2**30)", "MemoryError"),
        ("x = []\nwhile True: x.append(bytearray(2**25))", "MemoryError"),
        ("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "Error"),
        ("open('/proc/self/environ').read()", "FileNotFoundError"),
        ("open('/etc/passwd').read()", "FileNotFoundError"),
        ("import os; os.symlink('/etc/passwd', 'p'); open('p')", "FileNotFoundError"),
        ("open('big', 'wb').write(b'0' * 2**26)", "File too large"),
        ("import ctypes; ctypes.CDLL(None).unshare(0x10000000); open('/etc/passwd')", "FileNotFoundError"),
        ("1 +", "SyntaxError"),
        ("raise KeyError('x')", 'File "program", line 1'),
    ],
)
def test_a_program_that_does_what_it_must_not_gets_an_error(code, said):
    result = run(code)
    assert said in result.output + result.errors
    assert result.error or said == "32512"
    assert "<string>" not in result.errors  # no line of what runs it


@linux
@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("while True: pass", "longer than"),
        ("import time; time.sleep(60)", "longer than"),
        ("import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()", ""),
        ("import ctypes; ctypes.string_at(0)", "signal 11"),
        ("i = 0\nwhile True:\n  i += 1\n  open(str(i), 'w')", "wrote too much"),
        ("import os\nwhile True:\n  os.mkdir('a')\n  os.chdir('a')", "wrote too much"),
    ],
)
def test_a_program_that_does_not_end_well_is_ended(code, error):
    began = time.monotonic()
    assert error in run(code, seconds=0.4).error
    assert time.monotonic() - began < 10


@linux
def test_a_program_cannot_write_outside_of_its_folder(tmp_path):
    assert "FileNotFoundError" in run(f"open({str(tmp_path / 'x')!r}, 'w')").errors
    assert "Read-only" in run("open('/x', 'w')").errors
    assert not list(tmp_path.iterdir())


@linux
def test_a_program_reaches_no_network_not_even_this_machine():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        server.settimeout(0.5)
        assert "unreachable" in run(f"import socket; socket.create_connection(('127.0.0.1', {port}))").errors
        with pytest.raises(TimeoutError):
            server.accept()


@linux
def test_output_has_an_end_and_is_text():
    assert run("print('x' * 10**6 + 'y', end='')").output == "x" * 200 + "\n...\n" + "x" * 199 + "y"
    assert run("import os; os.write(1, b'\\xff\\xfea')").output == "\ufffd\ufffda"
    assert run("print('\\ud800')").error


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


def tokenizer(template: str = TEMPLATE):
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: i for i, token in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    core = Tokenizer(models.BPE(vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(specials)
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = template
    return made


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


LIMITS = dict(most=4, tokens=100, observation_tokens=200, workers=2, timeout=5.0)


def pool(
    functions: tuple[str, ...] = ("tests.sandbox.test_tools.add", "tools.calculate"), **of_tokenizer
) -> EnvironmentPool:
    return EnvironmentPool(tokenizer(**of_tokenizer), lambda: Tools(functions=functions), **LIMITS)


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


def loop() -> list:
    """
    Returns what no JSON can say.
    """
    made: list = []
    made.append(made)
    return made


def test_a_result_that_is_no_json_is_an_error_of_its_call_alone():
    reply = Tools(functions=("tests.sandbox.test_tools.loop", "tests.sandbox.test_tools.add")).step(
        call("loop") + call("add", a=1)
    )
    assert reply.observation == ("error: ValueError: Circular reference detected", "1")
    assert reply.metrics == {"calls": 2.0, "invalid": 0.0, "errors": 1.0, "own_errors": 0.0}


def broken() -> str:
    """
    Says that the call is wrong.
    """
    raise OwnError("no such thing")


def test_a_tool_tells_the_errors_of_the_policy_from_its_own():
    reply = Tools(functions=("tests.sandbox.test_tools.broken",)).step(call("broken"))
    assert reply.observation == ("error: OwnError: no such thing",)
    assert (reply.metrics["own_errors"], reply.metrics["errors"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    "text",
    ["<tool_call>{1}</tool_call>", call("none"), "<tool_call>[1]</tool_call>", f"<tool_call>{'[' * 10**5}</tool_call>"],
    ids=["no JSON", "no such function", "a list", "too deep"],
)
def test_a_call_that_means_nothing_is_told_so(text):
    reply = Tools(functions=("tests.sandbox.test_tools.add",)).step(text)
    assert "error: this is no call of add" in reply.observation[0]
    assert reply.metrics["invalid"] == 1.0


@pytest.mark.parametrize(
    ("named", "given"),
    [
        ("tools.none", dict(functions=("tools.none",))),
        ("test_tools.add", dict(functions=("tests.sandbox.test_tools.add", "tests.sandbox.test_tools.add"))),
        ("", dict(template=NO_RESULTS)),
    ],
    ids=["unknown", "twice", "template"],
)
def test_tools_that_cannot_work_are_refused_before_a_run_begins(named, given, refused):
    with refused(named):
        pool(**given)


def test_a_tool_without_types_and_a_docstring_is_refused():
    with pytest.raises(
        UserError, match=r"config\.env\.functions: .*undocumented"
    ):  # the rest names a file of transformers
        pool(("tests.sandbox.test_tools.undocumented",))


def test_prompts_without_a_chat_show_no_tools(tmp_path, refused):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1"}\n')
    config = load("grpo")
    config.data.source = str(tmp_path / "rows.jsonl")
    with refused("config.env.functions"):
        data.load(recipes.read(config).data, tokenizer(), pool().schemas)


@linux
def test_threads_share_the_sandbox():
    found: list[str] = []
    threads = [threading.Thread(target=lambda i=i: found.append(run(f"print({i})").output)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [f"{i}\n" for i in range(8)]
