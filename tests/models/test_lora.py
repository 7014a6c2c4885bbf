"""Adapters: the mathematics, what must not change a gradient, what is saved, and that PEFT computes the same."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from ml_collections import ConfigDict
from safetensors.numpy import load_file, save_file
from test_steps import numbers, written

from jaxrl_llm import recipe as recipes
from jaxrl_llm import train
from jaxrl_llm.algorithms import losses
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.build import build
from jaxrl_llm.config import load as configs
from jaxrl_llm.configs.ppo import with_critic
from jaxrl_llm.learner import update
from jaxrl_llm.machine import sharding, transfers
from jaxrl_llm.models import hf, hf_export, names, peft
from jaxrl_llm.models.adapters import Adapters, merge_adapters, quantize_int8
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.lora import Lora
from jaxrl_llm.recipe import advice
from jaxrl_llm.rollout.weights import WeightCopier
from jaxrl_llm.session.saved_run import SavedRun
from jaxrl_llm.structs import Prompt, PyTree
from jaxrl_llm.tools import export

ROOT = Path(__file__).parents[2]
LORA = dict(rank=4, alpha=6.0, rs=True, targets="_proj", base_dtype="", path="")


def lora_of(model: Decoder, **changes: object) -> Adapters:
    return model.adapters(Lora(**LORA | changes))


def drawn(lora: Adapters, size: float = 0.3) -> PyTree:
    """Adapters as after some training: B is not 0."""
    rng = np.random.default_rng(7)
    return jax.tree.map(lambda leaf: rng.normal(0, size, leaf.shape).astype(np.float32), lora.shapes)


def hidden(model: Decoder, params: PyTree) -> jax.Array:
    """Hidden states of prompts without padding: adapters are in layers only."""
    tokens = tiny.batch().prompts
    return model.prefill(params, Prompt(tokens, tokens >= 0))[0]


close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


def tensors_of(params: PyTree) -> dict[str, np.ndarray]:
    return dict(hf_export.tensors(params, names.family_table("qwen2"), np.float32))


def placed(tree: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
    return jax.device_put(tree, sharding.shardings(tree, mesh))


def kept(lora: Adapters, params: PyTree) -> PyTree:
    """The base as a run keeps it."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: quantize_int8(x) if sharding.path_name(path) in lora.int8_paths else x, params
    )


def with_kernels(base: PyTree, adapters: PyTree, merge: Callable) -> PyTree:
    """The base, with merge(kernel, leaves) for every kernel with adapters."""
    whole = jax.tree.map(lambda x: x, base)
    for part, kernels in adapters["layers"].items():
        for name, leaves in kernels.items():
            whole["layers"][part][name] |= {"kernel": merge(whole["layers"][part][name]["kernel"], leaves)}
    return whole


def by_hand(base: PyTree, adapters: PyTree, scale: float) -> PyTree:
    """W + s A B, written down once more."""
    return with_kernels(base, adapters, lambda kernel, of: kernel + scale * (of["lora_a"] @ of["lora_b"]))


def test_the_scale_is_alpha_over_the_rank_or_over_its_root():
    assert [lora_of(Decoder(tiny.CONFIG), rs=rs).kind.scale for rs in (False, True)] == [6 / 4, 6 / 2]


def test_a_kernel_in_int8_has_a_step_for_each_output():
    kernel = tiny.model_and_params()[1]["layers"]["mlp"]["down"]["kernel"] * jnp.logspace(-3, 3, 32)[None, None]
    error = jnp.abs(merge_adapters({"kernel": quantize_int8(kernel)})["kernel"] - kernel)
    step = jnp.abs(kernel).max(axis=1, keepdims=True) / 127
    assert float((error / step).max()) < 0.51
    assert float((error / step).mean()) > 0.1  # the numbers are rounded


def test_a_policy_with_new_adapters_says_exactly_what_its_base_says():
    model, params = tiny.model_and_params(dataclasses.replace(tiny.CONFIG, dtype="bfloat16"))
    lora = lora_of(model, base_dtype="int8")
    base, adapters = kept(lora, model.cast_for_compute(params)), lora.init(jax.random.key(0))
    assert max(np.abs(x).max() for x in jax.tree.leaves(adapters)) > 0.1  # A is not 0
    run = jax.jit(partial(hidden, model))
    np.testing.assert_array_equal(run(lora.combine(base, adapters)), run(base))


