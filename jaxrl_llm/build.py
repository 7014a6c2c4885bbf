"""Builds the session and the parts of a run from its recipe. This module connects all other rooms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from jaxrl_llm import recipe as recipes
from jaxrl_llm.algorithms import losses
from jaxrl_llm.algorithms.credit import make_credit
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.config.load import flatten, with_names
from jaxrl_llm.data import columns, encoding
from jaxrl_llm.data import prompts as data
from jaxrl_llm.data.curriculum import drawn
from jaxrl_llm.data.image_format import read_format
from jaxrl_llm.health.finding import Finding
from jaxrl_llm.learner import update
from jaxrl_llm.learner.critic import make_critic
from jaxrl_llm.learner.learning import (
    Learning,
    Models,
    describe_models,
    device_states,
    load_frozen_base,
    make_packing,
    make_reference,
    policy_parameters,
)
from jaxrl_llm.learner.packing import Packing
from jaxrl_llm.learner.programs import compile_all, learning_programs
from jaxrl_llm.learner.scorers import FrozenModel, States, load_frozen, make_frozen_scorer, make_scorers
from jaxrl_llm.learner.update import Learner, LearnerParameters, Objective
from jaxrl_llm.machine import distributed, meshes
from jaxrl_llm.machine.compilation import Program, compute_deterministically
from jaxrl_llm.machine.distributed import agreement
from jaxrl_llm.machine.hang import WATCHDOG
from jaxrl_llm.machine.memory import device_memory
from jaxrl_llm.machine.shapes import ShapeCache
from jaxrl_llm.models import hf
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.recipe import advice, fit
from jaxrl_llm.recipe.recipe import Recipe, SftRecipe
from jaxrl_llm.rollout.actor import Actor, WeightLease
from jaxrl_llm.rollout.evaluation import evaluate_sets, open_tasks
from jaxrl_llm.rollout.grading import RewardFn
from jaxrl_llm.rollout.jax.cache_attention import page_kind
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.rollout.jax.sizes import StreamSizes, cache_bytes, sequence_limit, sizes_of
from jaxrl_llm.rollout.named_environments import Environments, open_environments
from jaxrl_llm.rollout.protocol import Engine, EngineInputs
from jaxrl_llm.rollout.samples import CompletionTask, SampleSource, open_agents
from jaxrl_llm.rollout.weight_check import WeightCheck
from jaxrl_llm.rollout.weights import copy_shapes
from jaxrl_llm.selftest import self_test
from jaxrl_llm.selftest.trial import RecipeSummary
from jaxrl_llm.session import banner, checkpoint
from jaxrl_llm.session import workdir as workdirs
from jaxrl_llm.session.changes import Rows
from jaxrl_llm.session.inputs import Inputs
from jaxrl_llm.session.opening import WorkDirectory, open_session, open_work_directory
from jaxrl_llm.session.session import ModelStates, Session
from jaxrl_llm.structs import Config, PyTree, StatefulPart

Run = TypeVar("Run")  # a pair of a session and the parts of its steps
COMPILE_ONLY = "compile all programs of the run into the compilation cache, and exit without training"


@dataclass(kw_only=True)
class Parts:
    """Everything that the training steps of one run of `train` need. `rl_step` and the session use it."""

    actor: Actor
    learning: Learning
    packing: Packing
    model: Decoder
    tokenizer: Any
    dataset: data.Dataset
    stop_ids: tuple[int, ...]
    environments: Environments | None  # None if every completion is one turn
    shape_cache: ShapeCache
    open_reward_fn: Callable[[], RewardFn]  # starts further reward processes for the self-test, which closes them
    recipe_summary: RecipeSummary
    evaluation: Callable[[Engine], dict[str, float]]  # engine -> metrics of all evaluation sets
    export: Callable[[States], None]  # writes the policy as a Hugging Face folder
    programs: Callable[[], Iterator[Program]]  # yields every program that the run may compile
    self_test: Callable[[], None] | None = None  # tests a new run; None if config.health.self_test is off

    @property
    def stateful_parts(self) -> Mapping[str, StatefulPart]:
        """Parts that a checkpoint holds besides the models' states: the shape cache, and the position in the data."""
        return {"shapes": self.shape_cache, checkpoint.SAMPLES: self.actor}

    def start(self, states: States, step: int, attempt: int) -> WeightLease:
        """Pushes the initial weights to the engine and returns their lease; training resumes after `step`."""
        return self.actor.start(states, self.learning.policy(states), step, attempt)

    def wait_until_idle(self) -> None:
        """Waits until the engine has received the last weights. Raises: UserError, if the engine has other weights."""
        self.actor.lease.reclaim()

    def unlearned_text(self) -> str:
        """Describes the groups in flight, from which no step learns if the run ends now; "" without such groups."""
        return self.actor.unlearned_text()

    def evaluate(self, states: States) -> dict[str, float]:
        """Returns the metrics of an evaluation by the engine, whose last pushed weights equal those of `states`."""
        self.actor.wait_for_weights()
        return self.evaluation(self.actor.engine)


