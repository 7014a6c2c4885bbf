"""The answers to requests for text, whole or in pieces, in OpenAI's form."""

from __future__ import annotations

import time
import uuid
from typing import Any

from jaxrl_llm.rollout.serving.bodies import ChatBody, TextDrawing
from jaxrl_llm.rollout.serving.choices import ServedChoice
from jaxrl_llm.rollout.serving.service import Service


class TextAnswer:
    """The answers to one request, whole or in pieces, in OpenAI's form."""

    def __init__(self, service: Service, body: TextDrawing, prompts: list[list[int]]):
        self.service, self.body, self.prompts = service, body, prompts
        self.is_chat = isinstance(body, ChatBody)
        # `logprobs = 0` asks for log-probabilities in a request for a text. 0 equals False, so `is` compares.
        self.wants_logprobs = not any(getattr(body, "logprobs", None) is x for x in (None, False))
        self.wants_ids = bool(body.return_token_ids)
        kind = "chat.completion" if self.is_chat else "text_completion"
        self.head = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind + (".chunk" if self.is_chat and body.stream else ""),
            "created": int(time.time()),
            "model": service.model.name,
        }
        parses_calls = isinstance(body, ChatBody) and bool(body.tools) and body.tool_choice != "none"
        self.choices = [
            ServedChoice(i, service.model.tokenizer, body.stops, parses_calls)
            for i in range(len(prompts) * (body.n or 1))
        ]
        self._sent_tokens = [0] * len(self.choices)  # number of tokens of each choice that earlier chunks sent

    def whole(self) -> dict[str, Any]:
        """Returns the answer to a request without `stream`."""
        choices = [self._choice(choice, 0) | self._content(choice) for choice in self.choices]
        ids = {"prompt_token_ids": self.prompts[0]} if self.is_chat and self.wants_ids else {}
        return self.head | ids | {"choices": choices, "usage": self.usage()}

    def _content(self, choice: ServedChoice) -> dict[str, Any]:
        if not self.is_chat:
            return {"text": choice.text}
        content = choice.text or (None if choice.calls else "")
        calls = {"tool_calls": choice.calls} if choice.calls else {}
        return {"message": {"role": "assistant", "content": content} | calls}

    def usage(self) -> dict[str, int]:
        prompt, sampled = sum(map(len, self.prompts)), sum(len(choice.tokens) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def first_chunks(self) -> list[dict[str, Any]]:
        """Returns the chunks before the first token."""
        if not self.is_chat:
            return []
        first_delta = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        chunks = [self.head | {"choices": [{"index": choice.index} | first_delta]} for choice in self.choices]
        if self.wants_ids:
            chunks[0]["prompt_token_ids"] = self.prompts[0]
        return chunks

    def chunk(self, choice: ServedChoice) -> dict[str, Any] | None:
        """Returns the chunk with the new part of a choice; None if the choice has no new part."""
        piece, start = choice.next_piece(), self._sent_tokens[choice.index]
        if not (piece or choice.end or self.wants_logprobs or self.wants_ids):
            return None
        part = self._choice(choice, start)
        self._sent_tokens[choice.index] = len(choice.tokens)
        if self.is_chat:
            calls = [{"index": i} | call for i, call in enumerate(choice.calls)] if choice.end else []
            part["delta"] = ({"content": piece} if piece else {}) | ({"tool_calls": calls} if calls else {})
        else:
            part["text"] = piece
        return self.head | {"choices": [part]}

    def _choice(self, choice: ServedChoice, start: int) -> dict[str, Any]:
        """Returns the fields of a choice that chat and text share. start: index of the first token to send."""
        part: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish_reason, "logprobs": None}
        if self.wants_logprobs:
            part["logprobs"] = self._logprobs(choice, start)
        if self.wants_ids:
            part["token_ids"] = choice.tokens[start:]
            if not self.is_chat and start == 0:
                part["prompt_token_ids"] = self.prompts[choice.index // (self.body.n or 1)]
        return part

    def _logprobs(self, choice: ServedChoice, start: int) -> dict[str, Any]:
        """Returns the log-probabilities of a choice from token `start` on, in OpenAI's form for chats or for texts."""
        texts = [choice.tokenizer.decode([token]) for token in choice.tokens[start:]]
        logprobs = choice.logprobs[start:]
        if not self.is_chat:
            return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": None}
        content = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}
