"""Builds the parts of a run from its config. This module connects all other packages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grain
import jax
from jax.sharding import Mesh

from jaxrl_llm import tasks
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.config.names import with_names
from jaxrl_llm.config.schema import check_reach
from jaxrl_llm.data import columns, encoding, order
from jaxrl_llm.data import prompts as data
from jaxrl_llm.data.curriculum import Curriculum
from jaxrl_llm.learner.learning import Models, describe_models, make_learning, make_packing
from jaxrl_llm.learner.packing import minibatches
from jaxrl_llm.learner.programs import compile_all, of_learning
from jaxrl_llm.learner.scorers import FROZEN, States, load_frozen
from jaxrl_llm.learner.update import Learner
from jaxrl_llm.machine import distributed, sharding
from jaxrl_llm.machine.compilation import Compilations, Program, compute_deterministically, keep_compilations
from jaxrl_llm.machine.distributed import agreement
from jaxrl_llm.machine.hang import WATCHDOG
from jaxrl_llm.machine.shapes import Book
from jaxrl_llm.models import hf, hf_export, peft
from jaxrl_llm.recipe import checks, compatibility, settings
from jaxrl_llm.recipe.recipe import Recipe, read
from jaxrl_llm.rollout.actor import Actor
from jaxrl_llm.rollout.compaction import Slots, prompts_at_once, slot_shapes
from jaxrl_llm.rollout.environments import EnvironmentPool, open_environments
from jaxrl_llm.rollout.evaluation import evaluate, mean_score, whole_batches
from jaxrl_llm.rollout.grading import RewardFn
from jaxrl_llm.rollout.protocol import Engine, EngineInputs
from jaxrl_llm.rollout.sampler import Sampler
from jaxrl_llm.rollout.samples import CompletionTask, SampleSource
from jaxrl_llm.rollout.weight_check import WeightCheck
from jaxrl_llm.selftest.trial import Tested
from jaxrl_llm.session import alike, model_card, other_rows
from jaxrl_llm.session.banner import adapters_table, batch_table, models_table, print_banner, shapes_table, unconfined
from jaxrl_llm.session.checkpoint import Checkpoints, check_workdir, has_checkpoint, keep_beginning, open_workdir
from jaxrl_llm.session.health import Health
from jaxrl_llm.session.lock import Lock, locked
from jaxrl_llm.session.log import Log
from jaxrl_llm.session.other_rows import Rows
from jaxrl_llm.session.rollback import Rollbacks
from jaxrl_llm.session.run import Run
from jaxrl_llm.session.saved_run import model_folder
from jaxrl_llm.session.signals import Stop, stop_signals
from jaxrl_llm.structs import Config, PyTree, Totals


@dataclass(frozen=True)
class Loaded(Models):
    """The inputs of every run, loaded and checked before anything is written."""

    workdir: Path
    lock: Lock | None  # of the workdir, in the first process
    compilations: Compilations
    cache: str  # folder of compiled programs, or "off"
    tokenizer: Any
    dataset: data.Dataset
    held_out: data.Dataset  # evaluation problems; `dataset` itself if the run has no evaluation
    environments: EnvironmentPool | None  # None: a completion is one turn
    stop_ids: tuple[int, ...]
    book: Book  # the shapes of the run
    first_params: list[PyTree]  # the model's parameters, until `params` hands them out
    base: PyTree  # the parameters beside the adapters; None: all parameters learn
    opened: ExitStack  # closes everything that the run opens, in reverse order

    def params(self) -> PyTree:
        """Returns the model's parameters as its folder has them. Each call returns separate arrays."""
        return self.first_params.pop() if self.first_params else hf.load_params(self.folder, self.model, self.mesh)

    def export(self, policy: Learner, states: States) -> None:
        """Writes the policy as a Hugging Face folder with its model card, and its adapters as a folder of PEFT."""
        hf_export.save(self.workdir / "hf", policy.all_parameters(states["policy"]), self.folder)
        if distributed.first():
            model_card.write(self.workdir / "hf", model_card.card(self.workdir, self.config, self.began_with))
        if self.lora:
            peft.save(self.workdir / "adapter", states["policy"].params, self.lora, self.config.model.path)

    @cached_property
    def began_with(self) -> dict[str, str]:
        """Returns the hashes of the models and the data that must not change in a resumed run, by config field."""
        found = {"model.path": hf.fingerprint(self.folder), "data.source": self.dataset.fingerprint()}
        if self.config.eval.every:
            found["eval.source"] = self.held_out.fingerprint()
        if self.lora and self.config.lora.path:
            found["lora.path"] = peft.fingerprint(self.config.lora.path)
        return found | {f"{name}.path": hf.fingerprint(at) for name, at in self.others.items() if name in FROZEN}


