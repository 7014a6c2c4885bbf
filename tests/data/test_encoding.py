"""Chat templates and their arguments, begin tokens, what a tokenizer loses, and token ids kept from run to run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from test_recipes import TEMPLATE, write_qwen

from jaxrl_llm import recipe as recipes
from jaxrl_llm.config.load import load, override, parse_arguments
from jaxrl_llm.data import encoding
from jaxrl_llm.data import prompts as data
from jaxrl_llm.data.encoding import encode
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import compilation, user_cache
from jaxrl_llm.models import hf

# As Qwen3's: no thinking is an empty thought.
THINKING = TEMPLATE + "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
LLAMA = (
    "{{ bos_token }}{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{% generation %}{{ date_string }}{% endgeneration %}{% for m in messages %}{{ m['content'] }}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    write_qwen(folder)
    return folder


@pytest.fixture
def tokenizer(folder):
    made = hf.load_tokenizer(folder)
    made.chat_template = THINKING
    return made


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A cache of its own that keeps token ids of even the shortest prompts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(encoding, "MIN_CACHED", 1)
    return tmp_path / "jaxrl_llm" / "tokens"


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def said(tokenizer, prompt, **template_args) -> str:
    (ids,) = encode([prompt], tokenizer, "here", template_args=template_args)
    return tokenizer.decode(ids.tolist())


# ---- templates


def test_arguments_of_the_chat_template_reach_training_and_evaluation(folder, tokenizer, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": chat("3 apples?"), "answer": "3"}) + "\n")
    files = [f"--config.{name}.source={tmp_path}/rows.jsonl" for name in ("data", "eval")]
    argv = ["--config", "grpo", *files, "--config.data.max_prompt_tokens=99"]
    plain, *_ = parse_arguments("test", "", argv)
    config, *_ = parse_arguments("test", "", [*argv, "--config.data.chat_template_args.enable_thinking=false"])
    one, other = recipes.read(config), recipes.read(plain)
    assert config.to_dict()["data"]["chat_template_args"] == {"enable_thinking": False}
    for given, end in ((one, "assistant\n<think></think>"), (other, "assistant\n")):
        for loaded in (data.load(given.data, tokenizer), data.load_held_out(given.eval, given.data, tokenizer)):
            assert tokenizer.decode(loaded.ids[0]).endswith(end)


@pytest.mark.parametrize(("text", "value"), [("false", False), ("3", 3), ("'3'", "3"), ("low", "low"), ("[1]", [1])])
def test_an_argument_of_the_template_is_set_from_the_command_line_to(text, value):
    config = load("grpo")
    override(config, "data.chat_template_args.effort", text)
    assert config.data.chat_template_args.to_dict() == {"effort": value}


def test_an_argument_that_the_template_does_not_read_is_refused(tokenizer, refused):
    for name in ("enable_thinkin", "messages", "add_generation_prompt", "tokenize", "m"):
        with refused(f"chat_template_args.{name} ", "enable_thinking"):
            said(tokenizer, chat("?"), **{name: False})


def test_arguments_without_a_chat_are_refused(tokenizer, refused):
    rows = data.tokenize([{"prompt": "3 apples"}], tokenizer, max_prompt_tokens=99, overlong="drop")
    with refused("--args"):
        data.check_template_args_used("--args", {"enable_thinking": False}, rows)


def test_a_variable_that_the_template_sets_unless_given_may_be_given(tokenizer, refused):
    tokenizer.chat_template = LLAMA
    assert said(tokenizer, chat("?"), date_string="1 Jan") == "1 Jan?"
    with refused("chat_template_args.day ", "date_string"):
        said(tokenizer, chat("?"), day="1 Jan")


@pytest.mark.parametrize("call", ["strftime_now('%d %b %Y')", 'strftime_now( "%d %b %Y" )'])
def test_a_template_writes_the_day_of_the_run_and_not_that_of_the_clock(tokenizer, call):
    dated = LLAMA.replace("strftime_now('%d %b %Y')", call)
    tokenizer.chat_template = dated
    assert said(encoding.on_day(tokenizer, "2024-02-29"), chat("?")) == "29 Feb 2024?"
    assert said(tokenizer, chat("?"), date_string="1 Jan") == "1 Jan?"
    tokenizer.chat_template = {"default": dated, "tool_use": "no date"}
    assert encoding.on_day(tokenizer, "2024-02-29").chat_template["tool_use"] == "no date"
    assert said(tokenizer, chat("?")) == "29 Feb 2024?"


def test_a_date_in_a_format_that_is_no_literal_is_refused(tokenizer):
    tokenizer.chat_template = "{% set form = '%d' %}{{ strftime_now(form) }}"
    with pytest.raises(UserError, match="strftime_now"):
        encoding.on_day(tokenizer, "2024-02-29")


def test_a_prompt_that_ends_with_the_assistant_goes_on_from_there(tokenizer):
    assert said(tokenizer, chat("3 apples?", "He has")).endswith("<|im_start|>assistant\nHe has")
    assert said(tokenizer, chat("3 apples?", "3", "4?")).endswith("4?<|im_end|>\n<|im_start|>assistant\n")


def test_a_begin_token_stands_once_before_text_and_by_the_template_before_chats(tmp_path, folder):
    settings = json.loads((folder / "tokenizer.json").read_text())
    first, text = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    settings["post_processor"] = {
        "type": "TemplateProcessing", "single": [first, text], "pair": [first, text],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }  # fmt: skip
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").unlink()  # with it, transformers would take Qwen's own post-processor
    special = json.loads((folder / "tokenizer_config.json").read_text()) | {"bos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
    tokenizer = hf.load_tokenizer(tmp_path)
    rows = [{"prompt": prompt} for prompt in ("3 apples", "<|endoftext|>3 apples", chat("3 apples"))]
    made = data.tokenize(rows, tokenizer, max_prompt_tokens=99, overlong="error")
    bare = encode(["3 apples"], tokenizer, "here")[0].tolist()
    assert made.ids[0].tolist() == made.ids[1].tolist() == [0, *bare]
    assert made.ids[2][0] != 0
    assert encode(["3 apples"], tokenizer, "an answer")[0].tolist() == bare


# ---- tokens


def test_token_ids_are_those_of_the_tokenizer_called_row_by_row(tokenizer):
    texts = ["", " ", "3 apples", "é🙂\n\n", "<|im_end|>x", "a" * 3000]
    tokenizer("x", truncation=True, max_length=2, padding="max_length")  # a state that must not stay
    ids = encode([*texts, chat("3 apples?")], tokenizer, "here")
    for text, found in zip(texts, ids[:-1], strict=True):
        assert found.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = tokenizer.apply_chat_template(chat("3 apples?"), add_generation_prompt=True, return_dict=False)
    assert ids[-1].tolist() == whole


def test_a_long_list_is_encoded_in_pieces_and_an_error_names_its_row(tokenizer, monkeypatch, refused):
    monkeypatch.setattr(encoding, "CHUNK", 3)
    prompts = [f"{i} apples" for i in range(8)]
    pieces = encode(prompts, tokenizer, "here")
    monkeypatch.undo()
    assert [x.tolist() for x in pieces] == [x.tolist() for x in encode(prompts, tokenizer, "here")]
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with refused("here row 17"):
        encode(["a", chat("b")], tokenizer, "here", numbers=[15, 17])


# ---- kept from run to run


def test_kept_token_ids_are_the_same_and_are_read_and_not_made_again(tokenizer, home, monkeypatch):
    prompts = ["3 apples", chat("4?"), "é🙂"]
    first = encode(prompts, tokenizer, "here")
    (file,) = home.iterdir()
    monkeypatch.setattr(encoding, "_encode", None)
    again = encode(prompts, tokenizer, "here")
    assert [(x.dtype, x.tolist()) for x in again] == [(x.dtype, x.tolist()) for x in first]
    assert file.suffix == ".npz"


def test_another_prompt_argument_template_or_tokenizer_makes_other_token_ids(tokenizer, home, folder):
    other = hf.load_tokenizer(folder)
    other.add_tokens(["apples"])
    other.chat_template = THINKING
    dated = [hf.load_tokenizer(folder) for _ in range(2)]
    for day, one in enumerate(dated, 24):
        one.chat_template = LLAMA
        encoding.on_day(one, f"2026-11-{day}")
    made = [
        encode([chat("3 apples")], tokenizer, "here"),
        encode([chat("4 apples")], tokenizer, "here"),
        encode(["3 apples"], tokenizer, "here"),
        encode([chat("3 apples")], tokenizer, "here", template_args={"enable_thinking": False}),
        encode([chat("3 apples")], other, "here"),
        *(encode([chat("3 apples")], one, "here") for one in dated),
    ]
    assert len({tuple(x[0].tolist()) for x in made}) == len(made) == len(list(home.iterdir()))


def test_what_a_template_writes_by_the_clock_is_not_kept(tokenizer, home):
    tokenizer.chat_template = LLAMA
    encode([chat("?")], tokenizer, "here")
    assert not home.exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", None], ids=["empty", "torn", "flipped"])
def test_a_damaged_file_is_made_again(tokenizer, home, content):
    prompts = [f"{i} apples" for i in range(200)]
    first = encode(prompts, tokenizer, "here")
    (file,) = home.iterdir()
    whole = file.read_bytes()
    middle = len(whole) // 3
    file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :] if content is None else content)
    assert [x.tolist() for x in encode(prompts, tokenizer, "here")] == [x.tolist() for x in first]
    assert file.read_bytes()[middle] == whole[middle]
    assert list(home.iterdir()) == [file]


def test_the_folder_keeps_a_few_files_and_those_last_used(tokenizer, home, monkeypatch):
    monkeypatch.setattr(user_cache, "FILES", 3)
    for i in range(3):
        encode([f"{i} apples"], tokenizer, "here")
    for age, file in enumerate(sorted(home.iterdir(), key=lambda file: file.stat().st_mtime), 1):
        os.utime(file, (age, age))
    encode(["0 apples"], tokenizer, "here")  # used again
    encode(["3 apples"], tokenizer, "here")
    monkeypatch.setattr(encoding, "_encode", lambda *_: pytest.fail("made again"))
    assert len(list(home.iterdir())) == 3
    for i in (0, 2, 3):
        encode([f"{i} apples"], tokenizer, "here")


def test_a_folder_that_is_too_large_loses_its_oldest_files(home, monkeypatch):
    monkeypatch.setattr(user_cache, "BYTES", 5000)
    for i in range(4):
        user_cache.save_ids(str(i), [np.arange(400, dtype=np.int32)])
        os.utime(home / f"{i}.npz", (i, i))
    user_cache.save_ids("4", [np.arange(400, dtype=np.int32)])
    assert {file.name for file in home.iterdir()} == {"3.npz", "4.npz"}


def test_compiled_programs_that_no_run_has_used_for_long_are_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(compilation, "CACHE_BYTES", 2500)
    monkeypatch.setattr(compilation.jax.config, "update", lambda *_: None)
    compilation.enable_compilation_cache()  # there is no folder yet
    folder = tmp_path / "jaxrl_llm" / "xla"
    folder.mkdir(parents=True)
    for name, read, written in (("unused", 1, 3), ("used", 9, 1), ("new", 8, 8)):
        (folder / f"{name}-cache").write_bytes(bytes(1000))
        os.utime(folder / f"{name}-cache", (read, written))
    compilation.enable_compilation_cache()
    assert {file.name for file in folder.iterdir()} == {"used-cache", "new-cache"}
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder))  # a folder of the user's own is not ours to clear
    monkeypatch.setattr(compilation, "CACHE_BYTES", 0)
    compilation.enable_compilation_cache()
    assert len(list(folder.iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_no_error(tokenizer, home):
    home.parent.write_text("a file where the folder should be")
    assert len(encode(["3 apples"], tokenizer, "here")[0])


def test_short_lists_are_not_kept(tokenizer, home, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home.parent.parent))
    encode(["3 apples"], tokenizer, "here")
    assert not home.exists()
