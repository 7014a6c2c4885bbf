"""The agents of a run: opens a session for each episode of a batch, runs its agent, and returns the rollouts."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain, count
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from jaxrl_llm import tasks
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.config.names import Kind, resolve
from jaxrl_llm.errors import describe
from jaxrl_llm.machine.hang import WATCHDOG
from jaxrl_llm.rollout.agents.trees import episode_trees, place_rewards
from jaxrl_llm.rollout.agents.verdicts import AgentResult, CommandRunner, FunctionRunner
from jaxrl_llm.rollout.jax.open_stream import Arrivals, OpenStream
from jaxrl_llm.rollout.serving.engine_thread import EngineThread
from jaxrl_llm.structs import Prompts, Rollouts
from jaxrl_llm.tasks.agents import TURNS, UNSCORED, AgentEndpoint, AgentSettings, Command, Function

if TYPE_CHECKING:  # these modules need the extra `serve`
    from jaxrl_llm.rollout.agents.sessions import AgentSession

AGENTS = Kind(tasks, lambda function: False)  # this package has no agents, so a config names the user's
MODEL_NAME = "policy"  # name of the model in the requests of agents
MAX_WAITING = 2**20  # completions that may wait for a row of the engine; limits of episodes bound them far below


class OpenEngine(Protocol):
    """An engine that samples sequences which arrive at any time."""

    def open_stream(
        self, arrivals: Arrivals, key: jax.Array, *, rows: int, prompt_width: int, sampling: Sampling
    ) -> OpenStream:
        """Returns a stream that samples the sequences of `arrivals`."""
        ...


def agent_function(name: str) -> Callable[..., Any]:
    """Returns the agent that `config.env.agent` names. Raises: UserError, if it does not exist."""
    return resolve(name, AGENTS, "config.env.agent")


@dataclass(kw_only=True)
class AgentEpisode:
    """One episode of a batch."""

    row: dict[str, Any]
    session: AgentSession
    result: AgentResult = field(default_factory=lambda: AgentResult({}))
    seconds: float = 0.0

    @property
    def has_failed(self) -> bool:
        """Whether the agent failed, so that the episode has no verdict. An error after a limit is no failure."""
        return bool(self.result.error) and (self.result.is_late or not self.session.reached_limit)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the episode, also those of the agent's rewards."""
        calls, is_unscored = len(self.session.trace.calls), not self.result.metrics
        counts = {
            "calls": calls,
            "restarts": self.session.trace.restarts,
            "errors": self.has_failed,
            "timeouts": self.result.is_late,
            "without_calls": not calls,
            UNSCORED: is_unscored,
            "seconds": self.seconds,
        }
        return {name: float(x) for name, x in counts.items()} | self.result.metrics


