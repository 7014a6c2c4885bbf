"""The records of a training step, and the names of array dimensions.

B  prompts in a step            P  prompt tokens (padded)
G  completions of one prompt    C  completion tokens (padded)
N  patches of a prompt          M  tokens of its images (both padded)
V  vocabulary    D  model width    L  layers    H  query heads    K  key/value heads

Arrays over prompt tokens are [B, P]. Arrays over completion tokens are [B, G, C]: entry [b, g, t] describes token t
itself, for example its log-probability given all earlier tokens, its mask or its advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import jax
import numpy as np

if TYPE_CHECKING:
    Array: TypeAlias = jax.Array
else:
    Array = jax.Array | np.ndarray  # functions also take NumPy arrays; type checkers see jax.Array, for its operators
AnyArray: TypeAlias = Any  # a field of a record: jax.Array on the device, np.ndarray on the host, or None
PyTree: TypeAlias = Any
# Pairs (tokens of a prompt P, patches of a prompt N), the largest first. Many prompts of a data set fit into one of
# these sizes, and are padded to it instead of to the largest prompt. N is 0 without images.
SmallerSizes: TypeAlias = tuple[tuple[int, int], ...]
Config: TypeAlias = Any  # an ml_collections.ConfigDict: its fields have no static types


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Images:
    """The images of a batch's prompts, cut into patches: small squares of pixels, the input of the vision tower.

    B: prompts; N: patches of a prompt; F: numbers of a patch; M: image tokens of a prompt. Patches that the vision
    tower merges into one token are neighbors. A prompt without images has padding only.
    """

    patches: AnyArray  # [B, N, F] uint8, F = 3 * patch * patch, the channel first
    places: AnyArray  # [B, N, 2] int32, row and column of each patch in its image
    segments: AnyArray  # [B, N] int32, number of the image to which a patch belongs, from 1; 0: padding
    columns: AnyArray  # [B, M] int32, index in the prompt of each image token; P, the prompt's length, for padding
    positions: AnyArray  # [B, 3, P] int32, rotary position of each prompt token: time, row, column
    end: AnyArray  # [B] int32, rotary position of the first completion token

    @property
    def sizes(self) -> ImageSizes:
        patch_count, numbers_per_patch = self.patches.shape[-2:]
        return ImageSizes(patch_count, numbers_per_patch, self.columns.shape[-1])

    @classmethod
    def padding(cls, lead: tuple[int, ...], width: int, sizes: ImageSizes) -> Images:
        """Returns the arrays, in NumPy, of prompts without images: only padding.

        lead: sizes of the leading axes, in place of B. width: tokens of a padded prompt (P).
        """
        return cls(
            patches=np.zeros((*lead, sizes.patches, sizes.numbers), np.uint8),
            places=np.zeros((*lead, sizes.patches, 2), np.int32),
            segments=np.zeros((*lead, sizes.patches), np.int32),
            columns=np.full((*lead, sizes.tokens), width, np.int32),
            positions=np.zeros((*lead, 3, width), np.int32),
            end=np.zeros(lead, np.int32),
        )

    @classmethod
    def shapes(cls, lead: tuple[int, ...], width: int, sizes: ImageSizes) -> Images:
        """Returns the shapes of the arrays that `padding` makes with the same arguments."""
        one_prompt = cls.padding((), width, sizes)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype), one_prompt)


class ImageSizes(NamedTuple):
    """The sizes to which the images of each prompt are padded."""

    patches: int  # patches of a prompt (N)
    numbers: int  # numbers of a patch (F)
    tokens: int  # image tokens of a prompt (M)


class PromptSizes(NamedTuple):
    """The sizes to which the prompts of a data set are padded."""

    width: int  # tokens of a prompt (P)
    images: ImageSizes | None = None  # None if no prompt has an image
    smaller: SmallerSizes = ()  # smaller sizes that hold many of the prompts


class ImageLimits(NamedTuple):
    """Limits of the images of all prompts of a run."""

    per_prompt: int  # most images of a prompt
    min_pixels: int  # fewest pixels of an image, after resizing
    max_pixels: int  # most pixels of an image, after resizing


class Prompt(NamedTuple):
    """The prompts that a model reads."""

    tokens: AnyArray  # [B, P] int32
    mask: AnyArray  # [B, P] bool, True on real tokens
    images: Images | None = None  # None if the model reads texts only

    def narrowed(self, width: int, patches: int) -> Prompt:
        """Returns the prompts with less padding: the last `width` tokens and the first `patches` patches of each.

        All tokens and patches that are cut must be padding.
        """
        # A batch without patches has no images, and is computed as text.
        images = self.images if patches else None
        first_kept_token = self.tokens.shape[-1] - width
        if images is not None:
            tokens = images.sizes.tokens * patches // images.sizes.patches
            images = Images(
                patches=images.patches[:, :patches],
                places=images.places[:, :patches],
                segments=images.segments[:, :patches],
                columns=images.columns[:, :tokens] - first_kept_token,
                positions=images.positions[..., first_kept_token:],
                end=images.end,
            )
        return Prompt(self.tokens[:, first_kept_token:], self.mask[:, first_kept_token:], images)

    def count_sizes(self, smaller: SmallerSizes) -> Array:
        """Returns, for each prompt [B] with padding on the left, how many of the smaller sizes hold it.

        smaller: pairs of the most tokens and the most patches of a prompt.
        """
        # The tokens of a prompt begin at the first True of its mask, because the padding is on the left.
        length, patches = self.tokens.shape[1] - self.mask.argmax(axis=1), 0  # length: [B]
        if self.images is not None:
            is_patch = self.images.segments > 0
            # The number of the last patch of a prompt is also the number of its patches, because padding follows them.
            patches = (is_patch * np.arange(1, is_patch.shape[1] + 1)[None]).max(axis=1)
        size_count = 0 * length
        for max_tokens, max_patches in smaller:
            size_count += (length <= max_tokens) & (patches <= max_patches)
        return size_count


@dataclass(frozen=True)
class Prompts:
    """The prompts of a step, on the host."""

    tokens: np.ndarray  # [B, P] int32
    mask: np.ndarray  # [B, P] bool, True on real tokens (left- or right-padded)
    rows: list[dict[str, Any]]  # B data rows, with all columns for the reward functions
    numbers: np.ndarray  # [B] int32, indices of these rows in the data set
    sources: list[str] = field(default_factory=list)  # B names of mixture sources, or [] without a mixture
    images: Images | None = None  # NumPy arrays; None if the model reads texts only
    smaller: SmallerSizes = ()  # further sizes, each below the one before, to which short prompts may be cut

    @property
    def prompt(self) -> Prompt:
        """The prompts with their masks and images, as a model reads them."""
        return Prompt(self.tokens, self.mask, self.images)

    @property
    def sizes(self) -> PromptSizes:
        return PromptSizes(self.tokens.shape[1], self.images and self.images.sizes, self.smaller)

    @property
    def computed_tokens(self) -> np.ndarray:
        """Width [B] to which each prompt is padded when it is computed: the smallest size that holds the prompt."""
        # Each size is below the one before. So if k smaller sizes hold a prompt, the k-th is the smallest of them.
        widths = np.array([self.tokens.shape[1], *(width for width, _ in self.smaller)])
        return widths[self.prompt.count_sizes(self.smaller)]

    def joined(self, later_prompts: Prompts) -> Prompts:
        """Returns these prompts followed by `later_prompts`."""
        tokens = np.concatenate([self.tokens, later_prompts.tokens])
        mask = np.concatenate([self.mask, later_prompts.mask])
        numbers = np.concatenate([self.numbers, later_prompts.numbers])
        images = jax.tree.map(lambda *parts: np.concatenate(parts), self.images, later_prompts.images)
        rows, sources = self.rows + later_prompts.rows, self.sources + later_prompts.sources
        return replace(self, tokens=tokens, mask=mask, rows=rows, numbers=numbers, sources=sources, images=images)

    def take(self, indices: list[int]) -> Prompts:
        """Returns the prompts at these indices of the batch."""
        sources = [self.sources[i] for i in indices] if self.sources else []
        tokens, mask, numbers = self.tokens[indices], self.mask[indices], self.numbers[indices]
        rows, images = [self.rows[i] for i in indices], jax.tree.map(lambda x: x[indices], self.images)
        return replace(self, tokens=tokens, mask=mask, rows=rows, numbers=numbers, sources=sources, images=images)

    def narrowed(self, number: int) -> Prompts:
        """Returns these prompts cut to a smaller size, which must hold them.

        number: index of the size in `smaller`, from 1; 0 = leave the prompts as they are.
        """
        if not number:
            return self
        tokens, mask, images = self.prompt.narrowed(*self.smaller[number - 1])
        return replace(self, tokens=tokens, mask=mask, images=images)


Collate: TypeAlias = Callable[[Any], Prompts]  # indices of rows in the data set -> their prompts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tree:
    """Structure of completions whose tokens form a tree, because several branches share their beginnings.

    The calls of an agent make such completions. A completion lists the nodes of its tree depth first, each token
    once. A token sees the prompt and the tokens on the path to it. Its position is the number of prompt tokens plus
    its depth.
    """

    previous: AnyArray  # [B, G, C] int32, index in its completion of the token before each token; -1: the prompt's end
    ends: AnyArray  # [B, G, C] int32, token j is visible to the tokens i of its completion with j <= i < ends[j]
    depths: AnyArray  # [B, G, C] int32, number of completion tokens before each token on its path

    @classmethod
    def chains(cls, mask: np.ndarray) -> Tree:
        """Returns the trees, as NumPy arrays, of completions without branches. mask: True on real tokens [B, G, C]."""
        index = np.broadcast_to(np.arange(mask.shape[-1], dtype=np.int32), mask.shape)
        ends = np.where(mask, mask.sum(axis=-1, dtype=np.int32, keepdims=True), 0)
        return cls(previous=index - 1, ends=ends, depths=index)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rollouts:
    """Completions from an engine: G for each of B prompts, of C tokens each, with padding after the stop token."""

    completions: AnyArray  # [B, G, C] int32
    completion_mask: AnyArray  # [B, G, C] bool, True on real tokens (attended to)
    loss_mask: AnyArray  # [B, G, C] bool, True on tokens that the policy sampled (trained on)
    logprobs: AnyArray  # [B, G, C] float32, log-probabilities under the sampling distribution, from the engine
    truncated: AnyArray  # [B, G] bool, True if the completion or its episode reached a limit before it ended
    versions: AnyArray  # [B, G, C] int32, step after which the sampling weights were pushed
    episodes: dict[str, AnyArray] = field(default_factory=dict)  # {metric: [B, G]} that the environment measured
    tree: Tree | None = None  # None if each token of a completion follows the token before it
    # An advantage estimator that assigns credit by the turn needs these two arrays; they are None for any other one.
    turn_numbers: AnyArray = None  # [B, G, C] int32, number of the turn of each sampled token, from 0; -1 elsewhere
    turn_rewards: AnyArray = None  # [B, G, C] float32, reward of a turn on its last token, NaN elsewhere

    @classmethod
    def from_checkpoint(cls, fields: dict[str, Any]) -> Rollouts:
        """Returns the rollouts of a checkpoint, which holds dataclasses as dicts."""
        rollouts = cls(**fields)
        return replace(rollouts, tree=Tree(**fields["tree"])) if rollouts.tree else rollouts

    def measured(self, names: Iterable[str]) -> Rollouts:
        """Returns a copy with exactly these episode metrics; a metric that is missing here becomes 0."""
        zeros = np.zeros(self.truncated.shape, np.float32)
        return replace(self, episodes={name: self.episodes.get(name, zeros) for name in names})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rewards:
    """The rewards of G completions for each of B prompts, from the reward functions."""

    total: AnyArray  # [B, G], weighted sum of the channels; NaN where no function with a weight returned a number
    channels: dict[str, AnyArray]  # {function: [B, G]}, its rewards; NaN where the function gave no verdict
    greedy: AnyArray = None  # [B, 1], total of each prompt's greedy completion, if the advantage estimator needs it
    greedy_lengths: AnyArray = None  # [B, 1], tokens of each prompt's greedy completion
    turn_numbers: AnyArray = None  # [B, G, C], as in `Rollouts`
    turn_rewards: AnyArray = None  # [B, G, C], as in `Rollouts`, before the weight of the reward function


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """The inputs of an update: B prompts of P tokens, and G completions of each, of C tokens.

    A field that a run does not need is None.
    """

    prompts: AnyArray  # [B, P] int32
    prompt_mask: AnyArray  # [B, P] bool
    completions: AnyArray  # [B, G, C] int32
    completion_mask: AnyArray  # [B, G, C] bool
    loss_mask: AnyArray  # [B, G, C] bool
    advantages: AnyArray = None  # [B, G, C], 0 on untrained tokens
    values: AnyArray = None  # [B, G, C], by the critic before its update
    returns: AnyArray = None  # [B, G, C], the critic's targets
    rewards: AnyArray = None  # [B, G], without a KL penalty; NaN as `Rewards.total`
    policy_mask: AnyArray = None  # [B, G, C] bool, tokens in the policy loss; None = all trained tokens
    sampler_logprobs: AnyArray = None  # [B, G, C], reported by the engine
    old_logprobs: AnyArray = None  # [B, G, C], by the policy before the first update; None = by the current policy
    ref_logprobs: AnyArray = None  # [B, G, C], by the reference model (the KL anchor)
    columns: dict[str, AnyArray] = field(default_factory=dict)  # {name: [B, G, C]}, further scores that the loss needs
    # Places of completion tokens in packed rows, [B, E, N, T] int32 (`packing.pack`); None if a completion is a row.
    packed_index: AnyArray = None
    images: Images | None = None  # None if the model reads texts only
    # Smaller sizes of prompts to which many prompts may be cut. They are static, because programs depend on them.
    smaller: SmallerSizes = field(default=(), metadata=dict(static=True))
    tree: Tree | None = None  # None if each token of a completion follows the token before it

    @property
    def prompt(self) -> Prompt:
        """The prompts with their masks and images, as a model reads them."""
        return Prompt(self.prompts, self.prompt_mask, self.images)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The arrays of a model in training: a pytree whose fields never change in place."""

    params: PyTree
    opt_state: PyTree
    coef_state: PyTree  # state of each coefficient (`optim.Coefficient`)


