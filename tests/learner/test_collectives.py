"""What devices send each other, in the compiled programs: each parameter a fixed number of times a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest
import tiny
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.algorithms import losses
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.learner import critic, forward, update
from jaxrl_llm.learner.packing import index_shape
from jaxrl_llm.machine import sharding
from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.rope import default_rope
from jaxrl_llm.structs import Batch
from jaxrl_llm.tools.plan.collectives import BETWEEN_SLICES, Collective, collectives


@dataclass(frozen=True)
class Sizes:
    """B prompts, in micro-batches; G completions of each; tokens P and C."""

    prompts: int = 64
    microbatch: int = 8
    group: int = 8
    prompt_tokens: int = 512
    completion_tokens: int = 1024
    packed: tuple[int, int] | None = None  # N and T of the rows in a micro-batch; None: each completion is a row


def lower(program: str, config: DecoderConfig, mesh: Mesh, sizes: Sizes) -> jax.stages.Lowered:
    """Traces "update", "score" or "critic" for a mesh."""
    b, microbatch = sizes.prompts, sizes.microbatch
    batch = _batch(mesh, sizes)
    model = Decoder(replace(config, tied_head=True) if program == "critic" else config, mesh)
    shapes, objective = model.shapes, update.policy_objective(model, losses.ppo_clip, Sampling())
    if program == "critic":
        readout = {"kernel": jnp.zeros((config.width, 1)), "bias": jnp.zeros(1)}
        shapes, objective = {"decoder": shapes, "readout": readout}, critic.value_objective(model, clip=0.2)
    aggregate = partial(losses.aggregation_weights, mode="token_mean")
    learner = update.make_learner(
        objective, tiny.optimizer(), shapes, lambda: None, mesh, microbatch=microbatch, aggregate=aggregate
    )
    if program == "score":
        return forward.make_logprob_fn(model, Sampling(), mesh, microbatch).lower(learner.shapes.params, batch)
    return learner.update_step.lower(learner.shapes, batch, jax.ShapeDtypeStruct((b,), jnp.int32))


def _batch(mesh: Mesh, sizes: Sizes) -> Batch:
    place = NamedSharding(mesh, sharding.BATCH)
    prompts = (sizes.prompts, sizes.prompt_tokens)
    completions = (sizes.prompts, sizes.group, sizes.completion_tokens)
    of = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)  # noqa: E731
    names = ("advantages", "values", "returns", "sampler_logprobs", "old_logprobs")
    index = None
    if sizes.packed:
        index = of((sizes.prompts, *index_shape(sizes.group, sizes.completion_tokens, sizes.packed)), "int32")
    return Batch(
        of(prompts, "int32"), of(prompts, "bool"), of(completions, "int32"), of(completions, "bool"),
        of(completions, "bool"), packed_index=index, **{name: of(completions, "float32") for name in names},
    )  # fmt: skip


CONFIG = DecoderConfig(
    family="qwen2",
    vocab_size=65_536, width=32, layers=3, heads=4, kv_heads=2, head_dim=8, mlp_width=8192, max_positions=4096,
    rope=default_rope(1e4, 8), norm_eps=1e-6, tied_head=False, qkv_bias=True, qk_norm=False, remat="full",
)  # fmt: skip
SIZES = Sizes(prompts=16, microbatch=8, group=8, prompt_tokens=16, completion_tokens=256)
PARTS, CHUNKS = 2, 4  # micro-batches; chunks of a micro-batch's tokens, on either mesh
MESHES = [pytest.param((1, 8, 1), marks=pytest.mark.slow), (2, 2, 2)]


@cache
def compiled(program: str, mesh: tuple[int, int, int], packed: tuple[int, int] | None = None) -> list[Collective]:
    lowered = lower(program, CONFIG, tiny.mesh_of(mesh), replace(SIZES, packed=packed))
    return collectives(lowered.compile().as_text())


def parameter_bytes(mesh: tuple[int, int, int], *names: str) -> int:
    """Bytes of these parameters, gathered over data and fsdp."""
    shapes = Decoder(CONFIG).shapes
    return sum(x.size * 4 for name in names for x in jax.tree.leaves(shapes[name])) // mesh[2]


def state_bytes(mesh: tuple[int, int, int]) -> int:
    """Bytes of the states of a device's tokens in a micro-batch."""
    rows = SIZES.microbatch // (mesh[0] * mesh[1])
    return rows * (SIZES.prompt_tokens + SIZES.group * SIZES.completion_tokens) * CONFIG.width * 4


