"""Converts prompts to token ids with chat template and tokenizer, and checks that no text is lost."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date
from functools import partial
from importlib.metadata import version
from itertools import repeat
from types import MappingProxyType
from typing import Any, TypeAlias

import jinja2.meta
import numpy as np
from jinja2 import Environment

from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import progress, user_cache

Chat: TypeAlias = list[dict[str, Any]]
CHUNK = 4096  # prompts per tokenizer call: enough for its threads, with little memory
CLOCK = re.compile(r"strftime_now\s*\(")  # a chat template asks for today's date
DATE = re.compile(CLOCK.pattern + r"""\s*(["'])(.*?)\1\s*\)""")  # in a format that can be read here
MIN_CACHED = 2**20  # minimum number of characters for storing token ids in the user's cache folder
# Unpaired surrogates: valid as JSON escapes, but not for tokenizers.
HALF_A_PAIR = re.compile("[\ud800-\udfff]")
ANSWER = "(an-answer)"  # stands for the words of an answer in a chat
FORMAT = 3  # version of stored token ids: raise it if a change of this file changes them


def encode(
    prompts: Sequence[str | Chat],
    tokenizer: Any,
    source: str,
    *,
    numbers: Sequence[int] = (),
    template_args: Mapping[str, Any] | None = None,
    row_args: Sequence[Mapping[str, Any]] = (),
    spelling: Mapping[str, str] = MappingProxyType({}),
) -> list[np.ndarray]:
    """Returns the token ids (int32) of texts as they are, and of chats with the tokenizer's template. Cuts nothing.

    A chat ends with the generation prompt. If its last message is from the assistant, the completion continues it.
    numbers: number of each prompt in its source, from 1; template_args: arguments of the chat template; row_args:
    further ones of each prompt, which win. spelling: replaced in all texts, after the template.
    Raises: UserError, naming source and row, if the template refuses a prompt or the tokenizer would lose text.
    """
    numbers, template_args = numbers or range(1, len(prompts) + 1), dict(template_args or {})
    if any(not isinstance(prompt, str) for prompt in prompts):
        check_template(tokenizer, source, template_args, zip(numbers, row_args, strict=False))
    # The cache saves minutes at the start of a run with a large data set.
    key, ids = _key(tokenizer, prompts, template_args | dict(spelling), row_args), None
    if key:
        ids = user_cache.load_ids(key, len(prompts))
    if ids is None:
        ids = []
        with progress.task(f"token ids of {source}", len(prompts)) as task:
            for chunk in _chunks(len(prompts)):
                prompt_args = [template_args | dict(row_arg) for row_arg in row_args[chunk]] or repeat(template_args)
                rows = zip(numbers[chunk], prompts[chunk], prompt_args, strict=False)
                texts = [_render(source, number, prompt, tokenizer, args) for number, prompt, args in rows]
                for mark, text in spelling.items():
                    texts = [x.replace(mark, text) for x in texts]
                ids += _encode(texts, tokenizer, source, numbers[chunk])
                task.advance(len(texts))
        if key:
            user_cache.save_ids(key, ids)
    return ids


def encode_text(text: str, tokenizer: Any) -> list[int]:
    """Returns the token ids of a text as it is, with nothing added. Several threads may call it."""
    if tokenizer.is_fast:
        # Its own call may change the tokenizer's settings, which another thread uses.
        return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def decode(ids: list[list[int]], tokenizer: Any) -> list[str]:
    """Returns the texts of token ids, with special tokens."""
    if tokenizer.is_fast:
        return tokenizer.backend_tokenizer.decode_batch(ids, skip_special_tokens=False)
    return tokenizer.batch_decode(ids)


def check_template(
    tokenizer: Any, source: str, template_args: Mapping[str, Any], rows: Iterable[tuple[int, Mapping[str, Any]]]
) -> None:
    """Checks that a chat template exists and reads all arguments, also those of rows: (number, arguments).

    Raises: UserError, naming an argument that it does not read.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"{source} holds chats but the tokenizer has no chat template: use an instruct model, or text, or add a "
            f"chat_template.jinja to {tokenizer.name_or_path}"
        )
    names = [(number, name) for number, args in rows for name in args]
    read = _read_by_template(tokenizer) if template_args or names else set()
    for name in template_args:
        if name not in read:
            raise UserError(
                f"chat_template_args: the chat template does not read {name!r}, so it would do nothing; "
                f"it reads {', '.join(sorted(read)) or 'no argument'}"
            )
    for number, name in names:
        if name not in read:
            raise UserError(
                f"{source} row {number} has {name!r} for the chat template, which does not read it: use a model "
                "whose template does, or leave the column out"
            )


def on_day(tokenizer: Any, day: str) -> Any:
    """Returns the tokenizer with a chat template that writes this date, as 2026-11-25, wherever it asks for today's.

    A date is part of the token ids: with that of the clock a resumed run would have other prompts.
    Raises: UserError, if the template asks for a date in a format that is no literal.
    """

    def dated(template: str) -> str:
        # repr: a literal of the template's language, which has Python's quotations.
        text = DATE.sub(lambda call: repr(date.fromisoformat(day).strftime(call[2])), template)
        if CLOCK.search(text):
            raise UserError(
                f"{tokenizer.name_or_path}: the chat template gives strftime_now no literal format, so that its date "
                "would be that of the clock: write one, such as strftime_now('%d %b %Y')"
            )
        return text

    template = tokenizer.chat_template
    if isinstance(template, dict):  # several, by name
        tokenizer.chat_template = {name: dated(text) for name, text in template.items()}
    elif template:
        tokenizer.chat_template = dated(template)
    return tokenizer


def turn_end(tokenizer: Any, template_args: Mapping[str, Any]) -> int | None:
    """Returns the special token that the chat template writes after an answer; None if it writes none."""
    if not tokenizer.chat_template:
        return None
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    # A template may raise anything.
    with suppress(Exception):
        after = tokenizer.apply_chat_template(messages, tokenize=False, **template_args).rpartition(ANSWER)[2].strip()
        ends = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
        ends += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        texts = {i: tokenizer.convert_ids_to_tokens(i) for i in ends}
        # The longest first: <|end|> may begin another token.
        return next((i for i in sorted(ends, key=lambda i: -len(texts[i])) if after.startswith(texts[i])), None)
    return None


def beginning(tokenizer: Any) -> list[int]:
    """Returns [begin token] if the tokenizer puts it before a text, else []. For chats the template adds it."""
    first = tokenizer("")["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []


def _read_by_template(tokenizer: Any) -> set[str]:
    """Returns the variables that the chat template reads, without those that it or this package sets."""
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        template = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", tokenizer.get_chat_template())  # a tag of transformers
        read = jinja2.meta.find_undeclared_variables(environment.parse(template))
    except (ValueError, jinja2.TemplateSyntaxError) as error:
        raise UserError(f"{tokenizer.name_or_path}: the chat template cannot be read ({error}): mend it") from error
    set_here = {"messages", "add_generation_prompt", "raise_exception", "strftime_now", *environment.globals}
    return {name for name in read - set_here if not name.endswith("_token")}  # such as bos_token


def _key(
    tokenizer: Any,
    prompts: Sequence[str | Chat],
    template_args: Mapping[str, Any],
    row_args: Sequence[Mapping[str, Any]],
) -> str:
    """Returns a hash of everything that token ids depend on; "" if the prompts are short, or cannot be kept.

    Only fast tokenizers can be serialized, and so hashed. What a template writes by the clock cannot be kept.
    """
    versions = [FORMAT, *(version(name) for name in ("transformers", "tokenizers"))]
    settings = [versions, tokenizer.chat_template, dict(template_args), tokenizer.special_tokens_map]
    digest, size = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()), 0
    for chunk in _chunks(len(prompts)):
        # The prompts are hashed in pieces, because the text of all prompts may be large.
        serialized = json.dumps([prompts[chunk], list(row_args[chunk])], default=str).encode()
        size += len(serialized)
        digest.update(serialized)
    if size < MIN_CACHED or not tokenizer.is_fast or CLOCK.search(str(tokenizer.chat_template)):
        return ""
    # Last, because it writes out the whole vocabulary: short data does not need it.
    digest.update(tokenizer.backend_tokenizer.to_str().encode())
    return digest.hexdigest()


def _chunks(count: int) -> list[slice]:
    return [slice(start, start + CHUNK) for start in range(0, count, CHUNK)]


def _render(source: str, number: int, prompt: str | Chat, tokenizer: Any, template_args: Mapping[str, Any]) -> str:
    if isinstance(prompt, str):
        return prompt
    # The completion continues this answer, as in TRL.
    continues = prompt[-1]["role"] == "assistant"
    render = partial(
        tokenizer.apply_chat_template,
        tokenize=False,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        **template_args,
    )
    try:
        text = render(prompt)
        # OpenAI's messages hold the arguments of a call as JSON text, which most templates would quote once more.
        quoted = any(json.dumps(x, ensure_ascii=False) in text for x in _argument_texts(prompt))
        return render([_with_objects(message) for message in prompt]) if quoted else text
    except Exception as error:
        # A template may raise anything.
        raise UserError(
            f"{source} row {number}: the chat template does not take the prompt: {error}; mend one of them"
        ) from error


def _argument_texts(prompt: Chat) -> list[str]:
    calls = [call for message in prompt for call in message.get("tool_calls") or ()]
    arguments = [call.get("function", call).get("arguments") for call in calls]
    return [x for x in arguments if isinstance(x, str)]


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message whose calls of tools have objects as arguments where they have the JSON text of one."""

    def read(call: dict[str, Any]) -> dict[str, Any]:
        if "function" in call:
            return call | {"function": read(call["function"])}
        with suppress(KeyError, TypeError, ValueError):
            if isinstance(arguments := json.loads(call["arguments"]), dict):
                return call | {"arguments": arguments}
        return call

    return message | {"tool_calls": list(map(read, message["tool_calls"]))} if message.get("tool_calls") else message


def _encode(texts: list[str], tokenizer: Any, source: str, numbers: Sequence[int]) -> list[np.ndarray]:
    """Returns token ids of texts, with nothing added. Fast tokenizers use their threads."""
    for text, number in zip(texts, numbers, strict=True):
        if not text.isascii() and HALF_A_PAIR.search(text):
            raise UserError(f"{source} row {number}: {text[:200]!r} holds half of a character: mend the row")
    if tokenizer.is_fast:
        core = tokenizer.backend_tokenizer
        # A tokenizer.json may switch on truncation and padding.
        core.no_truncation()
        core.no_padding()
        ids = [encoding.ids for encoding in core.encode_batch_fast(texts, add_special_tokens=False)]
    else:
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    decoded = decode(ids, tokenizer)

    def letters(text: str) -> int:
        return sum(map(len, text.split()))

    for text, back, number in zip(texts, decoded, numbers, strict=True):
        # Tokenizers may normalize text and change spaces. Only lost characters are an error.
        if back != text and letters(back) < letters(unicodedata.normalize("NFC", text)):
            raise UserError(
                f"{source} row {number}: the model's tokenizer cannot write {text[:200]!r}, only {back[:200]!r}: "
                "use another model, or leave the row out"
            )
    return [np.array(tokens, np.int32) for tokens in ids]