@dataclass(frozen=True)
class Sizes:
    """Batch sizes and step counts of a run: fields of its config, and properties that are computed from them."""

    prompts_per_step: int  # B
    max_completion_tokens: int  # C
    prompts_per_update: int  # prompts of one optimizer step
    microbatch: int  # prompts in memory at a time; 0 = all prompts of an update
    steps: int
    scheduled_steps: int  # steps that warm-up and decay of the learning rate cover
    warmup_steps: int = 0  # optimizer steps
    group_size: int = 1  # G
    epochs: int = 1  # passes over a rollout
    critic_steps: int = 0  # first steps, in which only the critic learns
    critic: bool = False  # True if the run has a critic
    samples: int = 1  # most completions that a step samples for each prompt
    trees: bool = False  # True if completions are trees

    @property
    def sequences_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def sequences_per_update(self) -> int:
        return self.prompts_per_update * self.group_size

    @property
    def updates_per_rollout(self) -> int:
        return self.prompts_per_step // self.prompts_per_update * self.epochs

    @property
    def updates(self) -> int:
        """Optimizer steps of the policy."""
        return self.updates_per_rollout * (self.steps - self.critic_steps)

    @property
    def scheduled_updates(self) -> int:
        """Optimizer steps that the policy's schedules cover. The first `critic_steps` steps do not count."""
        return self.updates_per_rollout * (self.scheduled_steps - self.critic_steps)

    @property
    def critic_updates(self) -> int:
        """Optimizer steps that the critic's schedule covers; 0 without a critic."""
        return self.updates_per_rollout * self.scheduled_steps * self.critic

    @property
    def completion_tokens(self) -> int:
        """Most completion tokens that the whole run can sample."""
        return self.steps * self.prompts_per_step * self.samples * self.max_completion_tokens

    def totals(self) -> dict[str, int]:
        """Returns the derived sizes by name, as `jaxrl plan` and the model card print them."""
        names = ("prompts_per_update", "sequences_per_step", "sequences_per_update", "updates_per_rollout", "updates")
        names += ("scheduled_updates", "warmup_steps", "completion_tokens", "critic_updates")
        return {name: getattr(self, name) for name in names}

    @property
    def at_once(self) -> int:
        """Prompts of an update that are in memory at the same time."""
        return self.microbatch or self.prompts_per_update


class PartState(NamedTuple):
    """The state of one part of a run, as a checkpoint holds it."""

    notes: dict[str, Any]  # values that JSON can hold, such as the position in the data
    arrays: PyTree = None  # arrays on the devices, None if the part has none


class StatefulPart(Protocol):
    """A part of a run whose state is saved in checkpoints and restored when the run resumes."""

    def state(self, seconds: float | None = None) -> PartState:
        """Returns the part's state after the last step. seconds: time limit of waiting for work; None = unlimited."""
        ...

    def load(self, state: PartState | None) -> None:
        """Restores a state of `state()`; None resets the part for a new run."""
        ...
