"""Recipes: a config as a frozen record, with the facts that follow from it.

Only build.py, the programs and the tools see a whole recipe. All other modules get the record of their own section.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar

from jaxrl_llm import tasks
from jaxrl_llm.algorithms import advantages, kl, losses, supervised
from jaxrl_llm.algorithms.advantages import Estimator
from jaxrl_llm.algorithms.credit import Credit, lambda_returns
from jaxrl_llm.algorithms.importance import ImportanceFn, make_importance_weights
from jaxrl_llm.config.names import own_name, required_inputs
from jaxrl_llm.config.records import Call, KeywordArguments
from jaxrl_llm.config.schema import AtLeastOne, Count, Field, MayChange
from jaxrl_llm.data.settings import DataSettings, EvalSet, EvalSettings, SourceSettings
from jaxrl_llm.learner import optim
from jaxrl_llm.learner import settings as learner
from jaxrl_llm.learner.optim import Coefficient, LearningRateBackoff, Optimizer, make_optimizer
from jaxrl_llm.machine.meshes import make_mesh
from jaxrl_llm.models import adapter_kinds
from jaxrl_llm.models.settings import GroupModelSettings, ModelSettings, NewModelSettings
from jaxrl_llm.rollout import engines
from jaxrl_llm.rollout.environments import EnvironmentPool
from jaxrl_llm.rollout.named_environments import EpisodeSettings, NamedEnvironmentSettings
from jaxrl_llm.rollout.protocol import EngineChoice
from jaxrl_llm.rollout.samples import SampledGroups, SamplingPlan
from jaxrl_llm.rollout.settings import JudgeSettings, LengthSettings, RewardSettings, RolloutSettings
from jaxrl_llm.session import settings as session
from jaxrl_llm.structs import Array, Sizes
from jaxrl_llm.tasks.agents import AgentSettings

TURN_CHANNELS = "environment.reward", "agents.reward"  # reward functions that add up the rewards of turns
WEIGHTED_SUFFIX = "_weighted"  # suffix of KL estimators that are multiplied by pi / pi_old
# The share stays below 1, so that a skipped prompt is sampled again from time to time, and may have a signal then.
SkipShare = Annotated[float, Field(float, low=0, high=0.95, exclusive=True)]


@dataclass(frozen=True, kw_only=True)
class CurriculumSettings:
    """The section `data.curriculum`: how often a run skips prompts whose completions all had the same reward."""

    skip: SkipShare


@dataclass(frozen=True, kw_only=True)
class PromptsSettings(DataSettings):
    """The section `data` of `train`."""

    mixture: dict[str, SourceSettings] = field(default_factory=dict)
    """Several sources instead of data.source, which must then be "". Each has a name and the fields of this example:
    c.data.mixture.math = ConfigDict(dict(source="math.parquet", convert="", weight=2.0)). Prompts are drawn in
    proportion to the weights.
    """
    curriculum: CurriculumSettings | None = None
    """Curriculum that skips prompts without signal. dict(skip=0.9): probability to skip a prompt whose completions all
    had the same reward at its last visit. None: no curriculum.
    """
    order_column: str = ""
    """Column of numbers, such as a difficulty, that sorts the prompts of an epoch, smallest first. In a mixture each
    source is sorted. "": prompts are shuffled.
    """

    @property
    def skip(self) -> float:
        """Probability of skipping a prompt without signal; 0 if the run has no curriculum."""
        return self.curriculum.skip if self.curriculum else 0.0


@dataclass(frozen=True, kw_only=True)
class ExamplesSettings(DataSettings):
    """The section `data` of `sft`."""

    completion_column: str = field()
    rejected_column: str = ""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The sections that `train` and `sft` share. configs/grpo.py explains each field."""

    seed: Annotated[int, Field(int, low=0, high=2**31 - 1)]
    """Random seed of the order of prompts and of sampling."""
    deterministic: MayChange[bool]
    """True: on a GPU, use only operations that repeat bit for bit; their cost in speed is not measured. A CPU always
    repeats bit for bit.
    """
    num_steps: MayChange[AtLeastOne]
    """Training steps; each step samples one rollout of prompts_per_step prompts and learns from it."""
    schedule_steps: Count
    """Steps that warm-up and decay cover; 0: num_steps. A resumed run keeps its first value."""
    prompts_per_step: AtLeastOne
    """B: prompts in a rollout."""
    microbatch: MayChange[Count]
    """Prompts in memory at once during an update; 0: all. It saves memory and changes no gradient."""
    model: ModelSettings
    data: DataSettings
    reward: JudgeSettings
    aggregate: Annotated[KeywordArguments, losses.aggregation_weights]
    rollout: LengthSettings
    optim: Annotated[KeywordArguments, make_optimizer]
    """AdamW optimizer of the policy."""
    mesh: Annotated[KeywordArguments, make_mesh]
    """Number of devices on each axis of the mesh; -1: all that are left. Devices of engine.devices are not in the mesh.
    """
    health: session.HealthSettings
    checkpoint: session.CheckpointSettings
    log: session.LogSettings
    eval: EvalSettings | None = None
    """Greedy evaluation during the run; None: no evaluation."""
    router: learner.RouterSettings | None = None
    adapters: Annotated[Call, adapter_kinds] | None = None

    program: ClassVar[str]
    env: Call | None = field(default=None, init=False)
    turns: KeywordArguments | None = field(default=None, init=False)
    environments: dict[str, NamedEnvironmentSettings] = field(default_factory=dict, init=False)

    @property
    def episodes(self) -> EpisodeSettings:
        """The sections about episodes."""
        return EpisodeSettings(env=self.env, turns=self.turns, environments=self.environments)

    @property
    def rl(self) -> Recipe | None:
        """This recipe if the program is `train`; None if it is `sft`."""
        return None

    @property
    def new_width(self) -> int | None:
        """Width of a new model; None if the run starts from a trained one."""
        return None

    @property
    def sampler_devices(self) -> int:
        """Number of devices, on all hosts, that only the sampler uses."""
        return 0

    @property
    def other_paths(self) -> dict[str, str]:
        """Folders or hub ids of all models except the policy, by section; "" if a section names no model."""
        return {}

    @property
    def eval_sets(self) -> dict[str, EvalSet]:
        """Evaluation sets, by their sections of the config; {} if the run evaluates nothing."""
        return self.eval.sets if self.eval else {}

    @property
    def plan(self) -> session.Plan:
        """Schedule of the session: steps, evaluations, rollbacks, checkpoints and logs."""
        evaluate_every, patience = (self.eval.every, self.eval.patience) if self.eval else (0, 0)
        most_rollbacks = self.health.rollback.most if self.health.rollback else 0
        return session.Plan(
            steps=self.num_steps,
            evaluate_every=evaluate_every,
            patience=patience,
            most_rollbacks=most_rollbacks,
            checkpoint=self.checkpoint,
            health=self.health,
            log=self.log,
        )

    @property
    def scheduled_steps(self) -> int:
        """Number of steps that warm-up and decay cover."""
        return self.schedule_steps or self.num_steps

    def _sizes(self, **sizes: Any) -> Sizes:
        """Returns the sizes of a step: the fields that `train` and `sft` share, and `sizes`, which only one has."""
        without_warmup = Sizes(
            prompts_per_step=self.prompts_per_step,
            max_completion_tokens=self.rollout.max_completion_tokens,
            microbatch=self.microbatch,
            steps=self.num_steps,
            scheduled_steps=self.scheduled_steps,
            **sizes,
        )
        return replace(without_warmup, warmup_steps=warmup_steps(self.optim, without_warmup.scheduled_updates))

    @property
    def router_coefficients(self) -> dict[str, Coefficient]:
        """Coefficient of the load-balance loss, by its metric; {} if the run has no such loss."""
        if not self.router or self.router.balance_coef <= 0:
            return {}
        return {"router/balance_coef": optim.constant(self.router.balance_coef)}


