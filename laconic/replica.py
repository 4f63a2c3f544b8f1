"""One worker's copy of the model, and how it is brought together with the others'."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from laconic.averaging import mean_of, run_all, written
from laconic.bucket_stream import BucketStream
from laconic.buckets import as_laid_out, in_buckets
from laconic.codecs import Codec, Exact
from laconic.codecs.codec import wide_dtype
from laconic.cost import routed
from laconic.plans import Plan
from laconic.schedules import Payload
from laconic.wires.group import Conductor
from laconic.wires.wire import Averaged, Exchange, Mean, State


class Replica:
    """Parameters by name, what the codecs remember of them, and the conductor that carries their averages."""

    def __init__(self, model: nn.Module, conductor: Conductor) -> None:
        self.conductor = conductor
        self.stream = BucketStream(conductor)
        self.params = {clean(name): p for name, p in model.named_parameters() if p.requires_grad}
        self.buffers = {clean(name): b for name, b in model.named_buffers() if b.is_floating_point()}
        self.name_of = {id(p): name for name, p in self.params.items()}
        self.state: dict[str, State] = {"gradient": {}, "weights": {}, "outer": {}}
        self.anchor: dict[str, Tensor] | None = None
        self.solo_exact = True
        """Whether a world of one sends exactly; benchmarks of the codecs themselves say no."""
        self._gradient_buckets = in_buckets(self.params)
        weights = {**self.params, **{f"buffer:{name}": b for name, b in self.buffers.items()}}
        self._weights = weights
        self._weight_buckets = in_buckets(weights)

    def average_bucket(
        self, codec: Codec, params: Sequence[Tensor], grads: Sequence[Tensor], flat: Tensor, last: bool
    ) -> Future[Tensor]:
        """Start to average one DDP bucket; the future's value is `flat`, with the means in it."""
        tensors = {self.name_of[id(p)]: as_laid_out(g, p) for p, g in zip(params, grads, strict=True)}

        def begin(bucket: Mapping[str, Tensor]) -> Exchange:
            return self._routed(codec).average(bucket, self.state["gradient"], reuse=True)

        return self.stream.take(tensors, flat, last, begin)

    def average_gradients(self, codec: Codec) -> None:
        """Average `.grad` of every parameter, and wait for it. A gradient that is None here counts as zero."""
        absent = self._absent_everywhere()
        grads = {}
        for name, p in self.params.items():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            elif p.grad.is_sparse:
                p.grad = p.grad.to_dense()
            grads[name] = p.grad
        exchanges = []
        for names in self._gradient_buckets:
            bucket = {name: grads[name] for name in names}
            exchanges.append(written(self._routed(codec).average(bucket, self.state["gradient"], reuse=True), bucket))
        run_all(self.conductor, exchanges, Payload.GRADIENT)
        for name in absent:
            self.params[name].grad = None

    def average_weights(self, plan: Plan) -> None:
        """Bring the workers' weights together, as the plan has it, and wait for it."""
        if self.anchor is None:
            exchanges = [mean_of(self._some(names)) for names in self._weight_buckets]
        else:
            exchanges = [self._delta_of(plan, names) for names in self._gradient_buckets]
            exchanges += [mean_of(self._some(names)) for names in in_buckets(self._named_buffers())]
        run_all(self.conductor, exchanges, Payload.WEIGHTS)

    def drop_anchor(self) -> None:
        """Remember the weights of now, which all workers share, as what deltas are taken from."""
        self.anchor = {name: p.detach().to(wide_dtype(p.dtype), copy=True) for name, p in self.params.items()}

    def broadcast(self) -> None:
        """Give every worker the weights and buffers of the first, as DDP does when it is made."""
        if self.conductor.workers == 1:
            return
        group = self.conductor.group
        first = dist.get_process_group_ranks(group)[0]
        with torch.no_grad():
            for t in self._weights.values():
                dense = t.detach().contiguous()
                dist.broadcast(dense, src=first, group=group)
                t.copy_(dense)

    def _routed(self, codec: Codec) -> Codec:
        """Choose the codec that runs: a worker alone has nobody to be brief with."""
        return Exact() if self.conductor.workers == 1 and self.solo_exact else routed(codec)

    def _named_buffers(self) -> dict[str, Tensor]:
        return {name: t for name, t in self._weights.items() if name.startswith("buffer:")}

    def _some(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self._weights[name].detach() for name in names}

    def _delta_of(self, plan: Plan, names: Iterable[str]) -> Exchange:
        assert self.anchor is not None
        anchor = {name: self.anchor[name] for name in names}
        delta = {name: a - self.params[name].detach().to(a.dtype) for name, a in anchor.items()}
        end = yield from self._routed(plan.codec).average(delta, self.state["weights"], reuse=True)
        if bool(end.finite()):  # else nobody moves: the round is void on every worker alike
            plan.outer.step(anchor, end.mean, self.state["outer"])
            for name, a in anchor.items():
                self.params[name].detach().copy_(a)
        return end

    def _absent_everywhere(self) -> list[str]:
        """Names whose gradient is None on every worker: they stay None, so that no optimizer moves them."""
        here = torch.tensor([p.grad is not None for p in self.params.values()], dtype=torch.float32)
        if self.conductor.workers > 1:
            here = here.to(next(iter(self.params.values())).device)
            here = self.conductor.run(_flags(here), "control").mean["flags"]
        return [name for name, used in zip(self.params, here.tolist(), strict=True) if not used]

    def state_dict(self) -> dict[str, Any]:
        """What this worker must remember besides weights: codec states, the outer state, the anchor."""
        return {"state": _saved(self.state), "anchor": self.anchor, "layout": self.stream.layout}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        devices = {name: p.device for name, p in self.params.items()}
        self.state = _copied(saved["state"], devices)
        self.anchor = None if saved["anchor"] is None else _copied(saved["anchor"], devices)
        self.stream.repeat(saved["layout"])


def clean(name: str) -> str:
    """Drop what wrappers put into a parameter's name.

    >>> clean("module._orig_mod.layers.0.weight")
    'layers.0.weight'
    """
    name = name.removeprefix("module.")
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _flags(here: Tensor) -> Exchange:
    mean = yield Mean(here)
    return Averaged({"flags": mean}, dict, lambda: torch.tensor(True))


def _saved(nest: Any) -> Any:
    """Leave out what begins with an underscore: caches that are made anew."""
    if isinstance(nest, Mapping):
        return {key: _saved(value) for key, value in nest.items() if not key.startswith("_")}
    return nest


def _copied(nest: Any, devices: Mapping[str, torch.device]) -> Any:
    """Copy a nest of dicts and tensors, putting each tensor where the parameter of its name is."""
    if isinstance(nest, Mapping):
        return {
            key: value.to(devices.get(key, value.device), copy=True)
            if isinstance(value, Tensor)
            else _copied(value, devices)
            for key, value in nest.items()
        }
    return nest