def build(
    config: Config, workdir: str | Path, *, signals: bool = False, command: bool = False
) -> AbstractContextManager[tuple[Session, Parts]]:
    """Opens the run of `config` in `workdir`, and closes it on every exit from the block.

    An exception in the block, such as that of Ctrl-C, saves the run first, unless it is a UserError.
    signals: True if SIGTERM and a closed terminal raise KeyboardInterrupt (`SaveOnInterrupt`). command: True if the
    process exists for this run alone, so that a signal ends the process with exit code 0 (`StopSignals`).
    Raises: UserError, for an error that the user can fix.
    """
    return opened_run(config, workdir, recipes.read, make_run, signals=signals, command=command)


def compile_only(config: Config) -> None:
    """Compiles the programs of a run, in all shapes that it may use, into the compilation cache. Runs no step."""
    # Each process uses a temporary directory of its own as its work directory.
    with TemporaryDirectory() as folder, opened_run(config, folder, recipes.read, make_run, shared=False) as run:
        session, parts = run
        compile_all(parts.programs(), session.log.print_line)


@contextmanager
def opened_run(
    config: Config,
    workdir: str | Path,
    read: Callable[[Config], Any],
    make: Callable[[WorkDirectory, Any], Run],
    *,
    signals: bool = False,
    command: bool = False,
    shared: bool = True,
) -> Iterator[Run]:
    """Reads and checks a config, locks the work directory, and then yields make(work_directory, recipe).

    read(config) -> recipe. shared: True if all processes use the same work directory. signals, command: the arguments
    of `build`. Raises: UserError.
    """
    config, workdir = with_names(config), Path(workdir)
    with open_work_directory(workdir, signals=signals, command=command) as work_directory:
        # The initial values come first, because the checks need the length of the schedules. They are computed from
        # plain values, because a field of a config may refer to other fields.
        fields = flatten(config.to_dict())
        config.update_from_flattened_dict(workdirs.initial_values(work_directory.store.config, fields))
        recipe = read(config)
        work_directory.config = config.to_dict()
        if recipe.deterministic:  # must come before JAX initializes its devices
            compute_deterministically()
        work_directory.lock(type(recipe), shared=shared)
        run = make(work_directory, recipe)
        if command:  # the watchdog starts only now, because loading models and data may take any time
            WATCHDOG.start(recipe.health.hang_minutes, distributed.end)
        yield run


