"""Sizes of the in-JAX engine's programs and of its key-value cache, which are few and known before a run starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxrl_llm.machine.memory import device_bytes
from jaxrl_llm.structs import ImageSizes, PyTree

PAGE_TOKENS = 64  # tokens of a page, unless completions are shorter or the platform prescribes another number
PAGE_ALIGNMENT = 8  # page sizes are multiples of this, the vector width of a CPU
PAGE_GROWTH = 4  # without a kernel, a cache has this many pages a sequence at first, and grows by this factor
SMALLER_BY = (4, 16)  # the smaller decode programs have this many times fewer sequences than the largest program
# Programs for later prompts and for observations have this many times fewer rows than a call has at first, because few
# groups start, and few sequences get an observation, at the same time.
FEWER_LATER_ROWS = 16
ROUND_TOKENS = 32  # most tokens that a decode round samples per sequence before the host checks the sequences
PREFILL_TOKENS = 2**14  # prompt tokens of a prefill on one device: enough to be fast, few enough for the memory
USABLE_MEMORY = 0.85  # share of a device's memory for weights, states and cache; the rest is for temporary arrays
DRAFT_PASSES = 8  # most passes of a decode round with drafts, after which the host looks for better ones
# Most tokens that a pass with drafts computes on a device, with a kernel for pages (an accelerator) and without. With
# more tokens, a pass computes for longer than it reads weights. The bounds are not calibrated.
DRAFT_ROWS = {True: 256, False: 64}
CHUNK_TOKENS = (32, 128)  # widths of the two programs that write observations into pages
MAX_SMALL_CHUNKS = 3  # this many small chunks cost less than a large chunk that is partly empty


class PageKind(NamedTuple):
    """Properties of cache pages that follow from mesh, model and config."""

    devices: int = 1  # number of devices that have pages of their own
    dtype: str = ""  # dtype of keys and values; "": dtype of the model
    token_bytes: int = 0  # bytes of a token's keys and values, in all layers, on one device
    tokens: int = 0  # tokens of a page; 0: PAGE_TOKENS, or fewer if completions are short
    has_kernel: bool = False  # whether a kernel reads the pages of decoding sequences
    observation: int = 0  # most tokens of an environment's observation; 0: no environment


class Slots(NamedTuple):
    """Size of a decode program on each device."""

    count: int  # sequences
    prompts: int  # prompts that the program reads


@dataclass(frozen=True)
class StreamSizes:
    """Sizes of one call of the engine, on each device."""

    group_size: int  # completions of a prompt (G)
    prompt_width: int  # tokens of a padded prompt (P)
    completion_length: int  # most tokens of a completion (C)
    sequences: int  # most sequences that hold pages at a time
    prompts: int  # most prompts in the cache at a time
    page: int  # tokens of a page
    pages: int  # most pages in use at a time
    allocated_pages: int  # pages of the cache at first; it grows when the scheduler gives pages beyond them
    dtype: str  # dtype of keys and values; "": dtype of the model
    has_kernel: bool  # whether a kernel reads the pages of decoding sequences
    observation: int  # most tokens of an environment's observation; 0: no environment
    refills: bool  # whether some groups start only after other groups have ended
    images: ImageSizes | None = None  # sizes of the prompts' images, None if prompts have no images
    is_open: bool = False  # whether prompts arrive while others decode (`open_stream`)
    drafts: int = 0  # most drafts that a pass verifies; 0: no drafts

    @property
    def max_sequence_pages(self) -> int:
        """Pages of the longest sequence. The cache does not need the keys of a sequence's last token."""
        return max(-(-(self.completion_length - 1) // self.page), 1)

    @property
    def slots(self) -> list[Slots]:
        """Sizes of the decode programs, the largest first.

        Episodes have a single size. Programs of two sizes differ in the last bits of their results, and the time of
        tools decides how many episodes decode together. A single size keeps the results independent of that time. An
        open stream has a single size too, because there the time of arrival decides. Only the smallest program has
        drafts, because right drafts decide when the sequences are few enough for a smaller one.
        """
        sizes = [Slots(self.sequences, self.prompts)]
        if self.observation or self.is_open:
            return sizes
        # A kernel reads the pages of each sequence alone, so a very small program saves little time.
        for times in SMALLER_BY[:1] if self.has_kernel else SMALLER_BY:
            count = -(-self.sequences // times)
            if count < sizes[-1].count and not self.drafted(sizes[-1]):
                sizes.append(Slots(count, min(self.prompts, count)))
        # Short completions end within few rounds: a further program would start only when they have ended.
        return sizes[: max(self.completion_length // ROUND_TOKENS, 1)]

    def drafted(self, slots: Slots) -> int:
        """Returns how many drafts the decode program for these slots verifies in a pass; 0: it has no drafts."""
        # Right drafts must not decide which program runs. They would, if groups wait for slots: then the number of
        # sequences grows again, and the run changes between programs with and without drafts.
        is_one_size = slots.count == self.sequences or not self.refills
        rows_of_pass = slots.count * (self.drafts + 1)
        return self.drafts * (is_one_size and rows_of_pass <= DRAFT_ROWS[self.has_kernel])

    def chunk_tokens(self, *, continues_groups: bool) -> tuple[int, ...]:
        """Returns the widths of the programs that write observations into pages.

        continues_groups: whether the call continues completions of an earlier call, which it writes into pages too.
        """
        if continues_groups or self.observation > MAX_SMALL_CHUNKS * CHUNK_TOKENS[0]:
            return CHUNK_TOKENS
        return CHUNK_TOKENS[:1] if self.observation else ()

    @property
    def initial_prompts(self) -> int:
        """Most prompts that can start together at the beginning of a call."""
        return min(self.prompts, -(-self.sequences // self.group_size))

    @property
    def first_prefill_prompts(self) -> int:
        """Prompts of the program that runs the first prompts of a call."""
        return min(self.initial_prompts, max(PREFILL_TOKENS // self.prompt_width, 1))

    @property
    def later_prefill_prompts(self) -> int:
        """Prompts of the program for all later prompts, including initial prompts that the first prefill left out."""
        return min(-(-self.initial_prompts // FEWER_LATER_ROWS), self.first_prefill_prompts)

    @property
    def fed_sequences(self) -> int:
        """Sequences whose chunks of observations one call of the program `feed` writes into pages."""
        return max(self.sequences // FEWER_LATER_ROWS, 1)

    def with_room_for(self, pages: int) -> StreamSizes:
        """Returns the sizes with a cache that has grown until it has this many pages."""
        allocated = self.allocated_pages
        while allocated < pages:
            allocated = min(allocated * PAGE_GROWTH, self.pages)
        return replace(self, allocated_pages=allocated)

    def smallest_slots(self, sequences: int) -> Slots:
        """Returns the smallest decode program that holds this many sequences."""
        return min(s for s in self.slots if sequences <= s.count)


def cache_bytes(memory: int, resident_arrays: PyTree, *, beside_learning: bool) -> int:
    """Returns the most bytes of a device that the key-value cache may take; 0 = no known bound.

    memory: bytes of the device, 0 = unknown. resident_arrays: all arrays on the device while the engine samples, or
    their shapes. beside_learning: whether updates run on the same device at the same time.
    """
    # The memory of updates on the same device is unknown until their programs are compiled.
    if not memory or beside_learning:
        return 0
    # If no memory is left, the bound is 1 byte, because 0 means no bound. The compiler then reports the missing memory.
    return max(int(USABLE_MEMORY * memory) - device_bytes(resident_arrays), 1)


def sequence_limit(max_sequences: int, wanted_sequences: int) -> int:
    """Returns the most completions that hold pages at a time, which is the smaller bound; 0 = all completions.

    max_sequences: engine.max_sequences, 0 = no bound. wanted_sequences: number of complete completions after which a
    call returns (a step's completions, also if a partial rollout has more in flight); 0 = no bound.
    """
    return min(filter(None, (max_sequences, wanted_sequences)), default=0)


def sizes_of(
    prompts: int,
    group_size: int,
    prompt_width: int,
    completion_length: int,
    *,
    max_sequences: int = 0,
    pages: int = 0,
    cache_bytes: int = 0,
    kind: PageKind | None = None,
) -> StreamSizes:
    """Returns the sizes of a call with `prompts` prompts over all devices.

    max_sequences: most sequences that hold pages at a time, over all devices; 0 = all sequences. pages: pages of a
    device; 0 = as many as the sequences may need, bounded by `cache_bytes`. cache_bytes: most bytes of a device that
    the cache may take; 0 = no bound. kind: kind of the pages; None = the defaults of `PageKind`.
    """
    kind = kind or PageKind()
    device_prompts = -(-prompts // kind.devices)
    device_sequences = device_prompts * group_size
    sequences = min(device_sequences, max(max_sequences // kind.devices, 1) if max_sequences else device_sequences)
    # The cache holds twice as many prompts as full groups can decode, because a group keeps its prompt in the cache
    # until its last sequence ends, while new groups start. More prompts than sequences are never needed.
    active_prompts = min(device_prompts, 2 * -(-sequences // group_size) + 1, sequences)
    cached_prompts = active_prompts if sequences < device_sequences else device_prompts
    page = kind.tokens or min(PAGE_TOKENS, -(-completion_length // PAGE_ALIGNMENT) * PAGE_ALIGNMENT)
    sizes = StreamSizes(
        group_size=group_size,
        prompt_width=prompt_width,
        completion_length=completion_length,
        sequences=sequences,
        prompts=cached_prompts,
        page=page,
        pages=0,
        allocated_pages=0,
        dtype=kind.dtype,
        has_kernel=kind.has_kernel,
        observation=kind.observation,
        refills=False,
    )
    needed_pages = sequences * sizes.max_sequence_pages
    if cache_bytes and not pages:
        tokens_of_pages = cache_bytes // kind.token_bytes - cached_prompts * prompt_width
        pages = min(tokens_of_pages, needed_pages * page) // page
    pages = max(pages or needed_pages, sizes.max_sequence_pages)
    # The cache is cleared in each call. Where no kernel reads it, that takes longer than to decode short completions.
    allocated_pages = pages if kind.has_kernel else min(pages, PAGE_GROWTH * sequences)
    refills = sequences < device_sequences or pages < needed_pages
    return replace(sizes, pages=pages, allocated_pages=allocated_pages, refills=refills)
