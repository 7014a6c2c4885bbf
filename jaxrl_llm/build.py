"""Builds the session and the parts of a run from its recipe. This module connects all other rooms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from jax.sharding import Mesh

from jaxrl_llm import recipe as recipes
from jaxrl_llm.algorithms import losses
from jaxrl_llm.algorithms.credit import make_credit
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.config.load import flatten, with_names
from jaxrl_llm.data import columns, encoding
from jaxrl_llm.data import prompts as data
from jaxrl_llm.data.curriculum import drawn
from jaxrl_llm.data.images import read_format
from jaxrl_llm.health.finding import Finding
from jaxrl_llm.learner import update
from jaxrl_llm.learner.critic import make_critic
from jaxrl_llm.learner.learning import (
    Learning,
    Models,
    describe_models,
    load_beside,
    make_packing,
    make_reference,
    policy_parameters,
    resident,
)
from jaxrl_llm.learner.packing import Packing
from jaxrl_llm.learner.programs import compile_all, learning_programs
from jaxrl_llm.learner.scorers import Frozen, States, load_frozen, make_frozen_scorer, make_scorers
from jaxrl_llm.learner.update import Learner, Objective, Parameters
from jaxrl_llm.machine import distributed, sharding
from jaxrl_llm.machine.compilation import Program, compute_deterministically
from jaxrl_llm.machine.distributed import agreement
from jaxrl_llm.machine.hang import WATCHDOG
from jaxrl_llm.machine.memory import device_memory
from jaxrl_llm.machine.shapes import Book
from jaxrl_llm.models import hf
from jaxrl_llm.recipe import advice, fit
from jaxrl_llm.recipe.recipe import Recipe, SftRecipe
from jaxrl_llm.rollout.actor import Actor, Lent
from jaxrl_llm.rollout.environments import EpisodeSettings, open_environments
from jaxrl_llm.rollout.evaluation import evaluate_sets, open_tasks
from jaxrl_llm.rollout.grading import RewardFn
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.rollout.jax.reading import page_kind
from jaxrl_llm.rollout.jax.sizes import StreamSizes, at_once, cache_bytes, sizes_of
from jaxrl_llm.rollout.protocol import Engine, EngineInputs
from jaxrl_llm.rollout.samples import CompletionTask, SampleSource
from jaxrl_llm.rollout.weight_check import WeightCheck
from jaxrl_llm.rollout.weights import copy_shapes
from jaxrl_llm.selftest import self_test
from jaxrl_llm.selftest.trial import Facts, Subject
from jaxrl_llm.session import banner, checkpoint
from jaxrl_llm.session import workdir as workdirs
from jaxrl_llm.session.changes import Change, Rows
from jaxrl_llm.session.inputs import Inputs
from jaxrl_llm.session.opening import Workplace, at_work, open_session
from jaxrl_llm.session.session import ModelStates, Session, Trainer
from jaxrl_llm.structs import Config, PyTree, StatefulPart

Run = TypeVar("Run")  # a session and the parts of its steps
COMPILE_ONLY = "compile the programs of the run into the cache of compiled code, in all its shapes, and end"


@dataclass
class Parts(Subject):
    """The parts of a run of `train`: those that its self-test looks at, and more."""

    evaluation: Callable[[Engine], dict[str, float]]  # -> metrics of all evaluation sets
    export: Callable[[States], None]  # writes the policy as a folder of Hugging Face
    programs: Callable[[], Iterator[Program]]  # all that the run may compile
    self_test: Callable[[], None] | None = None  # of a new run

    @property
    def kept(self) -> Mapping[str, StatefulPart]:
        """What a checkpoint keeps beside the states: the shapes in which a run learns, and where it is in the data."""
        return {"shapes": self.book, checkpoint.SAMPLES: self.actor}

    def begin(self, states: States, step: int, attempt: int) -> Lent:
        """Lends the engine the first weights, after `step`."""
        return self.actor.begin(states, self.learning.policy(states), step, attempt)

    def rest(self) -> None:
        """Waits until the engine has the last weights, and checks them. Raises: UserError, if it does not have them."""
        self.actor.lent.take_back()

    def measure(self, states: States) -> dict[str, float]:
        """Returns the metrics of an evaluation of the last pushed weights, which are those of the states."""
        self.actor.wait()
        return self.evaluation(self.actor.engine)


def build(
    config: Config, workdir: str | Path, *, signals: bool = False, command: bool = False
) -> AbstractContextManager[tuple[Session, Parts]]:
    """Opens the run of `config` in `workdir`, and closes it on every exit: the checkpoints last, then the lock.

    An exception in the block, as that of Ctrl-C, saves the run first, unless it is a UserError (`Interrupts`). signals:
    SIGTERM and a closed terminal raise KeyboardInterrupt. command: this process is for this run alone, and a signal
    ends both, with exit code 0 (`StopSignals`). Raises: UserError, for an error that the user can fix.
    """
    return opened_run(config, workdir, recipes.read, make_run, signals=signals, command=command)


def compile_only(config: Config) -> None:
    """Compiles the programs of a run into the cache, in all shapes that it may use, without a step."""
    # Each process has a workdir of its own.
    with TemporaryDirectory() as folder, opened_run(config, folder, recipes.read, make_run, shared=False) as run:
        session, parts = run
        compile_all(parts.programs(), session.log.say)


@contextmanager
def opened_run(
    config: Config,
    workdir: str | Path,
    read: Callable[[Config], Any],
    make: Callable[[Workplace, Any], Run],
    *,
    signals: bool = False,
    command: bool = False,
    shared: bool = True,
) -> Iterator[Run]:
    """Reads and checks a config, takes the workdir, and yields make(place, recipe): in this order.

    shared: all processes have the same workdir. For the others, see `build`. Raises: UserError.
    """
    config, workdir = with_names(config), Path(workdir)
    with at_work(workdir, signals=signals, command=command) as place:
        # First: the checks need the schedules' length.
        # The config is read as plain values, because its fields may refer to other fields.
        config.update_from_flattened_dict(workdirs.beginning(place.store.config, flatten(config.to_dict())))
        recipe = read(config)
        place.config = config.to_dict()
        if recipe.deterministic:  # must come before JAX initializes its devices
            compute_deterministically()
        place.take(type(recipe), shared=shared)
        run = make(place, recipe)
        if command:  # here all processes have loaded their data and models, for which there is no bound
            WATCHDOG.begin(recipe.health.hang_minutes, distributed.end)
        yield run


def load(place: Workplace, recipe: Recipe | SftRecipe, find: Callable[[], Path]) -> Inputs:
    """Loads and checks mesh, models and rows, in this order. find() -> folder of the model. Raises: UserError."""
    mesh, sampler_mesh = sharding.make_meshes(recipe.sampler_devices, **recipe.mesh)
    fit.check_batch_fits_mesh(recipe.sizes, mesh)
    folder = find()
    models = describe_models(recipe.model, recipe.adapters, recipe.other_paths, mesh, folder)
    model = models.model
    fit.check_router(recipe, model.cfg)
    fit.check_vision(recipe, model.cfg)
    tokenizer = encoding.on_day(hf.load_tokenizer(folder), recipe.data.today)
    settings = EpisodeSettings(env=recipe.env, turns=recipe.turns)
    environments = open_environments(settings, tokenizer, place.opened, recipe.data.chat_template_args)
    tools = environments.schemas if environments else []
    images = read_format(folder, min_pixels=recipe.data.min_pixels, max_pixels=recipe.data.max_pixels)
    dataset = data.load(recipe.data, tokenizer, tools, images)
    sets = data.load_eval_sets(recipe.eval_sets, recipe.data, tokenizer, tools, images)
    functions, episodes = recipe.reward.functions, environments is not None
    dataset, sets = columns.check_all(recipe.data, recipe.eval_sets, functions, dataset, sets, episodes=episodes)
    if environments:
        environments.check(data.all_rows(dataset, *sets.values()))
    fit.check_vocabulary(model.cfg, tokenizer, dataset, *sets.values())
    fit.check_positions(recipe, model.cfg, dataset, *sets.values())
    for name, other in models.others.items():
        cfg = hf.load_model(other, family=recipe.model.family).cfg
        fit.check_other_model(f"{name}.path", cfg, model.cfg, reads=dataset.image_sizes is not None)
        fit.check_positions(recipe, cfg, dataset, whose=f"those of config.{name}.path,")
    stop_ids = hf.stop_ids(folder, tokenizer)
    dataset = data.check_turn_end(dataset, tokenizer, recipe.data.template_args(tools), stop_ids)
    # Load now, to find wrong files before anything is written. A resumed run restores its parameters instead.
    # Only process 0 looks for a folder that may not be there yet: NFS would go on telling others that it is not.
    saved = distributed.first() and checkpoint.has_checkpoint(place.store.checkpoints)
    begins = recipe.model.path and not models.adapters and not distributed.exchange(saved)[0]
    first_params = [hf.load_params(folder, model, mesh, parts=models.parts)] if begins else []
    base = load_beside(models)
    book = place.opened.enter_context(closing(Book()))
    rows = tokenizer, dataset, sets, environments, tools, stop_ids
    inputs = Inputs(models, *rows, book, first_params, base, sampler_mesh)
    files = {f"the content of config.{field}": digest for field, digest in inputs.began_with.items()}
    agreement.check_alike({}, files)
    return inputs


def make_run(place: Workplace, recipe: Recipe) -> tuple[Session, Parts]:
    """Builds the session and the parts of a run of `train`. Raises: UserError."""
    inputs = load(place, recipe, partial(hf.find_checkpoint, recipe.model.path))
    models = inputs.models
    fit.check_sampling(recipe, models.model.cfg)
    in_trainer = recipe.chosen_engine.in_trainer
    fit.check_one_at_a_time(recipe, models.mesh)

    def load_other(name: str) -> Frozen:
        folder, on_host = models.others[name], recipe.host_memory.reference
        return load_frozen(name, folder, recipe.model, inputs.tokenizer, models.mesh, on_host=on_host)

    learning = make_learning(recipe, models, inputs.params, inputs.base, load_other)
    packing = make_packing(models, learning, inputs.book)
    sampler_mesh = inputs.sampler_mesh
    states, memory = learning.held(recipe.frozen, inputs.base), device_memory(sampler_mesh.local_devices[0])
    room = cache_memory(recipe, models, learning, sampler_mesh, states, memory)
    stream = stream_sizes(recipe, models, sampler_mesh, inputs.dataset.width, room) if in_trainer else None
    rows = banner.models_table(learning.scorers, learning.learners)
    terms = ["KL"] * bool(recipe.kl) + ["importance weights"] * recipe.weighs
    rows += banner.truncation_table(recipe.rollout.sampling, terms)
    rows += banner.sampler_table(sampler_mesh, recipe.sampler_devices)
    rows += banner.shapes_table(stream, packing.ladder.shapes)
    outputs = open_outputs(place, recipe, inputs, learning, rows, inputs.dataset.counts())
    actor = make_actor(place, recipe, inputs, room)
    reward = recipe.reward
    parts = Parts(
        actor,
        learning,
        packing,
        models.model,
        inputs.tokenizer,
        inputs.dataset,
        inputs.stop_ids,
        inputs.environments,
        inputs.book,
        partial(RewardFn, reward.functions, reward.weights, reward.timeout),
        self_test_facts(recipe, inputs.tools),
        make_evaluation(place, recipe, inputs),
        partial(inputs.export, place, learning.learners["policy"]),
        partial(run_programs, recipe, inputs, learning, packing, actor.engine),
    )
    session = outputs(parts)
    if recipe.health.self_test:
        parts.self_test = partial(run_self_test, session, parts)
    return session, parts


def run_self_test(session: Session, subject: Subject) -> None:
    """Runs the self-test of a new run, and tells what it finds. Stops nothing."""
    session.health.add(0, self_test.at_start(subject, session.at.states, session.log.say))


def make_learning(
    recipe: Recipe, models: Models, params: Callable[[], PyTree], base: PyTree, other: Callable[[str], Frozen]
) -> Learning:
    """Combines scorers, credit and learners.

    params() returns the policy's first parameters, if all of them learn; base: parameters beside its adapters.
    other(section) -> a model that never learns.
    """
    sizes, mesh, sampling, needed = recipe.sizes, models.mesh, recipe.rollout.sampling, recipe.columns
    learns = policy_parameters(models, params, base, recipe.seed)
    scorers = make_scorers(
        models.model, sampling, mesh, needed, at_once=sizes.at_once, exact=recipe.exact, base=learns.base
    )
    for name in recipe.frozen:
        scorers[name] = make_frozen_scorer(name, other(name), sizes.microbatch, sampling, mesh)
    aggregate = partial(losses.aggregation_weights, **recipe.aggregate)
    objective = update.policy_objective(
        models.model,
        recipe.loss,
        recipe.rollout.sampling,
        kl=recipe.kl_estimator("loss"),
        kl_weighted=recipe.kl_weighted,
        correct=recipe.importance_weights,
        off_policy=recipe.mask.off_policy,
    )
    policy = policy_learner(recipe, models, objective, learns)
    learners = {"policy": replace(policy, frozen_steps=sizes.critic_steps)}
    if critic := recipe.critic:
        shared = learns if models.adapters and not critic.path else None
        folder = models.others.get("critic", models.folder)
        learner, scorers["critic"] = make_critic(
            critic, recipe.model, folder, mesh, aggregate, sizes=sizes, shared=shared, lowers=recipe.lowers
        )
        learners = {"critic": learner} | learners  # first: it learns before the policy
    anchored = "ref_logprobs" in needed
    reference = make_reference(models, learners["policy"], learns, recipe.refresh) if anchored else None
    credit = make_credit(recipe.credit, mesh)
    charged, on_host = recipe.credit.kl is not None, recipe.host_memory
    return Learning(mesh, sampling, scorers, credit, charged, learners, reference, on_host, sizes, recipe.seed)


def policy_learner(recipe: Recipe | SftRecipe, models: Models, objective: Objective, learns: Parameters) -> Learner:
    """Builds the learner of an objective, for the parameters of the policy that learn."""
    return update.make_learner(
        objective,
        recipe.optimizer,
        mesh=models.mesh,
        microbatch=recipe.microbatch,
        aggregate=partial(losses.aggregation_weights, **recipe.aggregate),
        **learns._asdict(),
    )


def open_outputs(
    place: Workplace,
    recipe: Recipe | SftRecipe,
    inputs: Inputs,
    models: ModelStates,
    rows: Sequence[tuple[str, Any]],
    counts: list[int],
) -> Callable[[Trainer], Session]:
    """Opens the session of a run, whose checkpoints hold `models`, and prints the banner with `rows`.

    counts: numbers of rows of each source that the order of the data has. Raises: UserError.
    """
    mesh, cfg = inputs.models.mesh, inputs.models.model.cfg

    def announce(start: int, changes: Sequence[Change]) -> None:
        judged = advice.RunSettings(recipe, cfg.width, mesh.devices.flat[0].platform)
        banner.print_banner(
            f"jaxrl_llm.{recipe.program}: {place.store.name}",
            [
                *banner.model_and_data_table(recipe.model.path, mesh, cfg, recipe.sizes, recipe.data, inputs.dataset),
                *banner.problems_table(recipe.eval_sets, inputs.held_out),
                *banner.totals_table(recipe.sizes),
                *banner.beginning(start, recipe.num_steps, changes),
                *banner.rollback_table(recipe.health, recipe.checkpoint.every),
                *rows,
                *banner.adapters_table(inputs.models.adapters),
                ("compiled code", place.cache),
            ],
            # What is known to go wrong with these settings.
            lines=[
                *banner.shortened_warmups(recipe.warmups()),
                *banner.unconfined(recipe.reward),
                *map(Finding.line, advice.findings(judged)),
            ],
        )

    now = Rows({"data.source": counts} | inputs.eval_counts, inputs.dataset.prompts())
    return open_session(place, recipe.plan, models, mesh, inputs.began_with | place.code, now, announce)


def make_actor(place: Workplace, recipe: Recipe, inputs: Inputs, room: int) -> Actor:
    """Starts the engine and builds the actor. room: bytes that `cache_memory` returns."""
    dataset, opened, mesh = inputs.dataset, place.opened, inputs.models.mesh
    collate = partial(data.make_prompts, dataset, pad_id=inputs.tokenizer.pad_token_id)
    curriculum, iterator = drawn(dataset, collate, recipe.data, batch=recipe.prompts_per_step, seed=recipe.seed)
    reward = recipe.reward
    reward_fn = opened.enter_context(closing(RewardFn(reward.functions, reward.weights, reward.timeout)))
    engine = recipe.chosen_engine.start(
        EngineInputs(
            inputs.models.model,
            mesh,
            inputs.models.folder,
            place.workdir,
            inputs.width,
            recipe.rollout.max_completion_tokens,
            inputs.stop_ids,
            inputs.tokenizer.pad_token_id,
            recipe.sizes.sequences_per_step,
            room,
            recipe.observation_tokens,
            inputs.picture_limits,
            inputs.sampler_mesh,
        )
    )
    opened.enter_context(closing(engine))
    weight_check = None
    if engine.max_gap is not None:
        rows, bound = len(dataset.rows), engine.max_gap
        weight_check = WeightCheck(engine, inputs.models.model, mesh, collate, rows=rows, bound=bound)
    task = CompletionTask(inputs.tokenizer, reward_fn, inputs.environments)
    length = recipe.rollout.max_completion_tokens
    source = SampleSource(recipe.drawing, engine, iterator, collate, task, mesh, length)
    actor = Actor(
        engine,
        source,
        recipe.seed,
        lag=recipe.rollout.max_lag,
        last=recipe.num_steps,
        weight_check=weight_check,
        curriculum=curriculum,
        device=inputs.sampler_device,
    )
    return opened.enter_context(closing(actor))


def cache_memory(recipe: Recipe, models: Models, learning: Learning, mesh: Mesh, states: PyTree, memory: int) -> int:
    """Returns the bytes of a device that the cache of the in-JAX engine may take; 0: no bound is known.

    mesh: mesh of the engine; states: arrays in memory, or their shapes; memory: bytes of a device, 0 = unknown.
    """
    policy = learning.learners["policy"]
    params, in_int8 = policy.all_parameters(policy.shapes), recipe.chosen_engine.in_int8
    copy = copy_shapes(models.model, mesh, models.mesh, params, in_int8=in_int8)
    held = () if recipe.sampler_devices else resident(states, recipe.host_memory)
    return cache_bytes(memory, (copy, held), beside_learning=recipe.samples_beside_learning)


def stream_sizes(recipe: Recipe, models: Models, mesh: Mesh, width: int, room: int) -> StreamSizes:
    """Returns the sizes of a step's sampling by the in-JAX engine on its mesh, for prompts of this width.

    room: bytes that `cache_memory` returns.
    """
    choice, length, (prompts, enough) = recipe.chosen_engine, recipe.rollout.max_completion_tokens, recipe.sampled
    bounds: dict[str, Any] = dict(
        max_sequences=at_once(choice.max_sequences, enough * recipe.group_size),
        pages=choice.pages,
        cache_bytes=room,
        kind=page_kind(mesh, models.model.cfg, choice.cache_dtype)._replace(observation=recipe.observation_tokens),
    )
    return sizes_of(prompts, recipe.group_size, width, length, **bounds)


def self_test_facts(recipe: Recipe, tools: list[dict[str, Any]]) -> Facts:
    """Returns what the self-test needs to know of a recipe; tools: schemas that the chat template describes."""
    return Facts(
        dtype=recipe.model.dtype,
        gradient_dtype=recipe.optim.gradient_dtype,
        in_trainer=recipe.chosen_engine.in_trainer and not recipe.chosen_engine.rounds,
        own_samples=recipe.own_samples,
        credit=recipe.credit,
        loss=recipe.loss,
        reward=recipe.reward,
        env=recipe.env,
        template_args=recipe.data.template_args(tools),
    )


def run_programs(
    recipe: Recipe, inputs: Inputs, learning: Learning, packing: Packing, engine: Engine
) -> Iterator[Program]:
    """Yields all programs that a run may compile."""
    policy = learning.learners["policy"]
    if isinstance(engine, Sampler):
        for batch in sampled_batches(recipe, inputs):
            params = policy.all_parameters(policy.shapes)
            yield from engine.programs(params, **batch)
    shapes, dataset = packing.ladder.shapes, inputs.dataset
    yield from learning_programs(learning, shapes, dataset.width, recipe.credit.weights, dataset.image_sizes)


def sampled_batches(recipe: Recipe, inputs: Inputs) -> list[dict[str, Any]]:
    """Returns sizes and sampling of the batches that the engine samples, as arguments of `Sampler.programs`."""
    of = lambda rows: dict(width=rows.width, image_sizes=rows.image_sizes)  # noqa: E731
    prompts, greedy = of(inputs.dataset), dict(group=1, sampling=Sampling(0.0))
    drawn_as = dict(group=recipe.group_size, sampling=recipe.rollout.sampling)
    batches: list[dict[str, Any]] = [recipe.sampled._asdict() | prompts | drawn_as]
    if recipe.estimator.needs_greedy:
        batches.append(dict(prompts=recipe.prompts_per_step) | prompts | greedy)
    batches += [dict(prompts=len(problems.rows)) | of(problems) | greedy for problems in inputs.held_out.values()]
    return batches


def make_evaluation(
    place: Workplace, recipe: Recipe | SftRecipe, inputs: Inputs
) -> Callable[[Engine], dict[str, float]]:
    """Returns `evaluation(engine)` -> metrics of greedy completions on the evaluation sets that a function judges."""
    timeout, sequences = recipe.reward.timeout, recipe.sizes.sequences_per_step
    tasks = open_tasks(recipe.eval_sets, inputs.tokenizer, inputs.environments, timeout, place.opened)
    facts = dict(sequences=sequences, mesh=inputs.models.mesh, seed=recipe.seed)
    return partial(evaluate_sets, tasks=tasks, datasets=inputs.held_out, **facts)