@pytest.mark.parametrize(
    ("targets", "base_dtype", "remat"),
    [("q_proj|mlp.down", "int8", "none"), pytest.param("_proj", "", "dots", marks=pytest.mark.slow)],
)
def test_values_and_gradients_on_a_mesh_are_those_through_merged_kernels(targets, base_dtype, remat):
    model, params = tiny.model_and_params(dataclasses.replace(tiny.CONFIG, remat=remat), scale=2.0)
    on_mesh = Decoder(model.cfg, mesh := tiny.mesh_of((2, 2, 2)))
    lora = lora_of(on_mesh, targets=targets, base_dtype=base_dtype)
    base, adapters = kept(lora, params), drawn(lora)
    assert base_dtype == "" or all((a != b).any() for a, b in _kernels(merge_adapters(base), params))
    assert len(jax.tree.leaves(adapters)) == {"_proj": 14, "q_proj|mlp.down": 4}[targets]
    weights = np.random.default_rng(3).normal(size=(tiny.B, tiny.P, 32)).astype(np.float32)

    def total(model, whole, adapters):
        states = hidden(model, whole(adapters))
        return jnp.sum(states * weights), states

    gradient = lambda *of: jax.jit(jax.grad(partial(total, *of), has_aux=True))  # noqa: E731
    ours, states = gradient(on_mesh, partial(lora.combine, placed(base, mesh)))(placed(adapters, mesh))
    merged = partial(by_hand, merge_adapters(base), scale=lora.kind.scale)
    theirs, expected = gradient(model, merged)(adapters)
    close(states, expected, atol=1e-4)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.abs(b).max() > 1e-2
        np.testing.assert_allclose(a, b, atol=2e-4 * max(np.abs(b).max(), 1))


def _kernels(*trees: PyTree) -> list[tuple[jax.Array, ...]]:
    """Pairs of the kernels of the layers of trees."""
    named = (jax.tree_util.tree_leaves_with_path(tree["layers"]) for tree in trees)
    together = zip(*named, strict=True)
    return [tuple(x for _, x in each) for each in together if sharding.path_name(each[0][0]).endswith("kernel")]


def test_rank_and_alpha_are_a_section_of_adapters(refused):
    c = configs.load("grpo")
    c.adapters = ConfigDict(dict(rank=8, alpha=16.0))
    with refused("config.adapters.name", "lora"):
        recipes.read(c)
    c.adapters = ConfigDict(dict(name="lora", rank=8, alpha=16.0))
    recipes.read(c)
    shipped = configs.load("lora").adapters.to_dict()
    assert dataclasses.asdict(Lora(rank=16, alpha=32.0)) | {"name": "lora"} == shipped


def test_adapters_are_sharded_as_their_kernels_and_saved_whole(tmp_path):
    lora = lora_of(Decoder(tiny.CONFIG, mesh := tiny.mesh_of((2, 2, 2))))
    adapters = placed(drawn(lora), mesh)
    specs = {name: leaf.sharding.spec for name, leaf in adapters["layers"]["mlp"]["down"].items()}
    assert specs == {"lora_a": jax.P(None, "tensor", None), "lora_b": jax.P(None, None, "fsdp")}
    assert adapters["layers"]["attention"]["query"]["lora_a"].sharding.spec == jax.P(None, "fsdp", None)
    peft.save(tmp_path / "adapter", adapters, lora, "base")
    jax.tree.map(np.testing.assert_array_equal, peft.load(tmp_path / "adapter", lora), transfers.to_host(adapters))


@pytest.mark.slow
def test_no_memory_is_held_for_the_gradient_or_the_moments_of_the_base():
    """Of a model that is mostly embedding and head: a gradient of the head would double what is needed."""
    mesh = tiny.mesh_of((1, 1, 1))
    model = Decoder(dataclasses.replace(tiny.CONFIG, layers=1, vocab_size=65_536), mesh)
    size = sum(x.size for x in jax.tree.leaves(model.shapes)) * 4
    of = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)  # noqa: E731
    base = jax.tree.map(of, model.shapes, sharding.shardings(model.shapes, mesh))
    objective, lora = update.policy_objective(model, losses.ppo_clip, Sampling()), lora_of(model)
    aggregate = partial(losses.aggregation_weights, mode="token_mean")
    learner = update.make_learner(
        objective, tiny.optimizer(), lora.shapes, lambda: drawn(lora), mesh, microbatch=1, aggregate=aggregate,
        base=update.FrozenBase(base, lora.combine),
    )  # fmt: skip
    memory = learner.program_of("", learner.shapes, tiny.batch(), jnp.arange(tiny.B)).compile().memory_analysis()
    assert memory.argument_size_in_bytes < 1.1 * size
    assert memory.temp_size_in_bytes < 1.9 * size, memory