def of_tensor(mesh: tuple[int, int, int], times: int) -> int:
    """Bytes that a split over tensor costs in a micro-batch: so many sums of the states, in each layer."""
    return 2 * times * CONFIG.layers * state_bytes(mesh) if mesh[2] > 1 else 0


def sent(found: list[Collective]) -> int:
    return sum(c.bytes * c.times for c in found)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("program", ["update", "score"])
def test_in_a_chunk_of_tokens_no_device_sends_a_kernel_or_logits(program, mesh):
    inside = [c for c in compiled(program, mesh) if len(c.loops) > 1 and CONFIG.layers not in c.loops]
    if mesh[2] == 1:
        assert inside == []
    for c in inside:  # sums over the split vocabulary: of states, and of numbers for each token
        assert c.bytes <= 2 * state_bytes(mesh) // CHUNKS, c


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_an_update_gathers_parameters_twice_and_scoring_gathers_them_once(mesh):
    """An update reduces gradients once. The embedding stays where it is; over data, its gradient is summed."""
    layers, head = parameter_bytes(mesh, "layers"), parameter_bytes(mesh, "head")
    embedding = parameter_bytes(mesh, "embed") // mesh[1] if mesh[0] > 1 else 0
    # The CPU's compiler reduces gradients of layers with an all-reduce, which sends twice as much as it must.
    most = 4 * layers + 3 * head + 2 * embedding + of_tensor(mesh, 10) + 4 * state_bytes(mesh)
    assert sent(compiled("update", mesh)) <= PARTS * 1.05 * most
    most = layers + head + of_tensor(mesh, 3) + 4 * state_bytes(mesh)
    assert sent(compiled("score", mesh)) <= PARTS * 1.05 * most