def load(work_directory: WorkDirectory, recipe: Recipe | SftRecipe, find: Callable[[], Path]) -> Inputs:
    """Makes the mesh, and loads and checks the models and rows of a run.

    find() -> folder of the policy's model. Raises: UserError, naming the config field that does not fit.
    """
    mesh, sampler_mesh = meshes.make_meshes(recipe.sampler_devices, **recipe.mesh)
    fit.check_batch_fits_mesh(recipe.sizes, mesh)
    folder = find()
    models = describe_models(recipe.model, recipe.adapters, recipe.other_paths, mesh, folder)
    model = models.model
    fit.check_router(recipe, model.cfg)
    fit.check_vision(recipe, model.cfg)
    tokenizer = encoding.on_day(hf.load_tokenizer(folder), recipe.data.today)
    environments = open_environments(
        recipe.episodes, tokenizer, work_directory.resources, recipe.data.chat_template_args
    )
    tools = environments.schemas if environments else []
    images = read_format(folder, min_pixels=recipe.data.min_pixels, max_pixels=recipe.data.max_pixels)
    prepare_rows = environments.prepare_rows if environments else list
    dataset = data.load(recipe.data, tokenizer, tools, images, prepare_rows)
    sets = data.load_eval_sets(recipe.eval_sets, recipe.data, tokenizer, tools, images, prepare_rows=prepare_rows)
    functions, episodes = recipe.reward.functions, bool(recipe.episodes.calls)
    if recipe.rl and recipe.rl.agents:
        fit.check_agents(recipe.rl, dataset)
        dataset = replace(dataset, width=recipe.data.max_prompt_tokens)  # because agents write longer prompts
    dataset, sets = columns.check_all(recipe.data, recipe.eval_sets, functions, dataset, sets, episodes=episodes)
    if environments:
        environments.check(data.all_rows(dataset, *sets.values()))
    fit.check_vocabulary(model.cfg, tokenizer, dataset, *sets.values())
    fit.check_positions(recipe, model.cfg, dataset, *sets.values())
    for name, other_folder in models.other_folders.items():
        cfg = hf.load_model(other_folder, family=recipe.model.family).cfg
        fit.check_other_model(f"{name}.path", cfg, model.cfg, has_images=dataset.sizes.images is not None)
        fit.check_positions(recipe, cfg, dataset, whose=f"those of config.{name}.path,")
    stop_ids = hf.stop_ids(folder, tokenizer)
    rl = recipe.rl
    agents = open_agents(
        rl and rl.agents,
        work_directory.resources,
        tokenizer=tokenizer,
        stop_ids=stop_ids,
        vocab_size=model.cfg.vocab_size,
        sampling=rl and rl.rollout.sampling,
        prompt_tokens=recipe.data.max_prompt_tokens,
        completion_tokens=recipe.rollout.max_completion_tokens,
        max_sequences=rl and rl.chosen_engine.max_sequences,
    )
    dataset = data.check_turn_end(dataset, tokenizer, recipe.data.template_args(tools), stop_ids)
    # A new run loads its parameters here, so that wrong files are found before anything is written. A resumed run
    # restores its parameters instead. Only process 0 looks for the checkpoint folder, because NFS caches a failed
    # lookup and would hide the folder from the other processes later.
    has_checkpoint = distributed.first() and checkpoint.has_checkpoint(work_directory.store.checkpoints)
    is_new_run = recipe.model.path and not models.adapters and not distributed.exchange(has_checkpoint)[0]
    inputs = Inputs(
        models=models,
        tokenizer=tokenizer,
        dataset=dataset,
        held_out=sets,
        environments=environments,
        agents=agents,
        tools=tools,
        stop_ids=stop_ids,
        shape_cache=work_directory.resources.enter_context(closing(ShapeCache())),
        first_params=[hf.load_params(folder, model, mesh, parts=models.parts)] if is_new_run else [],
        base=load_frozen_base(models),
        sampler_mesh=sampler_mesh,
    )
    file_hashes = {f"the content of config.{field}": digest for field, digest in inputs.input_hashes.items()}
    agreement.check_alike({}, file_hashes)
    return inputs


