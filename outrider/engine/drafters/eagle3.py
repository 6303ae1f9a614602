"""EAGLE-3: a head that reads three layers of the target at every token, and drafts token by token.

Its cache lies beside the target's, in the same blocks: what the target shares, frees or computes again, the
head does too. At the slot of a position it keeps what it makes of the target's states there and of the token
after. What it makes of its own drafted tokens lies beyond, and is written anew once these stand.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from outrider.decoding.draft import Draft
from outrider.engine.asked import Asked, Text
from outrider.engine.cache.paged_cache import KeyValues
from outrider.engine.drafters.beside_target import BesideTarget, Fed, Target, feed_of
from outrider.engine.drafters.eagle3_head import Eagle3Head, Eagle3Shape, built, network_tensors, rotary
from outrider.engine.drafters.trees import Trees, with_room
from outrider.engine.forward.attention import Paged
from outrider.engine.forward.batch import Batch
from outrider.engine.forward.graphs import Graphs, captured_sizes
from outrider.engine.forward.linear import optimize_for_cpu
from outrider.engine.forward.output import ForwardOutput
from outrider.engine.loading.head_checkpoint import HeadCheckpoint
from outrider.engine.settings import EngineSettings
from outrider.engine.step_input import Feed
from outrider.pace.settings import MAX_DEPTH


class Eagle3(BesideTarget):
    """Trees of any depth: the nodes of a position take one pass together."""

    may_stand_beside_ranks = True

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._checkpoint = HeadCheckpoint(settings)
        self._shape = Eagle3Shape.of(self._checkpoint)
        self.hidden_layers = self._shape.hidden_layers
        self.cache_shapes = (self._shape.cache,)
        self.weight_bytes = self._checkpoint.weight_bytes
        self.reads_embedding = "embed_tokens.weight" not in self._checkpoint.tensors
        self.reads_projection = "lm_head.weight" not in network_tensors(self._checkpoint.tensors)
        self._graphs: Graphs | None = None
        self._newest: dict[Text, Tensor] = {}  # the head's state at the last token that the target has cached

    def load(self, target: Target) -> None:
        tensors, model = self._checkpoint.tensors, target.model
        self._target = target
        self._vocab_size = self._checkpoint.target.vocab_size
        self._head: Eagle3Head = built(self._checkpoint, self._shape, model)
        self._rotary = rotary(self._shape, model.device)
        self._token_ids = _token_ids(self._checkpoint, self._head.lm_head, model.device)
        self._embedding = target.embedding
        if "embed_tokens.weight" in tensors:
            own = tensors["embed_tokens.weight"].to(model.device, model.dtype)
            self._embedding = nn.Embedding(len(own), own.shape[1], _weight=own)
        size = self._shape.layer.hidden_size
        if self._embedding.weight.shape[1] != size:
            raise self._checkpoint.refusal(
                f"hidden_size={size} must be {self._embedding.weight.shape[1]}, the embedding's"
            )
        self._projection = self._head.lm_head or target.projection
        if model.device.type == "cpu":
            optimize_for_cpu(self._head)
            self._projection = self._head.lm_head or self._projection
        del self._checkpoint

    def allocate(self, num_blocks: int) -> None:
        target = self._target
        self._cache = KeyValues(
            {0: self._shape.cache},
            num_blocks,
            target.settings.block_size,
            target.model.dtype,
            target.model.device,
        )

    def capture(self) -> tuple[str, ...]:
        model = self._target.model
        # What the graphs read: the states of a pass, in front of its padding.
        most = self._target.settings.max_sequences * (1 + MAX_DEPTH)
        rows = captured_sizes(most)[-1]
        self._states = torch.zeros(
            rows, self._shape.layer.hidden_size, dtype=model.dtype, device=model.device
        )
        self._graphs = self._target.captured(self._compute)
        return super().capture() if self._graphs is None else self._graphs.slow_because

    def take_in(self, fed: Sequence[Fed]) -> None:
        """Whether or not a Draft is wanted: the next one reads all that came before."""
        feeds = []
        for one in fed:
            first, sequence = one.start + 1, one.sequence
            tokens = sequence.tokens[first : first + len(one.hidden)]
            feeds.append(feed_of(sequence, tokens, one.start))
        states = self._pass(feeds, self._head.reduce(torch.cat([one.hidden for one in fed])))
        last = torch.tensor([len(one.hidden) for one in fed]).cumsum(0) - 1
        for one, state in zip(fed, states[last.to(states.device)], strict=True):
            self._newest[one.sequence] = state

    def propose(self, asked: Sequence[Asked]) -> list[Draft]:
        """One pass less than there are positions."""
        asked = [with_room(one, self._target.cache, unwritten=1) for one in asked]
        trees = Trees(asked)
        if trees.growing:
            states = torch.stack([self._newest[asked[index].text] for index in trees.growing])
            while going_on := trees.grow(self._logits(states)):
                states = self._pass(trees.feeds(), states[going_on])
        self.guesses = trees.guesses
        return trees.drafts()

    def forget(self, text: Text) -> None:
        self._newest.pop(text, None)

    def _pass(self, feeds: list[Feed], states: Tensor) -> Tensor:
        """states [num_tokens, hidden_size], each before its token -> those after it"""
        graph = None if self._graphs is None else self._graphs.batch(feeds)
        if graph is None:
            return self._after(self._target.lay_out(feeds), states)
        self._states[: len(states)].copy_(states)
        after = graph.compute(None).hidden
        assert after is not None
        return after[:, 0]

    def _compute(self, batch: Batch) -> ForwardOutput:
        """What a graph captures: states alone, since not all of them are followed by a choice."""
        after = self._after(batch, self._states[: batch.num_tokens])
        finite = torch.ones(len(after), dtype=torch.bool, device=after.device)  # Eagle3Head sees to it
        return ForwardOutput(after[:, :0], after[:, None], finite)

    def _after(self, batch: Batch, states: Tensor) -> Tensor:
        embeddings = self._embedding(batch.token_ids[0])
        rotation = self._rotary(states, batch.position_ids)
        paged = Paged(batch, self._cache, self._target.kernel)
        after: Tensor = self._head(embeddings, states, rotation, paged)
        return after

    def _logits(self, states: Tensor) -> Tensor:
        """[num_rows, vocab_size], -inf at tokens that the head does not know"""
        known: Tensor = self._projection(self._head.before_logits(states))
        if self._token_ids is None:
            return known
        logits = known.new_full((len(known), self._vocab_size), -torch.inf)
        logits[:, self._token_ids] = known
        return logits


def _token_ids(
    checkpoint: HeadCheckpoint, projection: nn.Linear | None, device: torch.device
) -> Tensor | None:
    """Of the tokens that the head's own projection tells apart; None: all of the target's, in their order."""
    tensors, vocabulary = checkpoint.tensors, checkpoint.target.vocab_size
    if "t2d" in tensors:
        checkpoint.check_shape("t2d", (vocabulary,))
    count = vocabulary if projection is None else projection.out_features
    if "d2t" not in tensors:
        if count != vocabulary:
            raise checkpoint.refusal(
                f"it has {count} tokens of the target's {vocabulary}, and no d2t for them"
            )
        return None
    checkpoint.check_shape("d2t", (count,))
    token_ids = torch.arange(count) + tensors["d2t"].long()
    if not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocabulary:
        raise checkpoint.refusal(
            f"d2t names token {int(token_ids.max())}, and the target has {vocabulary} tokens"
        )
    if len({*token_ids.tolist()}) != count:
        raise checkpoint.refusal("d2t names a token twice")
    return token_ids.to(device)
