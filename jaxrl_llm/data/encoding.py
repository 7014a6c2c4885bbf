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
CHUNK = 4096  # prompts per tokenizer call, enough for its threads with little memory
CLOCK = re.compile(r"strftime_now\s*\(")  # call by which a chat template reads today's date
DATE = re.compile(CLOCK.pattern + r"""\s*(["'])(.*?)\1\s*\)""")  # call of strftime_now with a literal format
MIN_CACHED = 2**18  # minimum number of characters for storing token ids in the user's cache folder
# Unpaired surrogates are valid JSON escapes, but tokenizers refuse them.
UNPAIRED_SURROGATE = re.compile("[\ud800-\udfff]")
ANSWER = "(an-answer)"  # placeholder for the text of an answer in a chat
FORMAT = 3  # version of cached token ids; raise it if a change of this file changes token ids


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
    arguments of each prompt, which override template_args; spelling: {text: its replacement} after the template.
    Raises: UserError, naming source and row, if the template refuses a prompt or the tokenizer would lose text.
    """
    numbers, template_args = numbers or range(1, len(prompts) + 1), dict(template_args or {})
    if any(not isinstance(prompt, str) for prompt in prompts):
        check_template(tokenizer, source, template_args, zip(numbers, row_args, strict=False))
    # The cache saves minutes at the start of a run with a large data set.
    key, ids = _cache_key(tokenizer, prompts, template_args | dict(spelling), row_args), None
    if key:
        ids = user_cache.load_ids(key, len(prompts))
    if ids is None:
        ids = []
        with progress.task(f"token ids of {source}", len(prompts)) as task:
            for chunk in _chunks(len(prompts)):
                prompt_args = [template_args | dict(row_arg) for row_arg in row_args[chunk]] or repeat(template_args)
                rows = zip(numbers[chunk], prompts[chunk], prompt_args, strict=False)
                texts = [_render(source, number, prompt, tokenizer, args) for number, prompt, args in rows]
                for old_spelling, replacement in spelling.items():
                    texts = [text.replace(old_spelling, replacement) for text in texts]
                ids += _encode(texts, tokenizer, source, numbers[chunk])
                task.advance(len(texts))
        if key:
            user_cache.save_ids(key, ids)
    return ids


def encode_text(text: str, tokenizer: Any) -> list[int]:
    """Returns the token ids of a text as it is, with nothing added. Several threads may call it."""
    if tokenizer.is_fast:
        # The call tokenizer(text) may change settings of the tokenizer that another thread uses.
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
    """Checks that the tokenizer has a chat template, which reads all arguments.

    template_args: arguments of all prompts; rows: (row number, arguments of its row).
    Raises: UserError, naming an argument that the template does not read.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"{source} holds chats, but the tokenizer has no chat template: use an instruct model, or prompts of text, "
            f"or add a chat_template.jinja to {tokenizer.name_or_path}"
        )
    row_names = [(number, name) for number, args in rows for name in args]
    variables = _template_variables(tokenizer) if template_args or row_names else set()
    for name in template_args:
        if name not in variables:
            raise UserError(
                f"chat_template_args: {name!r} has no effect, because the chat template has no variable of this name; "
                f"its variables: {', '.join(sorted(variables)) or 'none'}"
            )
    for number, name in row_names:
        if name not in variables:
            raise UserError(
                f"{source} row {number} has {name!r} for the chat template, which has no variable of this name: use a "
                "model whose chat template reads it, or remove the column"
            )


def on_day(tokenizer: Any, day: str) -> Any:
    """Returns the tokenizer with a chat template that writes `day`, such as 2026-11-25, in place of today's date.

    The date is fixed, because a resumed run would have other prompts with the date of the clock.
    Raises: UserError, if the template formats the date in another way than by a literal.
    """

    def dated(template: str) -> str:
        """Returns the template with the fixed day in place of its calls of strftime_now."""
        # repr gives a valid literal, because templates quote text as Python does.
        text = DATE.sub(lambda call: repr(date.fromisoformat(day).strftime(call[2])), template)
        if CLOCK.search(text):
            raise UserError(
                f"{tokenizer.name_or_path}: the chat template calls strftime_now without a literal format, so the date "
                "cannot be fixed for the run: write a literal, such as strftime_now('%d %b %Y')"
            )
        return text

    template = tokenizer.chat_template
    if isinstance(template, dict):  # several templates, by name
        tokenizer.chat_template = {name: dated(text) for name, text in template.items()}
    elif template:
        tokenizer.chat_template = dated(template)
    return tokenizer


def turn_end(tokenizer: Any, template_args: Mapping[str, Any]) -> int | None:
    """Returns the special token that the chat template writes after an answer; None if it writes none."""
    if not tokenizer.chat_template:
        return None
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    with suppress(Exception):  # a template may raise any error
        chat = tokenizer.apply_chat_template(messages, tokenize=False, **template_args)
        text_after_answer = chat.rpartition(ANSWER)[2].strip()
        candidates = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
        candidates += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        texts = {i: tokenizer.convert_ids_to_tokens(i) for i in candidates}
        # Longer tokens are tried first, because a token may begin with the text of another one.
        longest_first = sorted(candidates, key=lambda i: -len(texts[i]))
        return next((i for i in longest_first if text_after_answer.startswith(texts[i])), None)
    return None


