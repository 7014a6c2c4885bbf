"""GSM8K rows (arXiv 2110.14168; columns question, answer) as chats with a boxed final answer."""

from __future__ import annotations

from typing import Any

SYSTEM = "Reason step by step, and put the final answer within \\boxed{}."


def convert(row: dict[str, Any]) -> dict[str, Any]:
    """{question, answer: "… #### 72"} -> {prompt: chat, answer: "72"}. Raises: KeyError, ValueError."""
    if "####" not in row["answer"]:
        raise ValueError("column 'answer' has no '#### result' at its end")
    # The rewards compare numbers without separators of thousands.
    result = row["answer"].split("####")[-1].strip().replace(",", "")
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]
    return {"prompt": chat, "answer": result}
