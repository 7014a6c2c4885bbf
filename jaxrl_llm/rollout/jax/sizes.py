"""The sizes of the engine's programs and of its cache: few, and known before a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxrl_llm.machine.memory import device_bytes
from jaxrl_llm.structs import ImageSizes, PyTree

PAGE, ALIGNED = 64, 8  # tokens of a page, and what divides them: vectors of a CPU have so many numbers
FEWER = (4, 16)  # so many times fewer sequences than the largest program, for the others
ROUND = 32  # tokens, at most, between two looks of the host
PROMPT_TOKENS = 2**14  # of prompts that run at once on a device: enough to be fast, and few enough for its memory
USABLE = 0.85  # of a device's memory, for weights, states and cache; the rest is for what programs compute
CHUNKS = (32, 128)  # tokens of an observation that run at once
FULL = 3  # so many small chunks cost less than a large one that is not full


class PageKind(NamedTuple):
    """What mesh, model and config prescribe."""

    devices: int = 1  # that have pages
    dtype: str = ""  # of keys and values; "": that of the model
    token_bytes: int = 0  # of a token's keys and values in all layers, on a device
    tokens: int = 0  # of a page; 0: 64, or fewer if completions are short
    in_place: bool = False  # a kernel reads the pages that a sequence has: no program has copies of some pages
    observation: int = 0  # tokens, at most, that an environment says at once; 0: there is none


class Slots(NamedTuple):
    """The size of a decode program on a device."""

    count: int  # sequences that compute
    pages: int  # that it reads
    prompts: int


@dataclass(frozen=True)
class StreamSizes:
    """The sizes of a stream on each device."""

    group: int  # G
    width: int  # P
    length: int  # C
    sequences: int  # that hold pages at once
    prompts: int  # that are there at once
    page: int  # tokens of a page
    pages: int
    dtype: str  # of `PageKind`, as `in_place` and `observation`
    in_place: bool
    observation: int
    refills: bool  # some groups begin when others have ended
    images: ImageSizes | None = None  # of the images of prompts; None: there are none

    @property
    def longest(self) -> int:
        """Pages of the longest sequence. Of its last token no keys are kept."""
        return max(-(-(self.length - 1) // self.page), 1)

    @property
    def slots(self) -> list[Slots]:
        """The decode programs, the largest first.

        All episodes take one: rows of programs of different sizes differ in their last bits, and how many episodes
        compute together depends on the time of tools.
        """
        largest = Slots(self.sequences, self.pages, self.prompts)
        sizes = [largest]
        if self.observation:
            return sizes
        # Most sequences are short, and all of them are at first: then most pages are empty.
        if not self.in_place and (pages := self.pages // 2) >= self.sequences:
            sizes.append(largest._replace(pages=pages))
        # Where a kernel reads only the pages of its sequences, a small program gains little.
        for times in FEWER[:1] if self.in_place else FEWER:
            count = -(-self.sequences // times)
            pages = self.pages if self.in_place else min(max(-(-self.pages // times), count, self.longest), self.pages)
            if count < sizes[-1].count:
                sizes.append(Slots(count, pages, min(self.prompts, count)))
        # Short completions end within few rounds, so a smaller program would begin when they end.
        return sizes[: max(self.length // ROUND, 1)]

    def chunks(self, *, goes_on: bool) -> tuple[int, ...]:
        """Returns the tokens of the programs for observations. goes_on: completions of an earlier call are fed, too."""
        if goes_on or self.observation > FULL * CHUNKS[0]:
            return CHUNKS
        return CHUNKS[:1] if self.observation else ()

    @property
    def at_first(self) -> int:
        """Prompts that may begin at once."""
        return min(self.prompts, -(-self.sequences // self.group))

    @property
    def begins(self) -> int:
        """Prompts of the program that begins."""
        return min(self.at_first, max(PROMPT_TOKENS // self.width, 1))

    @property
    def refill(self) -> int:
        """Prompts of the program for groups that begin later, also beside those that `begins` leaves out."""
        return min(-(-self.at_first // FEWER[-1]), self.begins)

    @property
    def feeds(self) -> int:
        """Sequences whose observations run at once."""
        return max(self.sequences // FEWER[-1], 1)

    def fitting(self, sequences: int, pages: int) -> Slots:
        """Returns the smallest decode program for so many sequences and pages."""
        return min(s for s in self.slots if sequences <= s.count and pages <= s.pages)


def cache_bytes(memory: int, held: PyTree, *, beside_learning: bool) -> int:
    """Returns the bytes of a device that a cache may take; 0: no bound is known.

    memory: bytes of the device, 0: not known; held: all arrays that are there while it samples, or their shapes.
    """
    # What the programs of learning take beside it is not known before they are compiled.
    if not memory or beside_learning:
        return 0
    # 1: nothing is left, which the compiler tells in its own numbers.
    return max(int(USABLE * memory) - device_bytes(held), 1)


def at_once(max_sequences: int, enough: int) -> int:
    """Returns the smaller bound of the completions that hold pages at once; 0: all.

    enough: complete ones with which a call ends, or those of a step.
    """
    return min(filter(None, (max_sequences, enough)), default=0)


def sizes_of(
    prompts: int,
    group: int,
    width: int,
    length: int,
    *,
    max_sequences: int = 0,
    pages: int = 0,
    cache_bytes: int = 0,
    kind: PageKind | None = None,
) -> StreamSizes:
    """Returns the sizes for a batch of prompts over devices.

    max_sequences: sequences that hold pages at once, over all devices, 0 = all. pages: number of pages of a device, 0 =
    as many as the sequences may need, and at most as `cache_bytes` of a device hold (0 = no such bound). kind: kind of
    the pages.
    """
    kind = kind or PageKind()
    device_prompts = -(-prompts // kind.devices)
    everything = device_prompts * group
    sequences = min(everything, max(max_sequences // kind.devices, 1) if max_sequences else everything)
    # Groups of which few sequences are left hold places of prompts, beside those that have just begun. There are never
    # more groups that compute than sequences.
    some = min(device_prompts, 2 * -(-sequences // group) + 1, sequences)
    places = some if sequences < everything else device_prompts
    page = kind.tokens or min(PAGE, -(-length // ALIGNED) * ALIGNED)
    shape = group, width, length, sequences, places, page
    sizes = StreamSizes(*shape, 0, kind.dtype, kind.in_place, kind.observation, refills=False)
    needed = sequences * sizes.longest
    if cache_bytes and not pages:
        pages = min(cache_bytes // kind.token_bytes - places * width, needed * page) // page
    pages = max(pages or needed, sizes.longest)
    return replace(sizes, pages=pages, refills=sequences < everything or pages < needed)
