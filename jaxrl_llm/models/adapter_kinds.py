"""The built-in kinds of adapters, by their names in a config."""

from jaxrl_llm.models.lora import Lora as lora

__all__ = ["lora"]  # names for config.adapters.name
