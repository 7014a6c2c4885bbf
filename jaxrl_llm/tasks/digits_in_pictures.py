"""Find the largest or the smallest of three to six digits in one or two small images. Needs NumPy alone.

Each cell of 28 x 28 pixels has one digit at a random place, with random colours and noise. The answer is in one cell,
and all answers are equally likely, so that neither the text nor the images of another problem help.

A problem has two kinds of answers: a quick one, which is the first digit; and one after a thought with all digits in
the order of reading, such as "<3,8,5>8". Most of `demonstrations()` are quick, so that a model that learned them can
read, but seldom reads all digits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxrl_llm.tasks import each_judged

HELD_OUT, TRAIN, DEMONSTRATIONS = 1_000, 2_000, 8_000  # numbers of problems
THOUGHT = 3  # demonstrations with a thought among ten
CELL, DOT = 28, 3  # sides of a cell and of a dot in pixels
FEWEST, MOST = 3, 6  # smallest and largest number of digits in a problem
SMALLEST_ANSWER = 2  # smallest answer to "max"; answers to "min" are at most 9 minus this number
NOISE = 8.0  # standard deviation of the noise; pixels are 0 to 255
FONT = (
    " ###    #    ###  #####    #  #####  ##   #####  ###   ### ",
    "#   #  ##   #   #     #   ##  #     #         # #   # #   #",
    "#   # # #       #    #   # #  #     #         # #   # #   #",
    "#   #   #      #    ##  #  #  ####  ####     #   ###   ####",
    "#   #   #     #       # #####     # #   #   #   #   #     #",
    "#   #   #    #    #   #    #  #   # #   #   #   #   #    # ",
    " ###  ##### #####  ###     #   ###   ###    #    ###   ##  ",
)
WIDTH, GAP = 5, 1  # dots of a digit's width, and between two digits
# INK [10, 21, 15] tells the pixels of each digit that have ink.
DOTS = np.array([[character == "#" for character in line.ljust(10 * (WIDTH + GAP))] for line in FONT])
INK = DOTS.reshape(len(FONT), 10, -1)[..., :WIDTH].swapaxes(0, 1).repeat(DOT, 1).repeat(DOT, 2)


def train() -> list[dict[str, Any]]:
    """Returns the training problems."""
    return [_problem(i) for i in range(HELD_OUT, HELD_OUT + TRAIN)]


def held_out() -> list[dict[str, Any]]:
    """Returns the evaluation problems, whose images are in no other source."""
    return [_problem(i) for i in range(HELD_OUT)]


def demonstrations() -> list[dict[str, Any]]:
    """Returns further problems with completions. Of ten completions, three think first and seven answer at once."""
    first = HELD_OUT + TRAIN
    rows = [_problem(i) for i in range(first, first + DEMONSTRATIONS)]
    return [row | {"completion": _thought(row) if i % 10 < THOUGHT else _quick(row)} for i, row in enumerate(rows)]


def accuracy(completions: list[Any], answer: list[Any], **columns: Any) -> list[float | None]:
    """Returns 1 if the completion, after its <thoughts> if it has any, is the answer, else 0."""
    return each_judged(lambda text, right: text.rpartition(">")[2] == str(right), completions, answer)


def _problem(number: int) -> dict[str, Any]:
    """Returns problem `number`: one or two images of digits, and the question for the largest or smallest one."""
    # Each problem has its own seed, so that it does not depend on the number of problems.
    rng = np.random.default_rng((0, number))
    question = ("max", "min")[rng.integers(2)]
    digits = _digits(rng, int(rng.integers(FEWEST, MOST + 1)))
    if question == "min":
        digits = 9 - digits
    split = int(rng.integers(1, len(digits))) if number % 3 == 0 else len(digits)
    images = [_image(rng, part) for part in (digits[:split], digits[split:]) if len(part)]
    content = "<image>" * len(images) + question
    answer = str(digits.max() if question == "max" else digits.min())
    row = {"prompt": [{"role": "user", "content": content}], "images": images}
    return row | {"digits": digits.tolist(), "answer": answer}


def _digits(rng: np.random.Generator, count: int) -> np.ndarray:
    """Returns digits [count] whose largest occurs once; all numbers from SMALLEST_ANSWER to 9 are equally likely."""
    answer = int(rng.integers(SMALLEST_ANSWER, 10))
    digits = rng.integers(0, answer, count)
    digits[rng.integers(count)] = answer
    return digits


def _image(rng: np.random.Generator, digits: np.ndarray) -> bytes:
    """Returns a PPM file with the digits in one row, or in two rows of equal length."""
    rows = 2 if len(digits) % 2 == 0 and rng.integers(2) else 1
    columns = len(digits) // rows
    ink = np.zeros((CELL * rows, CELL * columns), bool)
    for i, digit in enumerate(digits):
        # A digit is at most two pixels away from the middle of its cell.
        down, right = ((CELL - side) // 2 + rng.integers(-2, 3) for side in INK.shape[1:])
        y, x = CELL * (i // columns) + down, CELL * (i % columns) + right
        ink[y : y + INK.shape[1], x : x + INK.shape[2]] = INK[digit]
    paper, pen = rng.uniform(170, 255, 3), rng.uniform(0, 90, 3)
    pixels = np.where(ink[..., None], pen, paper) + rng.normal(0, NOISE, (*ink.shape, 3))
    # The format is PPM, because its bytes do not depend on the version of a library.
    return b"P6 %d %d 255\n" % ink.shape[::-1] + pixels.clip(0, 255).astype(np.uint8).tobytes()


def _quick(row: dict[str, Any]) -> str:
    return str(row["digits"][0])


def _thought(row: dict[str, Any]) -> str:
    return f"<{','.join(map(str, row['digits']))}>{row['answer']}"
