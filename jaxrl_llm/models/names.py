"""Tables {path of a parameter: name of its tensors in a Hugging Face checkpoint}, with {} for layer and expert.

In the file, kernels called `weight` have their axes in the opposite order. A family's module may define three tables:
NAMES, if its tensors have other names than DENSE; MODULES, if the modules of transformers have other names than the
published files; and OTHERS, further tables that a file may follow.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product
from types import ModuleType
from typing import Any, TypeAlias

import jax

from jaxrl_llm import models
from jaxrl_llm.config.names import Kind, resolve
from jaxrl_llm.machine.sharding import path_name
from jaxrl_llm.models.adapters import is_kernel
from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.structs import PyTree

TensorNames: TypeAlias = Mapping[str, str]  # {path of a parameter: name of its tensors, with {} for layer and expert}
# Functions that `model.family` of a config may name: a function of the user, or a decoder_config of this package.
FAMILIES = Kind(models, lambda member: getattr(member, "__name__", "") == "decoder_config")

# {path of a parameter: name of its tensor in a file}, for a decoder with one MLP in each layer, such as Llama and Qwen.
DENSE = {
    "embed/embedding": "model.embed_tokens.weight",
    "norm/scale": "model.norm.weight",
    "head/kernel": "lm_head.weight",
    "layers/attention_norm/scale": "model.layers.{}.input_layernorm.weight",
    "layers/attention/query/kernel": "model.layers.{}.self_attn.q_proj.weight",
    "layers/attention/query/bias": "model.layers.{}.self_attn.q_proj.bias",
    "layers/attention/key/kernel": "model.layers.{}.self_attn.k_proj.weight",
    "layers/attention/key/bias": "model.layers.{}.self_attn.k_proj.bias",
    "layers/attention/value/kernel": "model.layers.{}.self_attn.v_proj.weight",
    "layers/attention/value/bias": "model.layers.{}.self_attn.v_proj.bias",
    "layers/attention/output/kernel": "model.layers.{}.self_attn.o_proj.weight",
    "layers/attention/output/bias": "model.layers.{}.self_attn.o_proj.bias",
    "layers/attention/query_norm/scale": "model.layers.{}.self_attn.q_norm.weight",
    "layers/attention/key_norm/scale": "model.layers.{}.self_attn.k_norm.weight",
    "layers/mlp_norm/scale": "model.layers.{}.post_attention_layernorm.weight",
    "layers/mlp/gate/kernel": "model.layers.{}.mlp.gate_proj.weight",
    "layers/mlp/gate/bias": "model.layers.{}.mlp.gate_proj.bias",
    "layers/mlp/up/kernel": "model.layers.{}.mlp.up_proj.weight",
    "layers/mlp/up/bias": "model.layers.{}.mlp.up_proj.bias",
    "layers/mlp/down/kernel": "model.layers.{}.mlp.down_proj.weight",
    "layers/mlp/down/bias": "model.layers.{}.mlp.down_proj.bias",
}
# Tensor names of a decoder with norms before and after attention and MLP, such as Gemma.
GEMMA = DENSE | {
    # The table DENSE gives this tensor name to the norm before the MLP.
    "layers/attention_post_norm/scale": "model.layers.{}.post_attention_layernorm.weight",
    "layers/mlp_norm/scale": "model.layers.{}.pre_feedforward_layernorm.weight",
    "layers/mlp_post_norm/scale": "model.layers.{}.post_feedforward_layernorm.weight",
}


# Tensor names of a decoder with experts instead of an MLP; the second {} is the number of the expert.
EXPERTS = DENSE | {
    "layers/experts/router/kernel": "model.layers.{}.mlp.gate.weight",
    "layers/experts/gate/kernel": "model.layers.{}.mlp.experts.{}.gate_proj.weight",
    "layers/experts/up/kernel": "model.layers.{}.mlp.experts.{}.up_proj.weight",
    "layers/experts/down/kernel": "model.layers.{}.mlp.experts.{}.down_proj.weight",
}

# {path of a parameter: name of its tensor in a file}, for the vision tower of Qwen2.5-VL; Qwen2-VL changes some names.
TOWER = {
    "visual/patches/kernel": "visual.patch_embed.proj.weight",
    "visual/layers/attention_norm/scale": "visual.blocks.{}.norm1.weight",
    "visual/layers/attention_norm/bias": "visual.blocks.{}.norm1.bias",
    "visual/layers/qkv/kernel": "visual.blocks.{}.attn.qkv.weight",
    "visual/layers/qkv/bias": "visual.blocks.{}.attn.qkv.bias",
    "visual/layers/output/kernel": "visual.blocks.{}.attn.proj.weight",
    "visual/layers/output/bias": "visual.blocks.{}.attn.proj.bias",
    "visual/layers/mlp_norm/scale": "visual.blocks.{}.norm2.weight",
    "visual/layers/mlp_norm/bias": "visual.blocks.{}.norm2.bias",
    "visual/layers/mlp/gate/kernel": "visual.blocks.{}.mlp.gate_proj.weight",
    "visual/layers/mlp/gate/bias": "visual.blocks.{}.mlp.gate_proj.bias",
    "visual/layers/mlp/up/kernel": "visual.blocks.{}.mlp.up_proj.weight",
    "visual/layers/mlp/up/bias": "visual.blocks.{}.mlp.up_proj.bias",
    "visual/layers/mlp/down/kernel": "visual.blocks.{}.mlp.down_proj.weight",
    "visual/layers/mlp/down/bias": "visual.blocks.{}.mlp.down_proj.bias",
    "visual/merger/norm/scale": "visual.merger.ln_q.weight",
    "visual/merger/norm/bias": "visual.merger.ln_q.bias",
    "visual/merger/up/kernel": "visual.merger.mlp.0.weight",
    "visual/merger/up/bias": "visual.merger.mlp.0.bias",
    "visual/merger/down/kernel": "visual.merger.mlp.2.weight",
    "visual/merger/down/bias": "visual.merger.mlp.2.bias",
}
# {path of a parameter: name of its tensor in a file}, for the vision tower of Qwen3-VL.
DEEP_TOWER = TOWER | {
    "visual/patches/bias": "visual.patch_embed.proj.bias",
    "visual/table/embedding": "visual.pos_embed.weight",
    "visual/layers/mlp/up/kernel": "visual.blocks.{}.mlp.linear_fc1.weight",
    "visual/layers/mlp/up/bias": "visual.blocks.{}.mlp.linear_fc1.bias",
    "visual/layers/mlp/down/kernel": "visual.blocks.{}.mlp.linear_fc2.weight",
    "visual/layers/mlp/down/bias": "visual.blocks.{}.mlp.linear_fc2.bias",
    "visual/merger/norm/scale": "visual.merger.norm.weight",
    "visual/merger/norm/bias": "visual.merger.norm.bias",
    "visual/merger/up/kernel": "visual.merger.linear_fc1.weight",
    "visual/merger/up/bias": "visual.merger.linear_fc1.bias",
    "visual/merger/down/kernel": "visual.merger.linear_fc2.weight",
    "visual/merger/down/bias": "visual.merger.linear_fc2.bias",
    "visual/deep/norm/scale": "visual.deepstack_merger_list.{}.norm.weight",
    "visual/deep/norm/bias": "visual.deepstack_merger_list.{}.norm.bias",
    "visual/deep/up/kernel": "visual.deepstack_merger_list.{}.linear_fc1.weight",
    "visual/deep/up/bias": "visual.deepstack_merger_list.{}.linear_fc1.bias",
    "visual/deep/down/kernel": "visual.deepstack_merger_list.{}.linear_fc2.weight",
    "visual/deep/down/bias": "visual.deepstack_merger_list.{}.linear_fc2.bias",
}
# {path of a parameter: name of its tensor}, for the vision tower of Gemma 3, as the modules of transformers name it.
SIGLIP = {
    "visual/patches/still/kernel": "model.vision_tower.embeddings.patch_embedding.weight",
    "visual/patches/bias": "model.vision_tower.embeddings.patch_embedding.bias",
    "visual/table/embedding": "model.vision_tower.embeddings.position_embedding.weight",
    "visual/layers/attention_norm/scale": "model.vision_tower.encoder.layers.{}.layer_norm1.weight",
    "visual/layers/attention_norm/bias": "model.vision_tower.encoder.layers.{}.layer_norm1.bias",
    "visual/layers/query/kernel": "model.vision_tower.encoder.layers.{}.self_attn.q_proj.weight",
    "visual/layers/query/bias": "model.vision_tower.encoder.layers.{}.self_attn.q_proj.bias",
    "visual/layers/key/kernel": "model.vision_tower.encoder.layers.{}.self_attn.k_proj.weight",
    "visual/layers/key/bias": "model.vision_tower.encoder.layers.{}.self_attn.k_proj.bias",
    "visual/layers/value/kernel": "model.vision_tower.encoder.layers.{}.self_attn.v_proj.weight",
    "visual/layers/value/bias": "model.vision_tower.encoder.layers.{}.self_attn.v_proj.bias",
    "visual/layers/output/kernel": "model.vision_tower.encoder.layers.{}.self_attn.out_proj.weight",
    "visual/layers/output/bias": "model.vision_tower.encoder.layers.{}.self_attn.out_proj.bias",
    "visual/layers/mlp_norm/scale": "model.vision_tower.encoder.layers.{}.layer_norm2.weight",
    "visual/layers/mlp_norm/bias": "model.vision_tower.encoder.layers.{}.layer_norm2.bias",
    "visual/layers/mlp/up/kernel": "model.vision_tower.encoder.layers.{}.mlp.fc1.weight",
    "visual/layers/mlp/up/bias": "model.vision_tower.encoder.layers.{}.mlp.fc1.bias",
    "visual/layers/mlp/down/kernel": "model.vision_tower.encoder.layers.{}.mlp.fc2.weight",
    "visual/layers/mlp/down/bias": "model.vision_tower.encoder.layers.{}.mlp.fc2.bias",
    "visual/merger/norm/scale": "model.vision_tower.post_layernorm.weight",
    "visual/merger/norm/bias": "model.vision_tower.post_layernorm.bias",
    "visual/merger/mean_norm/scale": "model.multi_modal_projector.mm_soft_emb_norm.weight",
    "visual/merger/projection/kernel": "model.multi_modal_projector.mm_input_projection_weight",
}
# {prefix of tensor names in the files of a vision-language model: prefix in the modules of transformers}.
PREFIXES = {"visual.": "model.visual.", "model.": "model.language_model."}


def module_names(table: TensorNames) -> TensorNames:
    """Returns the tensor names of a vision-language model as its modules in transformers have them.

    table: the tensor names in its files.
    """
    return replace_prefixes(table, PREFIXES)


def replace_prefixes(table: TensorNames, prefixes: Mapping[str, str]) -> TensorNames:
    """Returns `table` with the first matching prefix of each name replaced. prefixes: {old prefix: new prefix}."""
    new_names = dict(table)
    for path, name in table.items():
        old_prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if old_prefix is not None:
            new_names[path] = prefixes[old_prefix] + name.removeprefix(old_prefix)
    return new_names


def family_function(family: str) -> Callable[[dict[str, Any]], DecoderConfig]:
    """Returns the function of a family that converts a config.json to a DecoderConfig.

    family: module of this package, or dotted name of a user's function. Raises: UserError, if the user's function does
    not exist.
    """
    if "." in family:
        return resolve(family, FAMILIES, "config.model.family")
    return importlib.import_module(f"{models.__name__}.{family}").decoder_config


def _family_module(family: str) -> ModuleType:
    """Returns the Python module that defines a family, and may define its tables of tensor names."""
    return sys.modules[family_function(family).__module__]


def family_table(family: str) -> TensorNames:
    """Returns the tensor names in the published files of a family: NAMES of the family's module, or DENSE."""
    return getattr(_family_module(family), "NAMES", DENSE)