def make_run(
    work_directory: WorkDirectory, recipe: Recipe, start_actor: Callable[..., Actor] | None = None
) -> tuple[Session, Parts]:
    """Builds the session and the parts of a run of `train`.

    start_actor: called instead of `make_actor`, with the same arguments; None for `make_actor`. Raises: UserError.
    """
    inputs = load(work_directory, recipe, partial(hf.find_checkpoint, recipe.model.path))
    models = inputs.models
    fit.check_sampling(recipe, models.model.cfg)
    in_trainer = recipe.chosen_engine.in_trainer
    fit.check_one_at_a_time(recipe, models.mesh)
    fit.check_partial(recipe)

    def load_other(name: str) -> FrozenModel:
        folder, on_host = models.other_folders[name], recipe.host_memory.reference
        return load_frozen(name, folder, recipe.model, inputs.tokenizer, models.mesh, on_host=on_host)

    learning = make_learning(recipe, models, inputs.params, inputs.base, load_other)
    packing = make_packing(models, learning, inputs.shape_cache)
    sampler_mesh = inputs.sampler_mesh
    states, memory = (
        learning.all_device_arrays(recipe.frozen, inputs.base),
        device_memory(sampler_mesh.local_devices[0]),
    )
    cache_limit = cache_memory(
        recipe=recipe, models=models, learning=learning, mesh=sampler_mesh, states=states, memory=memory
    )
    # Agents call the engine with sizes of their own.
    has_stream = in_trainer and not recipe.agents
    stream = stream_sizes(recipe, models, sampler_mesh, inputs.dataset.width, cache_limit) if has_stream else None
    rows = banner.models_table(learning.scorers, learning.learners)
    terms = ["KL"] * bool(recipe.kl) + ["importance weights"] * recipe.weighs
    rows += banner.truncation_table(recipe.rollout.sampling, terms)
    rows += banner.sampler_table(sampler_mesh, recipe.sampler_devices)
    rows += banner.shapes_table(stream, packing.shape_policy.shapes)
    session = open_run_session(
        work_directory=work_directory,
        recipe=recipe,
        inputs=inputs,
        models=learning,
        banner_rows=rows,
        counts=inputs.dataset.counts(),
    )
    actor = (start_actor or make_actor)(work_directory, recipe, inputs, cache_limit)
    reward = recipe.reward
    parts = Parts(
        actor=actor,
        learning=learning,
        packing=packing,
        model=models.model,
        tokenizer=inputs.tokenizer,
        dataset=inputs.dataset,
        stop_ids=inputs.stop_ids,
        environments=inputs.environments,
        shape_cache=inputs.shape_cache,
        open_reward_fn=partial(RewardFn, reward.functions, reward.weights, reward.timeout),
        recipe_summary=summarize_recipe(recipe, inputs.tools),
        evaluation=make_evaluation(work_directory, recipe, inputs),
        export=partial(inputs.export, work_directory, learning.learners["policy"]),
        programs=partial(run_programs, recipe, inputs, learning=learning, packing=packing, engine=actor.engine),
    )
    session.trainer = parts
    if recipe.health.self_test:
        parts.self_test = partial(run_self_test, session, parts)
    return session, parts


def run_self_test(session: Session, parts: Parts) -> None:
    """Runs the self-test of a new run and reports its findings, which do not stop the run."""
    session.health.add(0, self_test.run_checks(parts, session.run_state.states, session.log.print_line))