@contextmanager
def build(config: Config, workdir: str | Path, *, signals: bool = False, command: bool = False) -> Iterator[Run]:
    """Opens the run of `config` in `workdir`, and closes it on every exit: the checkpoints last, then the lock.

    An exception in the block, as that of Ctrl-C, saves the run first, unless it is a UserError (`Interrupts`). signals:
    SIGTERM and a closed terminal raise KeyboardInterrupt. command: this process is for this run alone, and a signal
    ends both, with exit code 0 (`StopSignals`). Raises: UserError, for an error that the user can fix.
    """
    with ExitStack() as opened, stop_signals(opened, signals, command) as stop:
        opened.callback(WATCHDOG.close)
        run = make_run(load(config, workdir, opened, checks.check_train), stop)
        if command:  # here all processes have loaded their data and models, for which there is no bound
            WATCHDOG.begin(config.health.hang_minutes, distributed.end)
        yield run


COMPILE_ONLY = "compile the programs of the run into the cache of compiled code, in all its shapes, and end"


def compile_only(config: Config) -> None:
    """Compiles the programs of a run into the cache, in all shapes that it may use, without a step."""
    with TemporaryDirectory() as workdir, ExitStack() as opened, stop_signals(opened, False, False) as stop:
        loaded = load(config, workdir, opened, checks.check_train, shared=False)  # each process has one of its own
        run = make_run(loaded, stop)
        compile_all(run.programs(), run.log.say)


def load(
    config: Config, workdir: str | Path, opened: ExitStack, check: Callable[[Config], Totals], *, shared: bool = True
) -> Loaded:
    """Checks and loads config, workdir, mesh, model and data, in this order. Raises: UserError.

    shared: all processes have the same workdir.
    """
    config, workdir = with_names(config), Path(workdir)
    compilations, cache = opened.enter_context(closing(Compilations())), keep_compilations()
    keep_beginning(workdir, config)  # first: the checks need the schedules' length
    totals = check(config)
    if config.deterministic:  # must come before JAX initializes its devices
        compute_deterministically()
    alike.check(config)
    lock = None
    if distributed.first():
        check_workdir(workdir, config, checks.may_change(config))
        lock = opened.enter_context(locked(workdir))
    if shared:
        agreement.check_shared(workdir)
    mesh = sharding.make_mesh(**config.mesh)
    compatibility.check_batch_fits_mesh(config, mesh, totals.prompts_per_update)
    folder = opened.enter_context(model_folder(config))
    models = describe_models(config, totals, mesh, folder)
    model = models.model
    compatibility.check_router(config, model.cfg)
    tokenizer = encoding.on_day(hf.load_tokenizer(folder), config.data.today)
    environments = open_environments(config, tokenizer, opened, data.template_args_of(config, ()))
    tools = environments.schemas if environments else []
    dataset = data.load(config, tokenizer, tools)
    held_out = data.load_held_out(config, tokenizer, tools) if config.eval.every else dataset
    dataset, held_out = check_columns(config, dataset, held_out, episodes=environments is not None)
    if environments:
        environments.check([*dataset.rows, *held_out.rows])
    compatibility.check_vocabulary(model.cfg, tokenizer, dataset, held_out)
    compatibility.check_positions(config, model.cfg, dataset, held_out)
    for name, other in models.others.items():
        cfg = hf.load_model(other).cfg
        compatibility.check_other_model(f"{name}.path", cfg, model.cfg)
        compatibility.check_positions(config, cfg, dataset, whose=f"those of config.{name}.path,")
    stop_ids = hf.stop_ids(folder, tokenizer)
    # Load now, to find wrong files before anything is written. A resumed run restores its parameters instead.
    # Only process 0 looks for a folder that may not be there yet: NFS would go on telling others that it is not.
    resumes = distributed.exchange(distributed.first() and has_checkpoint(workdir / "checkpoints"))[0]
    begins = config.model.path and not models.lora and not resumes
    first_params = [hf.load_params(folder, model, mesh)] if begins else []
    base = peft.load_base(folder, model, mesh, models.lora) if models.lora else None
    loaded = Loaded(
        *vars(models).values(),
        workdir=workdir,
        lock=lock,
        compilations=compilations,
        cache=cache,
        tokenizer=tokenizer,
        dataset=dataset,
        held_out=held_out,
        environments=environments,
        stop_ids=stop_ids,
        book=opened.enter_context(closing(Book())),
        first_params=first_params,
        base=base,
        opened=opened,
    )
    files = {f"the content of config.{field}": digest for field, digest in loaded.began_with.items()}
    agreement.check_alike({}, files)
    return loaded