@dataclass(frozen=True, kw_only=True)
class SftRecipe(Settings):
    """A checked `sft` config: settings and derived facts, without devices, data and weights."""

    model: NewModelSettings
    data: ExamplesSettings
    loss: Annotated[Call, supervised]

    program: ClassVar[str] = "sft"

    @property
    def new_width(self) -> int | None:
        """Width of a new model; None if the run starts from a trained one."""
        return None if self.model.path else self.model.hidden_size

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes of a step. An example counts as a prompt with one completion, or with two of a preference pair."""
        group = len(self.data.completion_columns)
        return self._sizes(prompts_per_update=self.prompts_per_step, group_size=group, samples=group)

    def warmups(self) -> dict[str, tuple[int, int]]:
        """Returns {section: (warm-up steps in the config, warm-up steps of the run)}; a short run has fewer."""
        return {"optim": (self.optim.warmup_steps, self.sizes.warmup_steps)}

    @property
    def loss_columns(self) -> tuple[str, ...]:
        """Score columns that the loss needs, such as ref_logprobs: its arguments after `logprobs` and `batch`."""
        return required_inputs(self.loss.function)[2:]

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer of the model, with the coefficients of its loss."""
        return make_optimizer(self.sizes.scheduled_updates, coefficients=self.router_coefficients, **self.optim)