def test_a_prompt_with_some_rows_in_a_micro_batch_goes_to_no_other_device():
    """The program computes the number of micro-batches, which counts as 1 here."""
    mesh = (1, 8, 1)
    most = parameter_bytes(mesh, "layers", "head") + of_tensor(mesh, 3) + 4 * state_bytes(mesh)
    rows = SIZES.group, SIZES.completion_tokens  # as many tokens in a micro-batch as without packing
    assert sent(compiled("score", mesh, (rows[0] // 2, rows[1]))) <= 1.05 * most


def test_a_critics_update_sends_layers_and_nothing_of_a_vocabulary():
    mesh = (2, 2, 2)
    found = compiled("critic", mesh)
    in_layers = [c for c in found if CONFIG.layers in c.loops]
    assert sent(in_layers) <= PARTS * 1.05 * (4 * parameter_bytes(mesh, "layers") + of_tensor(mesh, 10))
    embedding = 2 * parameter_bytes(mesh, "embed") // mesh[1]
    for c in set(found) - set(in_layers):
        assert c.bytes <= max(2 * state_bytes(mesh), embedding), c


def test_the_parser_counts_bytes_and_loops_of_both_compilers():
    text = """
%body.1 (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %permuted = (bf16[8,4]{1,0}, bf16[8,4]{1,0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1}}
  ROOT %out = (s32[], f32[8,4]) tuple(%next, %y)
}
%condition.1 (p: (s32[], f32[8,4])) -> pred[] {
  %bound = s32[] constant(8)
  %counter = s32[] get-tuple-element(%p), index=0
  ROOT %less = pred[] compare(%counter, %bound), direction=LT
}
%all-reduce-scatter.1 (x: f32[8,4]) -> f32[1,4] {
  %sum = f32[8,4]{1,0:T(8,128)} all-reduce(%x), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  ROOT %own = f32[1,4] dynamic-slice(%sum, %at, %zero), dynamic_slice_sizes={1,4}
}
ENTRY %main.1 (x: f32[8,4]) -> f32[8,4] {
  %while.1 = (s32[], f32[8,4]) while(%x), condition=%condition.1, body=%body.1
  %fused = f32[1,4] fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1
  %begins = f32[8,4] all-gather(%x), channel_id=7, replica_groups={}, frontend_attributes={chain_id="0"}
  %goes_on = f32[8,4] all-gather(%x), channel_id=7, replica_groups={}, frontend_attributes={chain_id="0"}
  %alone = f32[8,4] all-gather(%x), replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_1'}, dimensions={0}
  %slice = f32[1,4]{1,0} reduce-scatter(%x), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
  ROOT %both = (f32[4], f32[4]) all-reduce(%x, %y), replica_groups={}, to_apply=%add
}
"""
    assert [(c.kind, c.bytes, c.loops) for c in collectives(text)] == [
        ("collective-permute", 64, (4,)),
        ("reduce-scatter", 128, ()),
        ("all-gather", 128, ()),
        ("reduce-scatter", 128, ()),
        ("all-reduce", 64, ()),
    ]


def test_a_gpu_sends_other_hosts_what_they_lack_over_all_network_cards():
    """Lines of a program for two hosts of four GPUs. What starts a collective has its operands before its results."""
    text = """
ENTRY %main.1 (x: f32[8,4]) -> f32[8,4] {
  %both = ((f32[1,4]{1,0}, bf16[2]{0}), (f32[8,4], /*index=1*/bf16[16])) all-gather-start(%x, %y), replica_groups={}
  %host = (f32[2,4]{1,0}, f32[8,4]{1,0}) all-gather-start(%x), replica_groups=mesh['a'=2,'b'=4] {'b'}
  %same = (f32[2,4], f32[8,4]) all-gather-start(%x), replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}
  %pairs = f32[8,4]{1,0} all-reduce-start(%x), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
  %sums = ((f32[8,4], f32[8]), (f32[1,4], f32[1])) reduce-scatter-start(%x, %y), replica_groups={{0,1,2,3,4,5,6,7}}
  %all = ((f32[8,4]), f32[8,4]) all-to-all-start(%x), replica_groups=[1,8]<=[8], dimensions={0}
  %near = (f32[8], f32[8]) collective-permute-start(%x), source_target_pairs={{0,1},{4,5}}
  %far = (f32[8], f32[8]) collective-permute-start(%x), source_target_pairs={{0,1},{3,4}}
}
"""
    found = collectives(text, hosts=4 * [0] + 4 * [1])
    assert [(c.kind, c.bytes, c.to_hosts) for c in found] == [
        ("all-gather", 160, 160 / 2 / 4),
        ("all-gather", 128, 0),
        ("all-gather", 128, 0),
        ("all-reduce", 256, 256 / 2),
        ("reduce-scatter", 160, 160 / 2 / 4),
        ("all-to-all", 128, 128 / 2),
        ("collective-permute", 32, 0),
        ("collective-permute", 32, 32),
    ]
    assert [(c.kind, c.bytes, c.to_hosts) for c in collectives(text)] == [(c.kind, c.bytes, 0) for c in found]


def test_what_goes_between_slices_is_a_kind_of_its_own():
    """Lines of a program for two slices of v5e:2x2."""
    handler = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
    reduced = '_xla_megascale_reduce_operation="SUM",_xla_megascale_transfer_type="ALL_REDUCE"'
    begins = "%send.1 = (f32[3,128]{1,0}, u32[], token[]) send(%p, %token)"
    text = f"""
ENTRY %main.1 (p: f32[3,128]) -> f32[3,128] {{
  {begins}, is_host_transfer=true, frontend_attributes={{{handler},{reduced}}}
  %send-done = token[] send-done(%send.1), channel_id=2, is_host_transfer=true, frontend_attributes={{{handler}}}
}}
"""
    assert collectives(text) == [Collective(BETWEEN_SLICES, "f32[3,128]", 3 * 128 * 4, ())]