def check_columns(
    config: Config, dataset: data.Dataset, held_out: data.Dataset, *, episodes: bool
) -> tuple[data.Dataset, data.Dataset]:
    """Returns the training and the evaluation data with notes on rows that lack a column. Raises: UserError.

    Also asks once the servers that reward functions need.
    """
    if "completion_column" in config.data:
        dataset = columns.check_completions(dataset, config.data.completion_column, config.data.source)
    functions = config.reward.functions if "loss" in config else ()
    for function in functions:
        check_reach(function, tasks.REWARDS, "config.reward.functions")
    if config.eval.every:
        check_reach(config.eval.function, tasks.REWARDS, "config.eval.function")
    made = columns.check(dataset, functions, "data", episodes=episodes, convert=config.data.convert)
    if not config.eval.every:
        return made, made
    judge, convert = (config.eval.function,), config.eval.convert
    return made, columns.check(held_out, judge, "eval", episodes=episodes, convert=convert)


def make_run(given: Loaded, stop: Stop) -> Run:
    """Builds a run of `train`. Raises: UserError."""
    config, mesh, model = given.config, given.mesh, given.model
    recipe = read(config, given.totals)
    compatibility.check_sampling(config, model.cfg)
    compatibility.check_one_at_a_time(mesh, in_trainer=recipe.engine.in_trainer, max_lag=config.rollout.max_lag)
    frozen = {
        name: load_frozen(name, folder, config, given.tokenizer, mesh)
        for name, folder in given.others.items()
        if name in FROZEN
    }
    learning = make_learning(
        given,
        given.params,
        frozen,
        given.base,
        credit=recipe.credit,
        own_samples=recipe.own_samples,
        exact=recipe.exact,
    )
    packing = make_packing(given, learning, given.book)
    slots = decode_shapes(config, mesh, recipe.engine.max_sequences) if recipe.engine.in_trainer else []
    rows = [*models_table(learning.scorers, learning.learners), *shapes_table(slots, packing.ladder.shapes)]
    outputs = open_outputs(given, learning.states(), rows)
    greedy = recipe.credit.estimator.needs_greedy
    actor, policy = make_actor(given, recipe, learning.sampling), learning.learners["policy"]
    evaluation = make_evaluation(given)

    def programs() -> Iterator[Program]:
        if isinstance(actor.engine, Sampler):
            for batch in batches(given, learning.sampling, greedy=greedy):
                yield from actor.engine.programs(
                    policy.all_parameters(policy.shapes), **batch, episodes="env" in config
                )
        yield from of_learning(
            config, mesh, learning, packing.ladder.shapes, given.dataset.width, recipe.credit.weights
        )

    def accuracy(states: States) -> float:
        actor.wait()  # until the engine has the latest weights
        return evaluation(actor.engine)

    return Run(
        config=config,
        mesh=mesh,
        actor=actor,
        scorers=learning.scorers,
        learners=learning.learners,
        shapes=learning.states(),
        stop=stop,
        assign_credit=learning.assign_credit,
        minibatches=lambda step: list(minibatches(config, step)),
        reference=learning.reference,
        accuracy=accuracy,
        problems=len(given.held_out.rows),
        export=partial(given.export, policy),
        compilations=given.compilations,
        programs=programs,
        book=given.book,
        packing=packing,
        tested=make_tested(given, recipe, learning.sampling, actor),
        **outputs,
    )


def make_tested(given: Loaded, recipe: Recipe, sampling: Sampling, actor: Actor) -> Tested:
    """Returns what the self-test needs of a run."""
    reward, timeout = given.config.reward, given.config.reward.timeout
    reward_fn = partial(RewardFn, reward.functions, reward.weights, timeout, field="config.reward.timeout")
    of_run = given.model, given.tokenizer, given.dataset, given.stop_ids
    return Tested(
        actor,
        *of_run,
        sampling,
        given.environments,
        reward_fn,
        credit=recipe.credit,
        in_trainer=recipe.engine.in_trainer,
        own_samples=recipe.own_samples,
    )