@pytest.mark.parametrize("remat", ["none", "dots"])
def test_the_backward_pass_keeps_no_kernel_of_int8_as_floats(remat):
    model = Decoder(dataclasses.replace(tiny.CONFIG, layers=16, width=128, mlp_width=512, remat=remat))
    lora = lora_of(model, base_dtype="int8")
    base, tokens = lora.base_shapes(model.shapes), jax.ShapeDtypeStruct((1, 4), jnp.int32)

    def total(adapters: PyTree, base: PyTree, tokens: jax.Array) -> jax.Array:
        return model.prefill(lora.combine(base, adapters), Prompt(tokens, jnp.ones((1, 4), bool)))[0].sum()

    needed = jax.jit(jax.grad(total)).lower(lora.shapes, base, tokens).compile().memory_analysis()
    kernels = sum(x.size for (x,) in _kernels(model.shapes))
    assert needed.temp_size_in_bytes < kernels, needed  # as floats they are four times that


def test_the_copy_of_the_sampler_and_the_exported_tensors_are_merged():
    model, params = tiny.model_and_params()
    lora = lora_of(model, targets="q_proj|mlp", base_dtype="int8")
    adapters, base = drawn(lora), kept(lora, params)
    whole, expected = lora.combine(base, adapters), by_hand(merge_adapters(base), adapters, lora.kind.scale)
    copy = WeightCopier(model, tiny.mesh_of((1, 2, 2)))(whole)
    jax.tree.map(close, copy, model.unstack(expected))
    jax.tree.map(close, tensors := tensors_of(whole), tensors_of(expected))
    shapes = names.tensor_shapes(whole, names.family_table("qwen2"))
    assert [(name, tensor.shape) for name, tensor in tensors.items()] == list(shapes.items())


def config_of(**changes: object):
    config = configs.load(ROOT / "configs" / "lora.py")
    short = {
        "num_steps": 2, "optim.warmup_steps": 0, "prompts_per_step": 8, "prompts_per_update": 8, "group_size": 4,
        "eval": None, "checkpoint.every": 1, "checkpoint.keep": 9, "log.to": (), "adapters.rank": 2,
        "log.completions_every": 0, "health.self_test": False, "mesh.fsdp": 2, "mesh.tensor": 2,
    }  # fmt: skip
    for name, value in (short | changes).items():
        configs.override(config, name, str(value))
    return config.lock()


