"""How gradients reach the other workers: one protocol, and what its three implementations share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from laconic.checks.finite import NonFiniteCheck
from laconic.checks.headers import Headers
from laconic.codecs import Codec, Exact
from laconic.codecs.feedback import has_feedback
from laconic.codecs.routing import routed
from laconic.comm.averaging import write, written
from laconic.comm.groups import Levels
from laconic.comm.queue import CollectiveQueue
from laconic.exchange import Averaged, Exchange, State
from laconic.plans.plan import Plan
from laconic.plans.schedules import Sync
from laconic.session.carry_over import CARRIED, deliver
from laconic.session.grad_scaler import ScaledSteps
from laconic.session.health import Sketcher, Watched
from laconic.session.loss_scale import LossScale
from laconic.session.model_state import ModelState


class GradientPath(Protocol):
    """Averages gradients for one kind of model: DDP (`ddp.py`), FSDP2 (`fsdp.py`), a bare module (`module.py`)."""

    @property
    def in_backward(self) -> bool:
        """Whether gradients are averaged inside backward, and so also in a closure of `optimizer.step`."""
        ...

    @property
    def joining(self) -> bool:
        """Whether some workers may have run out of data, so that only gradients can be averaged: DDP's `join()`."""
        ...

    def check_plan(self, plan: Plan) -> None:
        """Refuse a plan that this kind of model cannot follow."""
        ...

    def install(self) -> None:
        """Install the hooks. Nothing may be refused after it."""
        ...

    def begin_step(self, sync: Sync | None, codec: Codec | None) -> None:
        """Prepare for the next step, in which gradients are averaged as `sync` says, or not at all for None."""
        ...

    def average_now(self, optimizers: Sequence[ScaledSteps]) -> Headers | None:
        """Average the gradients of these optimizers early, where they are averaged at the optimizer's step."""
        ...

    def before_optimizer(self, optimizer: ScaledSteps) -> Headers | None:
        """Return once the gradients of this optimizer are averaged, with the headers that were exchanged for it."""
        ...

    def after_optimizer(self) -> None:
        """Complete a step whose gradients were averaged: DDP models then get the first worker's buffers."""
        ...

    def layout(self) -> dict[str, list[list[str]]]:
        """Return the names of the parameters that are averaged together, by level: a resumed run repeats them."""
        ...

    def repeat_layout(self, layout: Mapping[str, Any]) -> None:
        """Average the next gradients in this layout."""
        ...

    def detach(self) -> None:
        """Remove the hooks."""
        ...


class GradientAverager:
    """Averages buckets of gradients through the codec of the step, and checks that they are finite."""

    def __init__(
        self,
        model_state: ModelState,
        levels: Levels,
        check: NonFiniteCheck,
        compress_alone: bool,
        scaler: GradScaler | None = None,
    ) -> None:
        self.model_state = model_state
        self.levels = levels
        self.check = check
        self._compress_alone = compress_alone
        self.probe: Sketcher | None = None
        """What measures the exchanges among all workers, if a guard is on."""
        self._codec: Codec = Exact()
        self._peers = levels.world.peers
        self._scale = LossScale(scaler, model_state) if scaler is not None and scaler.is_enabled() else None

    @property
    def lacks_scale(self) -> bool:
        """Whether the codec keeps residuals of gradients, and their loss scale is unknown."""
        return self._scale is None and has_feedback(self._codec)

    def equalise_loss_scale(self) -> None:
        """Let all workers have one loss scale, if the session knows it: scaled gradients are averaged."""
        if self._scale is not None:
            self._scale.equalise(self.levels.world)

    def begin_step(self, sync: Sync | None, codec: Codec | None) -> None:
        """Use this codec among these workers in the next step."""
        if sync is not None and codec is not None:
            queue = self.levels[sync.level]
            self._codec, self._peers = self.chosen(codec, queue), queue.peers
        if self._scale is not None:
            self._scale.begin_step()

    def chosen(self, codec: Codec, queue: CollectiveQueue) -> Codec:
        """Return the codec that runs: a worker alone has no peer to save bytes for, unless `compress_alone`."""
        chosen = Exact() if queue.workers == 1 and not self._compress_alone else routed(codec)
        return Watched(chosen, self.probe) if self.probe is not None and queue is self.levels.world else chosen

    def average(self, bucket: dict[str, Tensor]) -> Exchange[Averaged]:
        """Average a bucket of gradients, and write the means over it."""
        if self._scale is not None:
            self._scale.rescale()
        codec, peers, state = self._codec, self._peers, self.model_state.state["gradient"]

        def average() -> Exchange[Averaged]:
            if CARRIED in state:
                return deliver(bucket, state, codec, peers)
            return codec.average(bucket, state, peers, reuse=True)

        end = yield from self.check.watch(bucket, average)
        if end.mean is not bucket:
            write(bucket, end.mean)
        return end

    def encode(self, tensors: dict[str, Tensor], state: State, codec: Codec) -> Exchange[Averaged]:
        """Average tensors through a codec, without a check, and write the means over them."""
        if self._scale is not None:
            self._scale.rescale()
        return (yield from written(deliver(tensors, state, codec, self.levels.world.peers), tensors))


def sparse_tables(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """Find the embeddings whose gradients are sparse, by name."""
    tables = {name: m for name, m in model.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    return {name: table for name, table in tables.items() if table.sparse}
