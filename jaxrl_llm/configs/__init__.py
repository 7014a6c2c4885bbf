"""The shipped configs as modules: `from jaxrl_llm.configs import grpo`, then `grpo.get_config()`."""

from pathlib import Path

# The repository has the files in configs/ at its top, and a wheel has them beside this file.
FOLDER = Path(__file__).parent
if not (FOLDER / "grpo.py").is_file():
    FOLDER = FOLDER.parent.parent / "configs"
__path__ = [str(FOLDER)]


def names() -> list[str]:
    """Returns the names of the shipped configs, such as "dapo" and "recipes/qwen2_5_7b_math"."""
    return sorted(str(file.relative_to(FOLDER).with_suffix("")) for file in FOLDER.rglob("[!_]*.py"))