def make_learning(
    recipe: Recipe, models: Models, params: Callable[[], PyTree], base: PyTree, load_other: Callable[[str], FrozenModel]
) -> Learning:
    """Builds the scorers, the credit assignment and the learners of a run.

    params() -> initial parameters of the policy, called only if all of them learn. base: frozen parameters under the
    policy's adapters, None without adapters. load_other(section) -> frozen model of a config section such as
    "reference".
    """
    sizes, mesh, sampling, needed_columns = recipe.sizes, models.mesh, recipe.rollout.sampling, recipe.columns
    trained_parameters = policy_parameters(models, params, base, recipe.seed)
    scorers = make_scorers(
        models.model,
        sampling,
        mesh,
        needed_columns,
        microbatch=sizes.at_once,
        exact=recipe.exact,
        base=trained_parameters.base,
    )
    for name in recipe.frozen:
        scorers[name] = make_frozen_scorer(name, load_other(name), sizes.microbatch, sampling, mesh)
    aggregate = partial(losses.aggregation_weights, **recipe.aggregate)
    objective = make_objective(recipe, models.model)
    policy = policy_learner(recipe, models.mesh, objective, trained_parameters)
    learners = {"policy": replace(policy, frozen_steps=sizes.critic_steps)}
    if critic := recipe.critic:
        shared_base = trained_parameters if models.adapters and not critic.path else None
        folder = models.other_folders.get("critic", models.folder)
        learner, scorers["critic"] = make_critic(
            critic,
            recipe.model,
            folder,
            mesh,
            aggregate,
            sizes=sizes,
            shared=shared_base,
            backoff=recipe.learning_rate_backoff,
        )
        learners = {"critic": learner} | learners  # learners update in this order: the critic before the policy
    has_reference = "ref_logprobs" in needed_columns
    reference = (
        make_reference(models, learners["policy"], trained_parameters, recipe.refresh) if has_reference else None
    )
    return Learning(
        mesh=mesh,
        sampling=sampling,
        scorers=scorers,
        assign_credit=make_credit(recipe.credit, mesh),
        kl_in_reward=recipe.credit.kl is not None,
        learners=learners,
        reference=reference,
        on_host=recipe.host_memory,
        sizes=sizes,
        seed=recipe.seed,
    )


def make_objective(recipe: Recipe, model: Decoder) -> Objective:
    """Builds the loss of the policy."""
    return update.policy_objective(
        model,
        recipe.loss,
        recipe.rollout.sampling,
        kl=recipe.kl_estimator("loss"),
        kl_weighted=recipe.kl_weighted,
        correct=recipe.importance_weights,
        off_policy=recipe.mask.off_policy,
    )


def policy_learner(
    recipe: Recipe | SftRecipe, mesh: Mesh, objective: Objective, trained_parameters: LearnerParameters
) -> Learner:
    """Builds the policy's learner. objective: loss to minimize. trained_parameters: parameters to optimize."""
    return update.make_learner(
        objective,
        recipe.optimizer,
        mesh=mesh,
        microbatch=recipe.microbatch,
        aggregate=partial(losses.aggregation_weights, **recipe.aggregate),
        **trained_parameters._asdict(),
    )


def build_policy_learner(recipe: Recipe, prompts: int) -> tuple[Learner, Decoder, Mesh]:
    """Builds the policy's learner and model without a run, on a mesh for batches of `prompts` prompts.

    Raises: UserError, if the model cannot be used.
    """
    mesh = meshes.make_mesh(data=1, fsdp=math.gcd(jax.device_count(), prompts, recipe.sizes.at_once), tensor=1)
    folder = hf.find_checkpoint(recipe.model.path)
    models = describe_models(recipe.model, recipe.adapters, {}, mesh, folder)
    load = partial(hf.load_params, folder, models.model, mesh, parts=models.parts)
    parameters = policy_parameters(models, load, load_frozen_base(models), recipe.seed)
    return policy_learner(recipe, mesh, make_objective(recipe, models.model), parameters), models.model, mesh


