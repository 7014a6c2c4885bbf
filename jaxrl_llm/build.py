"""Builds the parts of a run from its config. This module connects all other packages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm import compatibility, sharding
from jaxrl_llm.algorithms import advantages, kl, losses
from jaxrl_llm.algorithms.credit import make_credit
from jaxrl_llm.algorithms.importance import make_importance_weights
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.banner import batch_table, models_table, print_banner, shapes_table
from jaxrl_llm.checkpoint import Checkpoints, check_workdir, has_checkpoint, keep_schedule, open_workdir
from jaxrl_llm.compilation import Compilations, compute_deterministically, keep_compilations
from jaxrl_llm.config import checks
from jaxrl_llm.config.names import arguments, required_inputs, resolve
from jaxrl_llm.data import prompts as data
from jaxrl_llm.evaluate import evaluate, whole_batches
from jaxrl_llm.health import Health, settings
from jaxrl_llm.host import disk
from jaxrl_llm.host.signals import NoSignals, StopSignals
from jaxrl_llm.learner import optim, update
from jaxrl_llm.learner.critic import make_critic
from jaxrl_llm.learner.packing import Packing, minibatches, packed_shapes
from jaxrl_llm.learner.scorers import FROZEN, Scorer, States, make_frozen_scorer, make_scorers
from jaxrl_llm.learner.update import Learner
from jaxrl_llm.log import Log
from jaxrl_llm.models import hf, hf_export
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.programs import Program, compile_all, of_learning
from jaxrl_llm.rewards.reward_fn import RewardFn
from jaxrl_llm.rollout import engines
from jaxrl_llm.rollout.actor import Actor
from jaxrl_llm.rollout.compaction import Slots, prompts_at_once, slot_shapes
from jaxrl_llm.rollout.protocol import Engine, EngineInputs
from jaxrl_llm.rollout.sampler import Sampler
from jaxrl_llm.rollout.samples import SampleSource
from jaxrl_llm.rollout.weight_check import WeightCheck
from jaxrl_llm.run import Run
from jaxrl_llm.saved_run import model_folder
from jaxrl_llm.shapes import MOST, RATES, TRAINING, Book, Shape
from jaxrl_llm.structs import Array, Config, PyTree


@dataclass(frozen=True)
class Loaded:
    """The inputs of every run, loaded and checked before anything is written."""

    config: Config
    workdir: Path
    totals: checks.Totals
    compilations: Compilations
    cache: str  # folder of compiled programs, or "off"
    mesh: Mesh
    folder: Path  # of the model
    model: Decoder
    tokenizer: Any
    dataset: data.Dataset
    held_out: data.Dataset  # evaluation problems; `dataset` itself if the run has no evaluation
    stop_ids: tuple[int, ...]
    others: dict[str, Path]  # section of the config -> folder of that other model
    book: Book  # the shapes of the run
    first_params: list[PyTree]  # the model's parameters, until `params` hands them out
    opened: ExitStack  # closes everything that the run opens, in reverse order

    def params(self) -> PyTree:
        """Returns the model's parameters as its folder has them. Each call returns separate arrays."""
        return self.first_params.pop() if self.first_params else hf.load_params(self.folder, self.model, self.mesh)

    def export(self, params: PyTree) -> None:
        """Writes the policy as a Hugging Face folder."""
        hf_export.save(self.workdir / "hf", params, self.folder)


@contextmanager
def build(config: Config, workdir: Path, *, signals: bool = False) -> Iterator[Run]:
    """Opens the run of `config` in `workdir`, and closes it on every exit: the checkpoints last, then the lock.

    signals: signals that end a process save and end the run too (`StopSignals`).
    Raises: UserError, for an error that the user can fix.
    """
    with ExitStack() as opened, StopSignals(opened) if signals else nullcontext(NoSignals()) as stop:
        yield make_run(load(config, workdir, opened, checks.check_train), stop)


COMPILE_ONLY = "compile the programs of the run into the cache of compiled code, in all its shapes, and end"


def compile_only(config: Config) -> None:
    """Compiles the programs of a run into the cache, in all shapes that it may use, without a step."""
    with TemporaryDirectory() as workdir, build(config, Path(workdir)) as run:
        compile_all(run.programs(), run.log.say)