@dataclass(frozen=True, kw_only=True)
class Recipe(Settings):
    """A checked `train` config: settings and derived facts, without devices, data and weights."""

    group_size: AtLeastOne
    """G: completions per prompt."""
    prompts_per_update: AtLeastOne
    """Prompts of the rollout in one update."""
    epochs: AtLeastOne
    """Passes over a rollout, so that it has B / prompts_per_update x epochs updates."""
    model: GroupModelSettings
    data: PromptsSettings
    reward: RewardSettings
    rollout: RolloutSettings
    health: session.ActingHealthSettings
    log: session.SamplesLogSettings
    advantage: Annotated[Call, advantages]
    """Advantage estimator: name is a function of jaxrl_llm.algorithms.advantages, or my.module.function; the other
    fields are its arguments. normalize: standard deviation that divides the advantages: group | batch | none. epsilon:
    number that is added to this deviation.
    """
    loss: Annotated[Call, losses]
    """Loss: name is a function of jaxrl_llm.algorithms.losses, or my.module.function; the other fields are its
    arguments. The importance ratio is clipped to 1 - clip_low ... 1 + clip_high. delta: upper bound of the ratio for A
    < 0; 0: no bound. With one update per rollout, as here, the ratio is 1 and nothing is clipped.
    """
    engine: Annotated[Call, engines]
    """Rollout engine: name is jax, vllm (configs/grpo_vllm.py explains its fields) or my.module.function; the other
    fields are its arguments. devices: number of devices, over all hosts, that only sample; mesh covers the other
    devices. With rollout.max_lag = 1 they sample the next batch while the others learn (docs/performance.md). 0:
    sampling and learning share all. max_sequences: completions that hold pages of the key-value cache at once; the
    others wait. 0: no limit but pages. pages: pages of 64 tokens (128 on a TPU) on each device. If none is free, the
    youngest completion is recomputed later. 0: as many as completions of the largest length need, and as fit into the
    memory of an accelerator. weights: dtype of the sampler's weights. int8: half the memory of bfloat16, with one scale
    per output of a kernel; importance weights correct for the rounding. "": the model's dtype. cache: dtype of keys and
    values. int8: about half the memory of bfloat16, with one scale per token and head. "": the model's dtype. drafts:
    most tokens that a pass through the model verifies in advance, guessed from other completions of the prompt. They
    change no token. Only decode programs for few completions have drafts. 0: none.
    """
    importance: Annotated[KeywordArguments, make_importance_weights]
    """Importance weights pi_old / pi_sampler, for tokens that another engine or older weights sampled. level: what gets
    one weight: token | sequence | geometric (geometric mean of a sequence). action: none | truncate (to high) | mask
    (to 0 outside low ... high) | auto (truncate if there are such tokens, else none).
    """
    mask: learner.MaskSettings = field(default_factory=learner.MaskSettings)
    host_memory: learner.HostMemory = field(default_factory=learner.HostMemory)
    """True: keep arrays in the host's memory while no program uses them. reference: parameters of the reference and of
    teachers. optimizer: the two means of AdamW.
    """
    kl: learner.KlSettings | None = None
    """KL penalty to the reference model; None: no penalty and no reference model."""
    entropy: learner.EntropySettings | None = None
    """Entropy bonus. dict(coef=1e-3): its coefficient, at the start. With adaptive=dict(target=0.3, step=1e-4,
    most=5e-3) in it, the coefficient grows by `step` after an update with entropy at or below the target, else shrinks
    by `step`, within 0 and `most`. None: no bonus.
    """
    critic: learner.CriticSettings | None = None
    teachers: dict[str, learner.FrozenSettings] = field(default_factory=dict)
    reward_model: learner.RewardModelSettings | None = None
    env: Annotated[Call, tasks.ENVIRONMENTS] | None = None
    turns: Annotated[KeywordArguments, EnvironmentPool] | None = None
    environments: dict[str, NamedEnvironmentSettings] = field(default_factory=dict)
    """Several environments instead of env and turns, as dict(NAME=dict(env=..., turns=...)). The column `environment`
    of a row names the one that answers it.
    """

    program: ClassVar[str] = "train"

    @cached_property
    def agents(self) -> AgentSettings | None:
        """Settings of the agents that call the policy; None if the run has no agents."""
        return self.env() if self.env and tasks.owns_loop(self.env.function) else None

    @property
    def observation_tokens(self) -> int:
        """Largest token limit of one observation of an environment; 0 if the run has no environment."""
        return max((section.turns["observation_tokens"] for section in self.episodes.sections().values()), default=0)

    @property
    def rl(self) -> Recipe | None:
        """This recipe, because `train` has rollouts."""
        return self

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes of a step."""
        return self._sizes(
            group_size=self.group_size,
            prompts_per_update=self.prompts_per_update,
            epochs=self.epochs,
            critic_steps=optim.fit_warmup(self.critic.warmup_steps, self.scheduled_steps) if self.critic else 0,
            critic=self.critic is not None,
            samples=self.group_size * (1 + self.rollout.resample_rounds) + self.estimator.needs_greedy,
        )

    def warmups(self) -> dict[str, tuple[int, int]]:
        """Returns {section: (warm-up steps in the config, warm-up steps of the run)}; a short run has fewer."""
        warmups = {"optim": (self.optim.warmup_steps, self.sizes.warmup_steps)}
        if critic := self.critic:
            run_steps = warmup_steps(critic.optim, self.updates_per_rollout * self.scheduled_steps, "critic.optim")
            warmups |= {"critic.optim": (critic.optim.warmup_steps, run_steps)}
            warmups |= {"critic": (critic.warmup_steps, self.sizes.critic_steps)}
        return warmups

    @property
    def updates_per_rollout(self) -> int:
        """Number of optimizer steps on one rollout."""
        return self.prompts_per_step // self.prompts_per_update * self.epochs

    @cached_property
    def estimator(self) -> Estimator:
        """Advantage estimator, with its arguments."""
        function = self.advantage.function
        return Estimator(own_name(function, advantages), self.advantage, required_inputs(function))

    @cached_property
    def chosen_engine(self) -> EngineChoice:
        """Engine that the section `engine` names. Raises: UserError, if the section does not fit the engine."""
        return self.engine()

    @property
    def sampler_devices(self) -> int:
        """Number of devices, on all hosts, that only the sampler uses; 0 if sampler and trainer share devices."""
        return self.chosen_engine.devices

    @property
    def samples_beside_learning(self) -> bool:
        """Whether the same devices may sample and learn at the same time."""
        return self.rollout.max_lag > 0 and not self.sampler_devices

    @property
    def own_samples(self) -> bool:
        """Whether the sampling weights equal the weights at the start of the step bit for bit."""
        engine, rollout = self.chosen_engine, self.rollout
        return engine.in_trainer and not (engine.is_rounded or rollout.max_lag or rollout.partial)

    @property
    def sampled(self) -> SampledGroups:
        """Numbers of groups on which the engine works at once, and of groups in a batch of the step."""
        groups_per_step, partial_groups = self.prompts_per_step, self.rollout.partial
        if not partial_groups:
            return SampledGroups(groups_per_step)
        return SampledGroups(groups_per_step + partial_groups, groups_per_step)

    @property
    def exact(self) -> bool:
        """Whether sampler and trainer compute equal log-probabilities, to the rounding of float32."""
        return self.own_samples and self.model.dtype == "float32"

    @property
    def frozen(self) -> dict[str, learner.FrozenSettings]:
        """Settings of the models that score and never learn (teachers, reward model), by section."""
        teachers = {f"teachers.{name}": teacher for name, teacher in self.teachers.items()}
        return teachers | ({"reward_model": self.reward_model} if self.reward_model else {})

    @property
    def other_paths(self) -> dict[str, str]:
        """Folders or hub ids of all models except the policy, by section; "" if a section names no model."""
        critic = {"critic": self.critic.path} if self.critic else {}
        return critic | {name: section.path for name, section in self.frozen.items()}

    @property
    def loss_columns(self) -> tuple[str, ...]:
        """Score columns that the loss needs, such as ref_logprobs: its arguments after `logprobs` and `batch`."""
        return required_inputs(self.loss.function)[2:]

    @property
    def columns(self) -> set[str]:
        """Columns that estimator, loss and penalties need: score columns, and other inputs of the estimator."""
        # Each key is a score column, and its value says whether this recipe needs the column.
        needs = {
            # If a rollout has a single update, the update uses its own log-probabilities as the old ones.
            "old_logprobs": self.updates_per_rollout > 1 or self.kl_estimator("reward") is not None,
            "ref_logprobs": self.kl is not None,
            "entropy": self.mask.top_entropy < 1,
        }
        needed_columns = (column for column, is_needed in needs.items() if is_needed)
        return {*self.estimator.inputs, *self.loss_columns, *needed_columns}

    @property
    def sampling_plan(self) -> SamplingPlan:
        """Sampling settings of a step: group size, distribution, and the rounds that replace groups without a signal.

        `greedy` adds one greedy completion per prompt, which some advantage estimators compare with the group.
        """
        rollout = self.rollout
        return SamplingPlan(
            group_size=self.group_size,
            sampling=rollout.sampling,
            resample_rounds=rollout.resample_rounds,
            greedy=self.estimator.needs_greedy,
            masks_truncated=self.mask.truncated,
            partial=rollout.partial,
            max_age=rollout.max_age,
        )

    def kl_estimator(self, placement: str) -> Callable[[Array, Array], Array] | None:
        """Returns the estimator of the KL penalty in the "loss" or the "reward"; None if no penalty is placed there."""
        is_placed = self.kl is not None and self.kl.placement == placement
        return getattr(kl, self.kl.estimator.removesuffix(WEIGHTED_SUFFIX)) if self.kl and is_placed else None

    @property
    def refresh(self) -> learner.RefreshSettings | None:
        """Settings of the reference's moves towards the policy; None if the reference is fixed."""
        return self.kl.refresh if self.kl else None

    @property
    def kl_weighted(self) -> bool:
        """Whether the KL penalty is multiplied by the ratio pi / pi_old."""
        return self.kl is not None and self.kl.estimator.endswith(WEIGHTED_SUFFIX)

    @property
    def turn_channel(self) -> str:
        """Reward function with a weight that adds up the rewards of turns; "" if the run has no such function."""
        channels = (name for name, weight in self.reward.channels.items() if weight)
        return next((name for name in channels if name in TURN_CHANNELS), "")

    @cached_property
    def credit(self) -> Credit:
        """Credit assignment: turns rewards and penalties into advantages."""
        returns = partial(lambda_returns, gamma=self.critic.gamma, lam=self.critic.lam) if self.critic else None
        return Credit(
            estimator=self.estimator,
            weights=self.reward.channels,
            model_weight=self.reward_model.weight if self.reward_model else None,
            overlong_tokens=self.reward.overlong_tokens,
            kl=self.kl_estimator("reward"),
            returns=returns,
            top_entropy=self.mask.top_entropy,
            updates=self.sizes.updates_per_rollout,
            loss_columns=self.loss_columns,
            turn_channel=self.turn_channel,
        )

    @property
    def weighs(self) -> bool:
        """Whether importance weights correct for differences between sampler and trainer."""
        action = self.importance.action
        return action != "none" and not (action == "auto" and self.own_samples)

    @property
    def importance_weights(self) -> ImportanceFn:
        """Function that computes importance weights of tokens that another engine or older weights sampled."""
        return make_importance_weights(off_policy=not self.own_samples, dtype=self.model.dtype, **self.importance)

    @property
    def learning_rate_backoff(self) -> LearningRateBackoff | None:
        """Change of the learning rate at a rollback; None if the run never rolls back."""
        rollback = self.health.rollback
        return LearningRateBackoff(rollback.learning_rate, rollback.warmup_steps) if rollback else None

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer of the policy, with the coefficients of its loss."""
        return make_optimizer(
            self.sizes.scheduled_updates,
            coefficients=self._coefficients(),
            skips=self.health.skip,
            backoff=self.learning_rate_backoff,
            **self.optim,
        )

    def _coefficients(self) -> dict[str, Coefficient]:
        """Returns the coefficients of the policy's loss and of its penalties, by the metrics that log them."""
        coefficients, sizes = dict[str, Coefficient](), self.sizes
        # The KL coefficient follows the measured KL divergence (adaptive), or a schedule over the run.
        if penalty := self.kl:
            coefficients["kl/coef"] = (
                optim.adaptive_kl(penalty.coef, sizes.sequences_per_update, **penalty.adaptive)
                if penalty.adaptive
                else optim.scheduled(
                    penalty.coef, decay=penalty.decay, end=penalty.end, total_steps=sizes.scheduled_updates
                )
            )
        if entropy_bonus := self.entropy:
            coefficients["entropy/coef"] = (
                optim.adaptive_entropy(entropy_bonus.coef, **entropy_bonus.adaptive)
                if entropy_bonus.adaptive
                else optim.constant(entropy_bonus.coef)
            )
        if "gradient_spike" in self.health.skip:
            coefficients["grad_norm/bound"] = optim.spike_bound()
        return coefficients | self.router_coefficients


def warmup_steps(section: KeywordArguments, total: int, name: str = "optim") -> int:
    """Returns how many optimizer steps the warm-up takes that a section such as `optim` sets.

    total: optimizer steps of the schedule; name: name of the section, for errors. Raises: UserError, if the section
    sets the warm-up both in steps and as a ratio, or if the ratio is not in [0, 1).
    """
    return optim.count_warmup(total, warmup_steps=section.warmup_steps, warmup_ratio=section.warmup_ratio, section=name)