def open_outputs(
    given: Loaded, shapes: States, rows: Sequence[tuple[str, Any]], examples: int | None = None
) -> dict[str, Any]:
    """Opens the checkpoints of `shapes`, the log and the health rules of a run, and prints the banner with `rows`.

    examples: number of rows that the order of the data has, if it leaves some out.
    Raises: UserError, if model or data differ from those at the run's start, or the disk has no room.
    """
    config, workdir, opened = given.config, given.workdir, given.opened
    where = workdir / "checkpoints", given.began_with, config.checkpoint, given.mesh
    counts = given.dataset.counts() if examples is None else [examples]
    of_run = Rows({"data.source": counts, "eval.source": given.held_out.counts()}, given.dataset.prompts())
    checkpoints = opened.enter_context(closing(Checkpoints(*where, of_run)))
    start, changes = checkpoints.check_beginning(config)
    if distributed.first():
        checkpoints.check_room(shapes)
        open_workdir(workdir, config)
        other_rows.write(workdir, changes)
        derived = batch_table(config, given.totals, given.mesh, given.model.cfg, given.dataset, given.held_out, start)
        judged = config, given.totals, given.model.cfg.width, given.mesh.devices.flat[0].platform
        print_banner(
            f"jaxrl_llm.{'train' if 'loss' in config else 'sft'}: {workdir}",
            [
                *derived,
                *(("", f"{change}: accepted") for change in changes),
                *rows,
                *adapters_table(given.lora),
                ("compiled code", given.cache),
            ],
            lines=[*unconfined(config), *(x.line() for x in settings.findings(settings.RunSettings(*judged)))],
        )
    log = opened.enter_context(closing(Log(workdir, config)))
    health = Health(workdir, config.health.to_dict(), log.tell)
    return dict(
        workdir=workdir, lock=given.lock, checkpoints=checkpoints, log=log, health=health, rollbacks=Rollbacks(workdir)
    )


def make_actor(given: Loaded, recipe: Recipe, sampling: Sampling) -> Actor:
    """Starts the engine and builds the actor."""
    config, dataset, opened = given.config, given.dataset, given.opened
    collate = partial(data.make_prompts, dataset, pad_id=given.tokenizer.pad_token_id)
    curriculum, iterator = make_order(config, dataset, collate)
    reward_fn = open_reward_fn(given, config.reward.functions, config.reward.weights)
    engine = opened.enter_context(closing(recipe.engine.start(engine_inputs(given))))
    weight_check = None
    if engine.max_gap is not None:
        rows, bound = len(dataset.rows), engine.max_gap
        weight_check = WeightCheck(engine, given.model, given.mesh, collate, rows=rows, bound=bound)
    task = CompletionTask(given.tokenizer, reward_fn, given.environments)
    greedy = recipe.credit.estimator.needs_greedy
    source = SampleSource(config, engine, sampling, iterator, collate, task, given.mesh, greedy=greedy)
    actor = Actor(
        engine,
        source,
        jax.random.key(config.seed),
        book=given.book,
        lag=config.rollout.max_lag,
        last=config.num_steps,
        weight_check=weight_check,
        curriculum=curriculum,
    )
    return opened.enter_context(closing(actor))


def make_order(
    config: Config, dataset: data.Dataset, collate: order.Collate
) -> tuple[Curriculum | None, grain.DatasetIterator]:
    """Returns the curriculum of a run, if it has one, and the iterator over its batches of prompts."""
    size, batch, skip = len(dataset.rows), config.prompts_per_step, config.data.curriculum.skip
    if not skip and not dataset.parts:
        return None, order.iterate(size, batch, config.seed, collate)
    curriculum = Curriculum(size, skip, config.seed) if skip else None
    parts = dataset.parts or {"all": range(size)}
    weights = {name: config.data.mixture[name].weight if dataset.parts else 1.0 for name in parts}
    draws = curriculum.draws if curriculum else None
    return curriculum, order.mix(parts, weights, batch, config.seed, collate, draws)


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


def decode_shapes(config: Config, mesh: Mesh, max_sequences: int) -> list[Slots]:
    """Returns the shapes in which the JAX sampler may decode, the largest first."""
    group, devices = config.group_size, sharding.prompt_shards(mesh)
    prompts = prompts_at_once(config.prompts_per_step, group, devices, max_sequences)
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
    task = CompletionTask(given.tokenizer, reward_fn, given.environments)
    batch = whole_batches(given.totals.sequences_per_step, len(given.held_out.rows), given.mesh)
    key = jax.random.key(config.seed)
    return lambda engine: mean_score(evaluate(engine, given.held_out, task, batch=batch, key=key))


def open_reward_fn(given: Loaded, functions: tuple[str, ...], weights: tuple[float, ...]) -> RewardFn:
    """Opens a RewardFn for these functions. It closes when the run ends."""
    timeout = given.config.reward.timeout
    return given.opened.enter_context(
        closing(RewardFn(functions, weights, timeout=timeout, field="config.reward.timeout"))
    )