def module_table(family: str) -> TensorNames:
    """Returns the tensor names of a family's modules in transformers, by which PEFT names adapters."""
    return getattr(_family_module(family), "MODULES", family_table(family))


def matching_table(family: str, tensors: Collection[str]) -> TensorNames:
    """Returns the table of a family that has the most names in common with `tensors`, the tensor names of a file."""
    other_tables = getattr(_family_module(family), "OTHERS", ())

    def count_matches(table: TensorNames) -> int:
        # The names of layer 0 and expert 0 are enough to tell the tables apart.
        return sum(template.format(0, 0) in tensors for template in table.values())

    return max((family_table(family), module_table(family), *other_tables), key=count_matches)


class SwappedAxes(str):
    """The name of a tensor whose last two axes are swapped in the file."""


def tensor_axes(path: str, template: str, count: int) -> tuple[int, ...]:
    """Returns the order of the axes of a parameter's tensor in the file, as indices of the parameter's axes.

    The axes of layers and experts do not count, because each layer and expert has its own tensor. The permutation is
    its own inverse. path: path of the parameter. template: name of its tensors. count: number of axes of a tensor.
    """
    if isinstance(template, SwappedAxes):
        return (*range(count - 2), count - 1, count - 2)
    # The file has the kernel of a linear module, a tensor called `.weight`, with its axes in the opposite order.
    is_linear_weight = path.endswith("kernel") and template.endswith(".weight")
    return tuple(reversed(range(count))) if is_linear_weight else tuple(range(count))


def stacked_axes(template: str) -> int:
    """Returns the number of leading axes that the file splits into tensors: 0, 1 (layers) or 2 (layers, experts)."""
    return template.count("{}")


def tensor_names(template: str, shape: Sequence[int]) -> list[str]:
    """Returns the names of all tensors of a parameter, one for each layer and expert.

    template: name with {} for the layer and the expert. shape: shape of the parameter.
    """
    stacked_sizes = shape[: stacked_axes(template)]
    return [template.format(*layer_and_expert) for layer_and_expert in product(*map(range, stacked_sizes))]


def tensor_shapes(params: PyTree, table: TensorNames) -> dict[str, tuple[int, ...]]:
    """Returns {name: shape} of all tensors of a checkpoint. params: parameter tree, which may consist of shapes."""
    shapes = {}
    for path, parameter in jax.tree_util.tree_leaves_with_path(params, is_kernel):
        name = path_name(path)
        template = table[name]
        unstacked_shape = tuple(parameter.shape[stacked_axes(template) :])
        axes = tensor_axes(name, template, len(unstacked_shape))
        shape_in_file = tuple(unstacked_shape[axis] for axis in axes)
        shapes |= dict.fromkeys(tensor_names(template, parameter.shape), shape_in_file)
    return shapes