def load(config: Config, workdir: Path, opened: ExitStack, check: Callable[[Config], checks.Totals]) -> Loaded:
    """Checks and loads config, workdir, mesh, model and data, in this order. Raises: UserError."""
    compilations, cache = opened.enter_context(closing(Compilations())), keep_compilations()
    keep_schedule(workdir, config)  # first: the checks need the schedules' length
    totals = check(config)
    if config.deterministic:  # must come before JAX initializes its devices
        compute_deterministically()
    check_workdir(workdir, config, checks.may_change(config))
    opened.enter_context(disk.locked(workdir))
    mesh = sharding.make_mesh(**config.mesh)
    compatibility.check_batch_fits_mesh(config, mesh, totals.prompts_per_update)
    folder = opened.enter_context(model_folder(config))
    sections = [name for name in ("critic", *FROZEN) if name in config and config[name].path]
    others = {name: hf.find(config[name].path, f"{name}.path") for name in sections}
    parts = config.model.row_parts if "loss" in config else 1  # `sft` has one completion of each prompt
    model = hf.load_model(folder, mesh, dtype=config.model.dtype, remat=config.model.remat, row_parts=parts)
    tokenizer = hf.load_tokenizer(folder)
    dataset = data.load(config, tokenizer)
    held_out = data.load_held_out(config, tokenizer) if config.eval.every else dataset
    compatibility.check_vocabulary(model.cfg, tokenizer, dataset, held_out)
    compatibility.check_positions(config, model.cfg, dataset, held_out)
    stop_ids = hf.stop_ids(folder, tokenizer)
    # Load now, to find wrong files before anything is written. A resumed run restores its parameters instead.
    begins = config.model.path and not has_checkpoint(workdir / "checkpoints")
    first_params = [hf.load_params(folder, model, mesh)] if begins else []
    return Loaded(
        config,
        workdir,
        totals,
        compilations,
        cache,
        mesh,
        folder,
        model,
        tokenizer,
        dataset,
        held_out,
        stop_ids,
        others,
        opened.enter_context(closing(Book())),
        first_params,
        opened,
    )


def make_run(given: Loaded, stop: StopSignals | NoSignals) -> Run:
    """Builds a run of `train`. Raises: UserError."""
    config, mesh, model = given.config, given.mesh, given.model
    compatibility.check_sampling(config, model.cfg)
    compatibility.check_one_at_a_time(config, mesh)
    sampling = Sampling(config.rollout.temperature, config.rollout.top_k, config.rollout.top_p)
    # own: the weights that sample are those at the start of the step. exact: in float32, sampler and trainer also
    # compute the same log-probabilities, to rounding.
    own = engines.choose(config).in_trainer and not config.rollout.max_lag
    exact = own and config.model.dtype == "float32"
    required = required_inputs(resolve(config.advantage.name, advantages))
    updates = given.totals.updates_per_rollout
    aggregate = partial(losses.aggregation_weights, **config.aggregate)
    scorers = make_scorers(config, model, sampling, mesh, required, updates=updates, exact=exact)
    learners = {"policy": make_policy(given, sampling, aggregate, off_policy=not own)}
    for name, folder in given.others.items():
        if name in FROZEN:
            scorers[name] = make_frozen_scorer(name, folder, config, model.cfg, given.tokenizer, sampling, mesh)
    if "critic" in config:
        critic = given.others.get("critic", given.folder)
        learner, scorers["critic"] = make_critic(config, critic, model.cfg, mesh, aggregate)
        learners = {"critic": learner} | learners  # first: it learns before the policy
    shapes: States = {name: learner.shapes for name, learner in learners.items()}
    if config.kl.refresh_every:
        shapes["reference"] = shapes["policy"].params
    packing = make_packing(given, scorers, learners)
    slots = decode_shapes(config, mesh) if engines.choose(config).in_trainer else []
    outputs = open_outputs(
        given, shapes, [*models_table(scorers, learners), *shapes_table(slots, packing.ladder.shapes)]
    )
    actor = make_actor(given, sampling, greedy="greedy_rewards" in required)
    evaluation = make_evaluation(given)
    assign_credit = make_credit(config, mesh, updates=updates)

    def programs() -> Iterator[Program]:
        if isinstance(actor.engine, Sampler):
            for batch in batches(given, sampling, greedy="greedy_rewards" in required):
                yield from actor.engine.programs(learners["policy"].shapes.params, **batch)
        parts = config, mesh, scorers, learners, assign_credit
        yield from of_learning(*parts, packing.ladder.shapes, given.dataset.width)

    def accuracy(states: States) -> float:
        actor.wait()  # until the engine has the latest weights
        return evaluation(actor.engine)

    return Run(
        config=config,
        mesh=mesh,
        actor=actor,
        scorers=scorers,
        learners=learners,
        shapes=shapes,
        stop=stop,
        assign_credit=assign_credit,
        minibatches=lambda step: list(minibatches(config, step)),
        reference=given.params if config.kl.placement != "none" else None,
        accuracy=accuracy,
        export=given.export,
        compilations=given.compilations,
        programs=programs,
        book=given.book,
        packing=packing,
        **outputs,
    )


