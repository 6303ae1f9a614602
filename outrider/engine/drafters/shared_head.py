"""Heads of a target on several devices: each rank holds a share of the head, as of the target.

Rank 0 knows the sequences, chooses tokens and grows Drafts. All ranks compute a step of the head together.
Rank 0 sends the tokens to feed, and the states to begin with, which it picks from the states of the step
before. Other ranks keep only their share of the head's cache.
"""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from outrider.engine.choosing.step_result import StepResult
from outrider.engine.drafters.chain_drafter import ChainDrafter
from outrider.engine.drafters.target_drafter import Target, TargetDrafter
from outrider.engine.inputs.choice_input import ChoiceInput
from outrider.engine.parallel.drafter_step import DrafterStep
from outrider.engine.parallel.rank_group import together


class SharedDrafter(TargetDrafter):
    """Drafter whose share each rank holds. A target on a single device is the only rank."""

    state_size: int  # numbers of a state that a step begins with

    def load(self, target: Target) -> None:
        self._target = target

    @property
    def _share(self) -> tuple[int, int]:
        """Returns the rank and the number of ranks."""
        group = self._target.group
        return (0, 1) if group is None else (group.rank, group.size)

    def follow(self, step: DrafterStep) -> None:
        group, model = self._target.group, self._target.model
        assert group is not None
        states = torch.empty(step.num_states, self.state_size, dtype=model.dtype, device=model.device)
        group.spread(states)
        self._follow(step, states)

    def _follow(self, step: DrafterStep, states: Tensor) -> None:
        """Computes the part of a rank other than 0. states: [num_states, state_size]."""
        self._compute(step, states)

    def _on_all_ranks(self, step: DrafterStep, states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the result of ``_compute`` at rank 0. states: [num_states, state_size]."""
        with self._together(step, states):
            return self._compute(step, states)

    @contextmanager
    def _together(self, step: DrafterStep, states: Tensor) -> Iterator[None]:
        """Runs rank 0's part of a step with these states, which the other ranks get, together with theirs."""
        group, tables = self._target.group, self._target.tables
        with together(group, tables, replace(step, drafter=self.number)):
            if group is not None:
                group.spread(states.contiguous())
            yield

    @abstractmethod
    def _compute(self, step: DrafterStep, states: Tensor) -> tuple[Tensor, Tensor]:
        """Computes this rank's part of a step, with its exchanges.

        Returns:
            states [num_states, state_size] after what was fed, and logits [num_states, vocab_size] of the
            next tokens, at rank 0 alone; no rows unless they are wanted.
        """


class SharedHead(SharedDrafter, ChainDrafter):
    """Shared head whose chains a device may make by itself."""

    def _follow(self, step: DrafterStep, states: Tensor) -> None:
        if step.reads_verdicts:
            self._after_verdicts(step, states, ChoiceInput.without_choice(step.positions), None)
        elif step.positions:
            self._chained(step, states, ChoiceInput.without_choice(step.positions))
        else:
            self._compute(step, states)

    @abstractmethod
    def _chained(self, step: DrafterStep, states: Tensor, choice: ChoiceInput) -> Tensor:
        """Computes this rank's part of chains, without a wait for the device.

        Args:
            step: step with the positions of each chain.
            states: [num_states, state_size] states from which the first tokens are chosen.
            choice: choosing rows of the first tokens; other ranks choose nothing.

        Returns:
            ``DraftChains.found``.
        """

    def _after_verdicts(
        self, step: DrafterStep, states: Tensor, choice: ChoiceInput, result: StepResult[Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Computes this rank's part of chains after Verdicts that the device of rank 0 has found.

        Arguments: as for ``_chained`` and ``verdicts_in``.

        Returns:
            ``DraftChains.found``, and what ``read_verdicts`` has told.
        """
        raise NotImplementedError  # a head that feeds no token sends no such step