def run_of(config: ConfigDict, workdir: Path) -> Path:
    for _ in train.steps(config, workdir):
        pass
    return workdir


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run on a mesh of four devices."""
    return run_of(config_of(), tmp_path_factory.mktemp("whole") / "run")


def test_the_kl_of_the_first_step_is_exactly_0_and_a_checkpoint_holds_no_base(whole):
    assert [record["kl/ref"] > 0 for record in numbers(written(whole))] == [False, True]
    saved = jax.tree.leaves(SavedRun(whole).params(2))
    kernels = 14 * 4 * 128 * 2  # kernels with a side of the width in 4 layers, rank 2
    assert kernels / 2 < sum(leaf.size for leaf in saved) < 4 * kernels
    size = sum(file.stat().st_size for file in (whole / "checkpoints" / "2").rglob("*") if file.is_file())
    assert size < (whole / "hf" / "model.safetensors").stat().st_size


def test_the_folders_of_a_run_are_base_plus_adapters(whole):
    run, mesh = SavedRun(whole), tiny.mesh_of((1, 1, 1))
    with run.model_folder(2) as folder:
        model = hf.load_model(folder, mesh)
        base, lora = hf.load_params(folder, model, mesh), model.adapters(run.adapters)
        adapters = run.params(2)
        expected = by_hand(transfers.to_host(base), adapters, lora.kind.scale)
        jax.tree.map(close, hf.load_params(whole / "hf", model, mesh), expected)
        jax.tree.map(np.testing.assert_array_equal, peft.load(whole / "adapter", lora), adapters)
        read = run.policy(2, folder, model, mesh)
        jax.tree.map(close, tensors_of(read), tensors_of(expected))


@pytest.mark.slow
def test_a_run_with_a_base_in_int8_is_resumed_and_saves_what_it_sampled_from(whole, tmp_path):
    config = config_of(**{"adapters.base_dtype": "int8", "model.dtype": "float32"})
    ours, theirs = numbers(written(run_of(config, tmp_path / "run"))), numbers(written(whole))
    assert [record["kl/ref"] > 0 for record in ours] == [False, True]
    assert max(record["sampler/gap_max"] for record in ours) < 1e-3
    assert [record["kl/ref"] for record in ours] != [record["kl/ref"] for record in theirs]
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "2")
    assert numbers(written(run_of(config, tmp_path / "again"))) == ours
    run, mesh = SavedRun(tmp_path / "run"), tiny.mesh_of((1, 1, 1))
    with run.model_folder(2) as folder:
        model = hf.load_model(folder, mesh)
        base = transfers.to_host(merge_adapters(hf.load_base(folder, model, mesh, model.adapters(run.adapters))))
        expected = by_hand(base, run.params(2), run.adapters.scale)
        jax.tree.map(close, hf.load_params(tmp_path / "run" / "hf", model, mesh), expected)


def test_the_parts_of_a_kernel_in_int8_are_sharded_as_the_kernel():
    folder, mesh = ROOT / "jaxrl_llm" / "assets" / "arithmetic", tiny.mesh_of((1, 2, 2))
    model = hf.load_model(folder, mesh)
    lora = lora_of(model, base_dtype="int8")
    base = hf.load_base(folder, model, mesh, lora)
    for name, place in (("query", ("fsdp", "tensor")), ("output", ("tensor", "fsdp"))):
        kernel = base["layers"]["attention"][name]["kernel"]
        assert kernel.qvalue.dtype == jnp.int8
        assert kernel.qvalue.sharding.spec == jax.P(None, *place)
        assert kernel.scale.sharding.spec == jax.P(None, None, place[1])
    expected = merge_adapters(kept(lora, hf.load_params(folder, model, mesh)))
    jax.tree.map(np.testing.assert_array_equal, merge_adapters(base), expected)


@pytest.mark.slow
def test_a_run_from_a_folder_of_peft_begins_with_it_and_stays_near_it(whole, tmp_path, refused):
    """Its reference has these adapters, also when it is resumed."""
    changes = {"adapters.path": whole / "adapter", "optim.learning_rate": 1e-30, "optim.decay": "constant"}
    before = tensors_of(hf.load_params(whole / "hf", *_of(whole / "hf")))
    for steps in (1, 2):
        run_of(config_of(**changes | {"num_steps": steps}), tmp_path / "run")
    assert [record["kl/ref"] for record in written(tmp_path / "run")] == [0.0] * 2
    after = tensors_of(hf.load_params(tmp_path / "run" / "hf", *_of(whole / "hf")))
    jax.tree.map(close, before, after)
    run, other = SavedRun(whole), tmp_path / "other"
    peft.save(other, jax.tree.map(lambda x: 2 * x, run.params(2)), _of(whole / "hf")[0].adapters(run.adapters), "base")
    with refused("config.adapters.path"):
        next(train.steps(config_of(**changes | {"adapters.path": other, "num_steps": 3}), tmp_path / "run"))


def _of(folder: Path) -> tuple[Decoder, jax.sharding.Mesh]:
    mesh = tiny.mesh_of((1, 1, 1))
    return hf.load_model(folder, mesh), mesh


@pytest.mark.slow
def test_a_critic_without_a_folder_learns_adapters_of_its_own_on_the_same_base(tmp_path):
    """It is resumed from the middle. The reference moves: it takes the adapters of the policy, after step 2."""
    sizes = {}
    for steps in (1, 3):
        config = config_of(**{"num_steps": steps, "kl.refresh.every": 2}).copy_and_resolve_references()
        with config.unlocked():
            config.schedule_steps, config.mesh.tensor = 3, 1
            with_critic(config)
            config.critic.warmup_steps = config.critic.optim.warmup_steps = 0
        with build(config.lock(), tmp_path / "run") as (session, parts):
            learners = parts.learning.learners
            critic, before = learners["critic"], jax.tree.map(np.asarray, learners["critic"].base.params)
            assert jax.tree.leaves(critic.base.params)[0] is jax.tree.leaves(learners["policy"].base.params)[0]
            sizes |= {
                name: sum(x.size for x in jax.tree.leaves(parts.learning.shapes()[name].params)) for name in learners
            }
            for _ in train.train(session, parts):
                pass
            jax.tree.map(np.testing.assert_array_equal, before, critic.base.params)
    assert sizes["critic"] == sizes["policy"] + 128 + 1  # the readout
    records = written(tmp_path / "run")
    assert len({record["critic/loss/total"] for record in records}) == 3
    assert [record["kl/ref"] > 0 for record in records] == [False, True, False]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("adapters.targets", "q_proj("), ("adapters.base_dtype", "int4"), ("adapters.rank", 0), ("adapters.alpha", 0.0),
        ("kl.refresh.mix", 0.5), ("host_memory.reference", True), ("model.path", ""),
    ],
)  # fmt: skip
def test_a_config_is_refused_for(field, value, refused):
    more = {"kl.refresh.every": 2} if field == "kl.refresh.mix" else {}
    with refused(field.split(".")[-1] if field == "host_memory.reference" else field):
        recipes.read(config_of(**more | {field: value}))


@pytest.mark.parametrize(("rate", "found"), [(1e-3, False), (4e-3, True)])
def test_the_bound_of_the_rate_is_ten_times_that_of_full_fine_tuning(rate, found):
    config = config_of(**{"optim.learning_rate": rate})
    told = advice.learning_rate(advice.RunSettings(recipes.read(config), width=128))
    assert bool(list(told)) == found


@pytest.fixture
def scales(tmp_path, monkeypatch) -> dict[str, object]:
    """The section of a kind of adapters in a module of the user: that of docs/lora.md."""
    (module,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "lora.md").read_text(), re.DOTALL)
    (tmp_path / "scales.py").write_text(module + "\n\ndef make(*, targets, base_dtype):\n    return Scales\n")
    monkeypatch.syspath_prepend(tmp_path)
    return dict(name="scales.Scales", targets="q_proj|mlp", base_dtype="int8")


def config_with(section: dict[str, object], **changes: object):
    config = config_of(**changes).copy_and_resolve_references()
    with config.unlocked():
        config.adapters = ConfigDict(section)
    return config.lock()


def scaled(base: PyTree, scales: PyTree) -> PyTree:
    return with_kernels(base, scales, lambda kernel, of: kernel * (1 + of["s"]))


def test_a_kind_of_adapters_of_the_user_computes_as_its_merged_kernels(scales):
    recipe = recipes.read(config_with(scales, **{"kl.refresh.every": 1, "kl.refresh.mix": 0.5}))
    assert recipe.adapters is not None
    model, params = tiny.model_and_params(scale=2.0)
    adapters = model.adapters(recipe.adapters())
    base, new = kept(adapters, params), adapters.init(jax.random.key(0))
    score = jax.jit(partial(hidden, model))
    np.testing.assert_array_equal(score(adapters.combine(base, new)), unadapted := score(base))
    whole, expected = adapters.combine(base, drawn(adapters)), scaled(merge_adapters(base), drawn(adapters))
    np.testing.assert_allclose(score(whole), score(expected), atol=1e-4)
    assert np.abs(score(whole) - unadapted).max() > 1e-2
    jax.tree.map(close, WeightCopier(model, tiny.mesh_of((1, 2, 2)))(whole), model.unstack(expected))


def test_the_settings_of_a_kind_of_adapters_of_the_user_are_checked(scales, refused):
    for field, value in {"base_dtype": "int4", "rank": 4, "name": "scales.make"}.items():
        with refused(f"config.adapters.{field}"):
            recipes.read(config_with(scales | {field: value}))


@pytest.mark.slow
def test_adapters_of_the_user_are_resumed_and_exported_merged(scales, tmp_path, monkeypatch, refused):
    run, mesh, alone = tmp_path / "run", tiny.mesh_of((1, 1, 1)), {"mesh.fsdp": 1, "mesh.tensor": 1}
    for steps in (1, 2):
        run_of(config_with(scales, num_steps=steps, schedule_steps=2, **alone), run)
    saved = SavedRun(run)
    with saved.model_folder(2) as folder:
        model = hf.load_model(folder, mesh)
        adapters, learned = model.adapters(saved.adapters), saved.params(2)
        assert min(float(np.abs(s).max()) for s in jax.tree.leaves(learned)) > 0
        expected = scaled(merge_adapters(kept(adapters, hf.load_params(folder, model, mesh))), learned)
        jax.tree.map(close, hf.load_params(run / "hf", model, mesh), expected)
        jax.tree.map(close, tensors_of(saved.policy(2, folder, model, mesh)), tensors_of(expected))
    assert not (run / "adapter").exists()
    monkeypatch.setattr("sys.argv", ["export", str(run), "--adapter", "--to", str(tmp_path / "to")])
    with refused("PEFT"):
        export.main()


@pytest.fixture
def saved(tmp_path) -> Path:
    """A folder of adapters of all kernels."""
    lora = lora_of(Decoder(tiny.CONFIG))
    peft.save(tmp_path / "adapter", drawn(lora), lora, "base")
    return tmp_path / "adapter"


def test_targets_that_name_no_kernel_are_told_what_there_is(refused):
    with refused("targets", "self_attn.k_proj", "mlp.up_proj"):
        lora_of(tiny.model_and_params()[0], targets="c_attn")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 2), ("rs", False), ("targets", "q_proj"), ("use_dora", True), ("alora_invocation_tokens", [1, 2]),
        ("init_lora_weights", "pissa_niter_4"),
    ],
)  # fmt: skip
def test_a_folder_of_other_adapters_is_refused(field, value, saved, refused):
    file, ours = saved / peft.SETTINGS_FILE, {field: value} if field in LORA else {}
    if not ours:
        file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with refused(f"config.adapters.{field}" if ours else str(value) if field == "init_lora_weights" else field):
        peft.load(saved, lora_of(Decoder(tiny.CONFIG), **ours))


def test_adapters_outside_of_the_layers_are_told_from_missing_ones(tmp_path, refused):
    model, _ = tiny.model_and_params()
    lora = lora_of(model, targets="q_proj")
    peft.save(tmp_path / "adapter", drawn(lora), lora, "base")
    file = tmp_path / "adapter" / peft.WEIGHTS_FILE
    save_file(load_file(file) | {"base_model.model.lm_head.lora_A.weight": np.zeros((4, 32), np.float32)}, file)
    with refused("lm_head.lora_A.weight"):
        peft.load(tmp_path / "adapter", lora)
    with refused("k_proj.lora_A.weight", "config.adapters.targets"):
        peft.load(tmp_path / "adapter", lora_of(model))


def test_an_adapter_that_is_not_finite_is_named_with_its_file(saved, refused):
    file = saved / peft.WEIGHTS_FILE
    name, tensor = next(iter(load_file(file).items()))
    save_file(load_file(file) | {name: np.full_like(tensor, np.nan)}, file)
    with refused(peft.WEIGHTS_FILE, name):
        peft.load(saved, lora_of(Decoder(tiny.CONFIG)))


@pytest.mark.parity
@pytest.mark.needs("torch", "peft")
@pytest.mark.parametrize("changes", [{}, dict(rs=False, targets="q_proj|v_proj", rank=3)], ids=str)
def test_peft_loads_the_adapters_and_computes_the_same_logits(changes, tmp_path):
    import peft as peft_library
    import torch
    from transformers import AutoModelForCausalLM

    folder = ROOT / "jaxrl_llm" / "assets" / "arithmetic"
    model, mesh = _of(folder)
    lora, base = lora_of(model, **changes), hf.load_params(folder, model, mesh)
    adapters = drawn(lora, 0.1)
    whole = lora.combine(base, adapters)
    peft.save(tmp_path / "adapter", adapters, lora, str(folder))
    hf_export.save(tmp_path / "hf", whole, folder)
    tokens = np.random.default_rng(0).integers(0, model.cfg.vocab_size, (4, 24))
    prompt = Prompt(tokens, np.ones_like(tokens, bool))
    logits = jax.jit(lambda params: model.logits(params, model.prefill(params, prompt)[0]))
    ours = np.asarray(logits(whole))
    original = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        unadapted = original(torch.tensor(tokens)).logits.numpy()
        adapted = peft_library.PeftModel.from_pretrained(original, tmp_path / "adapter")
        theirs = adapted(torch.tensor(tokens)).logits.numpy()
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(torch.tensor(tokens)).logits.numpy()
    size = np.abs(theirs).max()
    assert np.abs(theirs - unadapted).max() > 0.1 * size
    print(f"{np.abs(ours - theirs).max() / size:.1e} {np.abs(exported - theirs).max() / size:.1e}")
    assert np.abs(ours - theirs).max() < 1e-5 * size
    assert np.abs(exported - theirs).max() < 1e-5 * size
    adapted.save_pretrained(tmp_path / "saved_by_peft")
    jax.tree.map(
        np.testing.assert_array_equal, peft.load(tmp_path / "saved_by_peft", lora), transfers.to_host(adapters)
    )