def make_policy(given: Loaded, sampling: Sampling, aggregate: Callable[[Array], Array], *, off_policy: bool) -> Learner:
    """Builds the policy's learner; off_policy: another engine or older weights may have sampled."""
    config, totals = given.config, given.totals
    objective = update.policy_objective(
        given.model,
        resolve(config.loss.name, losses)(**arguments(config.loss)),
        sampling,
        kl=resolve(config.kl.estimator, kl) if config.kl.placement == "loss" else None,
        kl_weighted=config.kl.weighted,
        correct=make_importance_weights(off_policy=off_policy, **config.importance),
        off_policy=config.mask.off_policy,
    )
    adaptive = {"kl/to_reward": config.adaptive_warmup.kl_to_reward, "update_size": config.adaptive_warmup.update_size}
    more = optim.objective_coefficients(config, totals.scheduled_updates, totals.sequences_per_update)
    learner = update.make_learner(
        objective,
        optim.make_optimizer(totals.scheduled_updates, adaptive=adaptive, more=more, **config.optim),
        given.model.shapes(),
        given.params,
        given.mesh,
        microbatch=config.microbatch,
        aggregate=aggregate,
    )
    return replace(learner, frozen_steps=config.critic.warmup_steps if "critic" in config else 0)


def open_outputs(given: Loaded, shapes: States, rows: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Opens the checkpoints of `shapes`, the log and the health rules of a run, and prints the banner with `rows`.

    Raises: UserError, if model or data differ from those at the run's start, or the disk has no room.
    """
    config, workdir, opened = given.config, given.workdir, given.opened
    began_with = {"model.path": hf.fingerprint(given.folder), "data.source": given.dataset.fingerprint()}
    if config.eval.every:
        began_with["eval.source"] = given.held_out.fingerprint()
    began_with |= {f"{name}.path": hf.fingerprint(folder) for name, folder in given.others.items() if name in FROZEN}
    checkpoints = opened.enter_context(closing(Checkpoints(workdir / "checkpoints", began_with, config.checkpoint)))
    checkpoints.check_room(shapes)
    start = checkpoints.check_beginning()
    open_workdir(workdir, config)
    derived = batch_table(config, given.totals, given.mesh, given.model.cfg, given.dataset, given.held_out, start)
    print_banner(
        f"jaxrl_llm.{'train' if 'loss' in config else 'sft'}: {workdir}",
        [*derived, *rows, ("compiled code", given.cache)],
        lines=settings.warnings(config, given.totals, given.model.cfg, given.mesh.devices.flat[0].platform),
    )
    log = opened.enter_context(closing(Log(workdir, config)))
    health = Health(workdir, config.health.to_dict(), log.say)
    return dict(workdir=workdir, checkpoints=checkpoints, log=log, health=health)


def make_actor(given: Loaded, sampling: Sampling, *, greedy: bool) -> Actor:
    """Starts the config's engine and builds the actor; greedy: also sample each prompt's greedy completion."""
    config, dataset, opened = given.config, given.dataset, given.opened
    collate = partial(data.make_prompts, dataset, pad_id=given.tokenizer.pad_token_id)
    iterator = data.iterate(len(dataset.rows), config.prompts_per_step, config.seed, collate)
    reward_fn = open_reward_fn(given, config.reward.functions, config.reward.weights)
    engine = opened.enter_context(closing(engines.choose(config).start(engine_inputs(given))))
    weight_check = None
    if engine.max_gap is not None:
        rows, bound = len(dataset.rows), engine.max_gap
        weight_check = WeightCheck(engine, given.model, given.mesh, collate, rows=rows, bound=bound)
    source = SampleSource(config, engine, sampling, iterator, collate, given.tokenizer, reward_fn, greedy=greedy)
    actor = Actor(
        engine,
        source,
        iterator,
        jax.random.key(config.seed),
        book=given.book,
        lag=config.rollout.max_lag,
        last=config.num_steps,
        weight_check=weight_check,
    )
    return opened.enter_context(closing(actor))


def engine_inputs(given: Loaded) -> EngineInputs:
    """Returns the inputs that an engine gets."""
    return EngineInputs(
        given.model,
        given.mesh,
        given.folder,
        given.workdir,
        max(given.dataset.width, given.held_out.width),
        given.config.rollout.max_completion_tokens,
        given.stop_ids,
        given.tokenizer.pad_token_id,
        given.book,
    )


def make_packing(given: Loaded, scorers: dict[str, Scorer], learners: dict[str, Learner]) -> Packing:
    """Returns the packing of completions into rows, in the shapes of the run."""
    config, cfg = given.config, given.model.cfg
    rates, devices = RATES[given.mesh.devices.flat[0].platform], given.mesh.devices.size
    prompts, limit = config.prompts_per_step, config.rollout.max_completion_tokens
    weights = sum(x.size for x in jax.tree.leaves(given.model.shapes()))
    programs = sum(isinstance(x.program, jax.stages.Wrapped) for x in scorers.values()) + len(learners)
    passes = programs - len(learners) + 3 * config.epochs * len(learners)  # an update is three times a forward pass

    def seconds(shape: Shape) -> float:
        rows, width = shape
        of_weights = 2 * weights * (given.dataset.width + rows * width)
        of_attention = 4 * cfg.layers * cfg.heads * cfg.head_dim * rows * width * (width + given.dataset.width)
        return passes * prompts * (of_weights + of_attention) / rates.flops / devices

    shapes, price = packed_shapes(config.group_size, limit), programs * rates.compile
    ladder = given.book.ladder(TRAINING, shapes, price=price, most=MOST[TRAINING])
    return Packing(ladder, seconds, limit)


def decode_shapes(config: Config, mesh: Mesh) -> list[Slots]:
    """Returns the shapes in which the JAX sampler may decode, the largest first."""
    group, devices = config.group_size, mesh.shape["data"] * mesh.shape["fsdp"]
    prompts = prompts_at_once(config.prompts_per_step, group, devices, engines.choose(config).max_sequences)
    return slot_shapes(prompts // devices, group, config.rollout.max_completion_tokens)


def batches(given: Loaded, sampling: Sampling, *, greedy: bool) -> list[dict[str, Any]]:
    """Returns sizes and sampling of the batches that the engine samples, as arguments of `Sampler.programs`."""
    config, width = given.config, given.dataset.width
    made = [dict(prompts=config.prompts_per_step, width=width, group=config.group_size, sampling=sampling)]
    if greedy:
        made.append(made[0] | dict(group=1, sampling=Sampling(0.0)))
    if config.eval.every:
        batch = whole_batches(given.totals.sequences_per_step, len(given.held_out.rows), given.mesh)
        made.append(dict(prompts=batch, width=given.held_out.width, group=1, sampling=Sampling(0.0)))
    return made


def make_evaluation(given: Loaded) -> Callable[[Engine], float]:
    """Returns `evaluation(engine)` -> accuracy of greedy completions on the held-out problems."""
    config = given.config
    reward_fn = open_reward_fn(given, (config.eval.function,) if config.eval.every else (), (1.0,))
    batch = whole_batches(given.totals.sequences_per_step, len(given.held_out.rows), given.mesh)
    key = jax.random.key(config.seed)
    return lambda engine: float(
        evaluate(engine, given.held_out, reward_fn, given.tokenizer, batch=batch, key=key)[0].mean()
    )


def open_reward_fn(given: Loaded, functions: tuple[str, ...], weights: tuple[float, ...]) -> RewardFn:
    """Opens a RewardFn for these functions. It closes when the run ends."""
    timeout = given.config.reward.timeout
    return given.opened.enter_context(
        closing(RewardFn(functions, weights, timeout=timeout, field="config.reward.timeout"))
    )
