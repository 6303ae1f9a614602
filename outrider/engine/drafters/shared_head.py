"""Heads of a tensor-parallel target: each rank holds a share of the head, as it does of the target.

Rank 0 alone knows the sequences, chooses tokens and grows Drafts. All ranks compute each step of the head
together. For a step, rank 0 sends the tokens to feed and their input states, which it selects from the output
states of the previous step. The other ranks keep only their share of the head's cache.
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
    """Drafter that is divided over the ranks of the target. A target on a single device has one rank."""

    state_size: int  # size of an input state of a step

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
        """Computes the part of a rank other than 0. states: [num_states, state_size] input states."""
        self._compute(step, states)

    def _on_all_ranks(self, step: DrafterStep, states: Tensor) -> tuple[Tensor, Tensor]:
        """Runs ``_compute`` at all ranks; returns rank 0's result. states: [num_states, state_size]."""
        with self._together(step, states):
            return self._compute(step, states)

    @contextmanager
    def _together(self, step: DrafterStep, states: Tensor) -> Iterator[None]:
        """Sends a step and its states to the other ranks, which run their part while rank 0 runs its own."""
        group, tables = self._target.group, self._target.tables
        with together(group, tables, replace(step, drafter=self.number)):
            if group is not None:
                group.spread(states.contiguous())
            yield

    @abstractmethod
    def _compute(self, step: DrafterStep, states: Tensor) -> tuple[Tensor, Tensor]:
        """Computes this rank's part of a step, including the communication between ranks.

        Returns:
            states [num_states, state_size] after the fed tokens, and at rank 0 logits
            [num_states, vocab_size] of the next tokens. Logits have no rows if the step does not want them.
        """


class SharedHead(SharedDrafter, ChainDrafter):
    """Shared head whose chains may be drafted entirely on the device."""

    def _follow(self, step: DrafterStep, states: Tensor) -> None:
        if step.reads_verdicts:
            self._after_verdicts(step, states, ChoiceInput.without_choice(step.positions), None)
        elif step.positions:
            self._chained(step, states, ChoiceInput.without_choice(step.positions))
        else:
            self._compute(step, states)

    @abstractmethod
    def _chained(self, step: DrafterStep, states: Tensor, choice: ChoiceInput) -> Tensor:
        """Launches this rank's part of drafting chains, without waiting for the device.

        Args:
            step: step that gives the positions of each chain.
            states: [num_states, state_size] states from which the first tokens are chosen.
            choice: input of the choice of the first tokens; ranks other than 0 choose nothing.

        Returns:
            ``DraftChains.found``.
        """

    def _after_verdicts(
        self, step: DrafterStep, states: Tensor, choice: ChoiceInput, result: StepResult[Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Launches this rank's part of chains after Verdicts that only the device of rank 0 knows.

        Arguments: as for ``_chained`` and ``verdicts_in``.

        Returns:
            ``DraftChains.found``, and int32 [num_sequences, len(TOLD)] from ``read_verdicts``.
        """
        raise NotImplementedError  # a head that feeds no tokens never sends such a step