def beginning(tokenizer: Any) -> list[int]:
    """Returns [begin token id] if the tokenizer puts this token before a text, else []. For chats the template does."""
    first = tokenizer("")["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []


def _template_variables(tokenizer: Any) -> set[str]:
    """Returns the variables of the chat template that a config or a row may set."""
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        # The tag `generation` is removed, because only transformers defines it.
        template = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", tokenizer.get_chat_template())
        variables = jinja2.meta.find_undeclared_variables(environment.parse(template))
    except (ValueError, jinja2.TemplateSyntaxError) as error:
        raise UserError(
            f"{tokenizer.name_or_path}: the chat template must be valid jinja ({error}): restore the original template"
        ) from error
    predefined = {"messages", "add_generation_prompt", "raise_exception", "strftime_now", *environment.globals}
    return {name for name in variables - predefined if not name.endswith("_token")}  # bos_token is predefined, too


def _cache_key(
    tokenizer: Any,
    prompts: Sequence[str | Chat],
    template_args: Mapping[str, Any],
    row_args: Sequence[Mapping[str, Any]],
) -> str:
    """Returns a hash of everything that token ids depend on; "" if the prompts are short, or must not be cached.

    Only fast tokenizers can be serialized, and so hashed. Token ids of a template that reads the clock are not cached.
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
    # The tokenizer is hashed last, because this serializes the whole vocabulary, which short data does not need.
    digest.update(tokenizer.backend_tokenizer.to_str().encode())
    return digest.hexdigest()


def _chunks(count: int) -> list[slice]:
    """Returns the slices of `count` prompts that are encoded in one call."""
    return [slice(start, start + CHUNK) for start in range(0, count, CHUNK)]


def _render(source: str, number: int, prompt: str | Chat, tokenizer: Any, template_args: Mapping[str, Any]) -> str:
    """Returns a prompt as text: text as it is, and a chat as the chat template formats it."""
    if isinstance(prompt, str):
        return prompt
    # If the last message is an answer, the completion continues it, as in TRL.
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
        is_quoted = any(json.dumps(x, ensure_ascii=False) in text for x in _argument_texts(prompt))
        return render([_with_argument_objects(message) for message in prompt]) if is_quoted else text
    except Exception as error:  # a template may raise any error
        raise UserError(
            f"{source} row {number}: the chat template cannot format the prompt ({error}): change the prompt or the "
            "template"
        ) from error


def _argument_texts(prompt: Chat) -> list[str]:
    """Returns the arguments of tool calls in a chat that are JSON text."""
    calls = [call for message in prompt for call in message.get("tool_calls") or ()]
    arguments = [call.get("function", call).get("arguments") for call in calls]
    return [x for x in arguments if isinstance(x, str)]


def _with_argument_objects(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message whose tool calls have arguments as objects in place of JSON text."""

    def parse_arguments(call: dict[str, Any]) -> dict[str, Any]:
        if "function" in call:
            return call | {"function": parse_arguments(call["function"])}
        with suppress(KeyError, TypeError, ValueError):
            if isinstance(arguments := json.loads(call["arguments"]), dict):
                return call | {"arguments": arguments}
        return call

    if not message.get("tool_calls"):
        return message
    return message | {"tool_calls": [parse_arguments(call) for call in message["tool_calls"]]}


def _encode(texts: list[str], tokenizer: Any, source: str, numbers: Sequence[int]) -> list[np.ndarray]:
    """Returns the token ids of texts, with nothing added. Fast tokenizers use their threads.

    numbers: number of each text's row in its source, from 1.
    Raises: UserError, naming source and row, for text that the tokenizer would lose.
    """
    for text, number in zip(texts, numbers, strict=True):
        if not text.isascii() and UNPAIRED_SURROGATE.search(text):
            raise UserError(
                f"{source} row {number}: {text[:200]!r} has half of a surrogate pair, which is no character: correct "
                "the row"
            )
    if tokenizer.is_fast:
        core = tokenizer.backend_tokenizer
        # Truncation and padding are switched off, because a tokenizer.json may switch them on.
        core.no_truncation()
        core.no_padding()
        ids = [encoding.ids for encoding in core.encode_batch_fast(texts, add_special_tokens=False)]
    else:
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    decoded_texts = decode(ids, tokenizer)

    def count_letters(text: str) -> int:
        return sum(map(len, text.split()))

    for text, decoded, number in zip(texts, decoded_texts, numbers, strict=True):
        # Only lost characters are an error, because tokenizers may normalize text and change spaces.
        if decoded != text and count_letters(decoded) < count_letters(unicodedata.normalize("NFC", text)):
            raise UserError(
                f"{source} row {number}: the tokenizer loses text: {text[:200]!r} becomes {decoded[:200]!r}; use "
                "another model, or drop the row"
            )
    return [np.array(tokens, np.int32) for tokens in ids]
