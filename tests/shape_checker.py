"""What checks the annotations of `jaxrl_llm.algorithms` in the tests (pyproject.toml names it)."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float