def open_run_session(
    work_directory: WorkDirectory,
    recipe: Recipe | SftRecipe,
    inputs: Inputs,
    models: ModelStates,
    banner_rows: Sequence[tuple[str, Any]],
    counts: list[int],
) -> Session:
    """Opens the session of a run and prints the banner. The caller sets `Session.trainer`.

    models: states that the checkpoints hold. banner_rows: further rows of the banner. counts: number of training rows
    of each source of the data. Raises: UserError.
    """
    mesh, cfg = inputs.models.mesh, inputs.models.model.cfg
    data_rows = Rows({"data.source": counts} | inputs.eval_counts, inputs.dataset.prompt_fingerprint())
    hashes = inputs.input_hashes | work_directory.code_hashes
    session, start, changes = open_session(
        work_directory=work_directory, plan=recipe.plan, models=models, mesh=mesh, input_hashes=hashes, rows=data_rows
    )
    if distributed.first():
        settings = advice.RunSettings(recipe, cfg.width, mesh.devices.flat[0].platform)
        banner.print_banner(
            f"jaxrl_llm.{recipe.program}: {work_directory.store.name}",
            [
                *banner.model_and_data_table(
                    path=recipe.model.path,
                    mesh=mesh,
                    model=cfg,
                    sizes=recipe.sizes,
                    settings=recipe.data,
                    dataset=inputs.dataset,
                ),
                *banner.problems_table(recipe.eval_sets, inputs.held_out),
                *banner.totals_table(recipe.sizes),
                *banner.start_table(start, recipe.num_steps, changes),
                *banner.rollback_table(recipe.health, recipe.checkpoint.every),
                *banner_rows,
                *banner.adapters_table(inputs.models.adapters),
                ("compiled code", work_directory.compilation_cache),
            ],
            lines=[
                *banner.shortened_warmups(recipe.warmups()),
                *banner.unconfined_warning(recipe.reward),
                *map(Finding.line, advice.findings(settings)),  # settings that are known to fail
            ],
        )
    return session


def make_actor(work_directory: WorkDirectory, recipe: Recipe, inputs: Inputs, cache_limit: int) -> Actor:
    """Starts the engine and builds the actor. cache_limit: bytes of `cache_memory`."""
    dataset, resources, mesh = inputs.dataset, work_directory.resources, inputs.models.mesh
    collate = partial(data.make_prompts, dataset, pad_id=inputs.tokenizer.pad_token_id)
    curriculum, iterator = drawn(dataset, collate, recipe.data, batch=recipe.prompts_per_step, seed=recipe.seed)
    reward = recipe.reward
    reward_fn = resources.enter_context(closing(RewardFn(reward.functions, reward.weights, reward.timeout)))
    engine = recipe.chosen_engine.start(
        EngineInputs(
            model=inputs.models.model,
            mesh=mesh,
            folder=inputs.models.folder,
            workdir=work_directory.workdir,
            max_prompt_tokens=inputs.width,
            max_completion_tokens=recipe.rollout.max_completion_tokens,
            stop_ids=inputs.stop_ids,
            pad_id=inputs.tokenizer.pad_token_id,
            sequences_per_step=recipe.sizes.sequences_per_step,
            cache_bytes=cache_limit,
            observation_tokens=recipe.observation_tokens,
            image_limits=inputs.image_limits,
            sampler_mesh=inputs.sampler_mesh,
        )
    )
    resources.enter_context(closing(engine))
    weight_check = None
    if engine.max_gap is not None:
        rows, bound = len(dataset.rows), engine.max_gap
        weight_check = WeightCheck(engine, inputs.models.model, mesh, collate, rows=rows, bound=bound)
    task = CompletionTask(
        inputs.tokenizer, reward_fn, inputs.environments, inputs.agents, keeps_turns=recipe.estimator.needs_turns
    )
    length = recipe.rollout.max_completion_tokens
    source = SampleSource(
        sampling_plan=recipe.sampling_plan,
        engine=engine,
        prompts=iterator,
        collate=collate,
        task=task,
        mesh=mesh,
        max_completion_tokens=length,
    )
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
    return resources.enter_context(closing(actor))


def cache_memory(recipe: Recipe, models: Models, learning: Learning, mesh: Mesh, states: PyTree, memory: int) -> int:
    """Returns how many bytes of each device the key-value cache of the in-JAX engine may use; 0 = unknown.

    mesh: device mesh of the engine. states: arrays of the trainer in device memory, or their shapes. memory: bytes of
    a device, 0 = unknown.
    """
    policy = learning.learners["policy"]
    params, in_int8 = policy.all_parameters(policy.shapes), recipe.chosen_engine.in_int8
    sampler_weights = copy_shapes(models.model, mesh, models.mesh, params, in_int8=in_int8)
    trainer_states = () if recipe.sampler_devices else device_states(states, recipe.host_memory)
    return cache_bytes(memory, (sampler_weights, trainer_states), beside_learning=recipe.samples_beside_learning)