@dataclass(kw_only=True)
class AgentPool:
    """Runs the agents of batches, and holds the limits of their episodes."""

    settings: AgentSettings
    tokenizer: Any
    stop_ids: tuple[int, ...]
    vocab_size: int
    sampling: Sampling  # distribution of the run's rollouts
    prompt_tokens: int  # P
    completion_tokens: int  # C
    max_sequences: int = 0  # most completions that the engine samples at a time; 0 = one for each running episode

    def __post_init__(self) -> None:
        seconds, settings = self.settings.timeout, self.settings
        if isinstance(settings, Function):
            self._run_agent = FunctionRunner(agent_function(settings.agent), seconds)
        else:
            assert isinstance(settings, Command)
            self._run_agent = CommandRunner(settings.command, seconds)
        self._server: Any = None  # starts with the first batch

    def sample(
        self,
        engine: OpenEngine,
        prompts: Prompts,
        key: jax.Array,
        group_size: int,
        temperature: float,
        report_ended: Callable[[int], None] = lambda count: None,
    ) -> tuple[Prompts, Rollouts]:
        """Runs the agents of a batch, and returns its rollouts with their prompts.

        prompts: prompts of the data, whose rows the agents get. temperature: temperature of all completions.
        report_ended(count): is called with the number of newly ended episodes. Raises: the error of the engine.
        """
        self._start_server()
        episodes = self._open_episodes(prompts, group_size)
        queue, stopped = EngineThread(MAX_WAITING), Event()
        width = self.prompt_tokens + self.completion_tokens - 1
        rows = min(self.max_sequences or self.settings.workers, self.settings.workers)
        # Each completion has its temperature, and the programs of training serve an evaluation too.
        sampling = replace(self.sampling, temperature=1.0)
        stream = engine.open_stream(queue, key, rows=rows, prompt_width=width, sampling=sampling)
        self._service.begin_batch(queue, temperature)
        remaining, threads_ended, failures = iter(episodes), count(1), list[BaseException]()
        threads = min(self.settings.workers, len(episodes))
        # The first batch compiles the programs, which must not count toward the time limits of its episodes.
        is_ready = queue.start_warm_up(self.tokenizer.pad_token_id)

        def work() -> None:
            try:
                is_ready.wait()
                for episode in remaining:  # all threads share the iterator, so each episode runs once
                    if stopped.is_set():
                        break
                    self._run(episode, stopped)
                    WATCHDOG.report_progress()
                    report_ended(1)
            except BaseException as error:
                failures.append(error)
            finally:
                if next(threads_ended) == threads:
                    queue.end()

        try:
            for _ in range(threads):
                Thread(target=work, name="agent", daemon=True).start()
            queue.run(stream)  # in this thread, which alone runs programs on the engine's devices
        finally:
            stopped.set()
            self._service.begin_batch(EngineThread(0), temperature)  # without the stream, which holds the weights
        if failures:
            raise failures[0]
        return self._finish(prompts, episodes, group_size)

    def close(self) -> None:
        """Ends the server."""
        if self._server:
            self._server.close()

    def _open_episodes(self, prompts: Prompts, group_size: int) -> list[AgentEpisode]:
        """Returns an episode for each completion. Its first completion has the number that it has in other runs."""
        from jaxrl_llm.rollout.agents.sessions import AgentSession

        total = len(prompts.rows) * group_size
        return [
            AgentEpisode(
                row=prompts.rows[i // group_size],
                session=AgentSession(
                    first_number=i,
                    number_step=total,
                    prompt_tokens=self.prompt_tokens,
                    completion_tokens=self.completion_tokens,
                    max_calls=self.settings.calls,
                ),
            )
            for i in range(total)
        ]

    def _run(self, episode: AgentEpisode, stopped: Event) -> None:
        """Runs the agent of an episode with a session of its own, and stores the result in the episode."""
        start, name = time.perf_counter(), self._service.open_session(episode.session)
        endpoint = AgentEndpoint(self._server.base_url(name), name, MODEL_NAME)
        try:
            # The row is copied, because agents of one group run at the same time.
            episode.result = self._run_agent(endpoint, copy.deepcopy(episode.row), stopped)
        except BaseException as error:
            episode.result = AgentResult({}, describe(error))
            raise
        finally:
            self._service.end_session(name, episode.session)
            episode.seconds = time.perf_counter() - start
        if not (episode.result.error or episode.session.trace.calls):
            # The reward of an agent that has not asked the policy would say nothing about the policy.
            episode.result = AgentResult({}, "it has not called the policy")
        rewards, calls = len(episode.result.turn_rewards), len(episode.session.trace.calls)
        if rewards not in (0, calls):
            # A reward that belongs to no call would be lost.
            error = f"it has returned {rewards} rewards in {TURNS!r} for {calls} calls of the policy"
            episode.result = AgentResult({}, error)
        # A run that stops fails the requests of its agents.
        if episode.has_failed and not (stopped.is_set() or self._service.engine.error):
            warnings.warn(f"an agent failed: {episode.result.error}; episode/errors counts it", stacklevel=2)

    def _finish(self, prompts: Prompts, episodes: list[AgentEpisode], group_size: int) -> tuple[Prompts, Rollouts]:
        """Returns the prompts and rollouts of a batch whose episodes have ended."""
        traces = [episode.session.trace for episode in episodes]
        trees = episode_trees(prompts, traces, group_size, self.completion_tokens, pad_id=self.tokenizer.pad_token_id)
        rewards = place_rewards(trees.rollouts.turn_numbers, [episode.result.turn_rewards for episode in episodes])
        reached_limit = np.array([episode.session.reached_limit or episode.result.is_late for episode in episodes])
        metrics_by_episode = [episode.metrics() for episode in episodes]
        names = sorted({*chain(*metrics_by_episode)})
        columns = {name: np.array([x.get(name, np.nan) for x in metrics_by_episode], np.float32) for name in names}
        episode_metrics = {name: values.reshape(-1, group_size) for name, values in columns.items()}
        # Calls that have no place in the tree of their episode are lost, because no step learns from them.
        episode_metrics["lost_calls"] = trees.lost_calls.astype(np.float32)
        truncated = reached_limit.reshape(-1, group_size) | (trees.lost_calls > 0)
        return trees.prompts, replace(
            trees.rollouts, truncated=truncated, episodes=episode_metrics, turn_rewards=rewards
        )

    def _start_server(self) -> None:
        if self._server:
            return
        # No run without agents imports these modules, which need the extra `serve`.
        from jaxrl_llm.rollout.agents.server import AgentServer
        from jaxrl_llm.rollout.agents.sessions import AgentService
        from jaxrl_llm.rollout.serving.service import ServedModel

        model = ServedModel(
            name=MODEL_NAME,
            tokenizer=self.tokenizer,
            stop_ids=frozenset(self.stop_ids),
            vocab_size=self.vocab_size,
            max_prompt_tokens=self.prompt_tokens + self.completion_tokens - 1,
            max_completion_tokens=self.completion_tokens,
            sampling=self.sampling,
        )
        self._service = AgentService(model, self.sampling)
        self._server = AgentServer(self._service)
