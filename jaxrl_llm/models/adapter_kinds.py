"""The built-in kinds of adapters, under the names that config.adapters.name may have."""

from jaxrl_llm.models.lora import Lora as lora

__all__ = ["lora"]