def stream_sizes(recipe: Recipe, models: Models, mesh: Mesh, width: int, cache_limit: int) -> StreamSizes:
    """Returns the array sizes with which the in-JAX engine samples a step.

    mesh: device mesh of the engine. width: P, tokens of a padded prompt. cache_limit: bytes of `cache_memory`.
    """
    choice, length, (prompts, max_prompts) = recipe.chosen_engine, recipe.rollout.max_completion_tokens, recipe.sampled
    bounds: dict[str, Any] = dict(
        max_sequences=sequence_limit(choice.max_sequences, max_prompts * recipe.group_size),
        pages=choice.pages,
        cache_bytes=cache_limit,
        kind=page_kind(mesh, models.model.cfg, choice.cache_dtype)._replace(observation=recipe.observation_tokens),
    )
    return replace(sizes_of(prompts, recipe.group_size, width, length, **bounds), drafts=choice.drafts)


def summarize_recipe(recipe: Recipe, tools: list[dict[str, Any]]) -> RecipeSummary:
    """Returns the fields of a recipe that the self-test needs. tools: schemas that the chat template describes."""
    return RecipeSummary(
        dtype=recipe.model.dtype,
        gradient_dtype=recipe.optim.gradient_dtype,
        in_trainer=recipe.chosen_engine.in_trainer and not recipe.chosen_engine.is_rounded,
        own_samples=recipe.own_samples,
        credit=recipe.credit,
        loss=recipe.loss,
        reward=recipe.reward,
        environments=recipe.episodes.calls,
        template_args=recipe.data.template_args(tools),
    )


def run_programs(
    recipe: Recipe, inputs: Inputs, learning: Learning, packing: Packing, engine: Engine
) -> Iterator[Program]:
    """Yields every program that a run may compile, for `--compile-only`, except those for requests of agents."""
    policy = learning.learners["policy"]
    fit.warn_of_later_programs(recipe)
    if isinstance(engine, Sampler) and not recipe.agents:
        for batch in sampled_batches(recipe, inputs):
            params = policy.all_parameters(policy.shapes)
            yield from engine.programs(params, **batch)
    shapes, dataset = packing.shape_policy.shapes, inputs.dataset
    yield from learning_programs(learning, shapes, dataset.sizes, recipe.credit.weights)


def sampled_batches(recipe: Recipe, inputs: Inputs) -> list[dict[str, Any]]:
    """Returns sizes and sampling settings of each batch that the engine samples, as arguments of `Sampler.programs`."""
    training, greedy = dict(prompt_sizes=inputs.dataset.sizes), dict(group_size=1, sampling=Sampling(0.0))
    sampled = dict(group_size=recipe.group_size, sampling=recipe.rollout.sampling)
    batches: list[dict[str, Any]] = [recipe.sampled._asdict() | training | sampled]
    if recipe.estimator.needs_greedy:
        batches.append(dict(prompts=recipe.prompts_per_step) | training | greedy)
    for problems in inputs.held_out.values():
        batches.append(dict(prompts=len(problems.rows), prompt_sizes=problems.sizes) | greedy)
    return batches


def make_evaluation(
    work_directory: WorkDirectory, recipe: Recipe | SftRecipe, inputs: Inputs
) -> Callable[[Engine], dict[str, float]]:
    """Returns a function of the engine, which samples greedy completions for the evaluation sets and judges them.

    The function returns the metrics of all sets that have a reward function.
    """
    timeout = recipe.reward.timeout
    episodes = inputs.environments, inputs.agents
    tasks = open_tasks(recipe.eval_sets, inputs.tokenizer, *episodes, timeout, work_directory.resources)
    # A problem has one greedy completion, so a judge gets about as many completions as in a training step.
    max_problems = recipe.sizes.sequences_per_step
    settings = dict(max_problems=max_problems, mesh=inputs.models.mesh, seed=recipe.seed)
    return partial(evaluate_sets, tasks=tasks, datasets=inputs.held_out, **settings)
