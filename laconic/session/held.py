"""The parameters that the optimizers hold, which `optimizer.add_param_group` may change at any time."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch.optim import Optimizer

from laconic.session.model_state import ModelState

logger = logging.getLogger(__name__)


class HeldParameters:
    """Notes what each optimizer holds, among the facts that all workers must have in common."""

    def __init__(self, model_state: ModelState, optimizers: Sequence[Optimizer]) -> None:
        self._model_state = model_state
        self._optimizers = optimizers
        self._sizes: list[int] = []
        self._strangers = 0
        self.facts: dict[str, object] = {}
        self.refresh()

    def refresh(self) -> None:
        """Look again, if a group was added or has grown."""
        sizes = [len(group["params"]) for each in self._optimizers for group in each.param_groups]
        if sizes == self._sizes:
            return
        self._sizes = sizes
        self._model_state.refresh()
        names, strangers = self._model_state.all_names(), 0
        for index, each in enumerate(self._optimizers):
            held = [names.get(id(p), "?") for group in each.param_groups for p in group["params"]]
            strangers += held.count("?")
            self.facts[f"optimizer {index}"] = f"{type(each).__name__} of {', '.join(held)}"
        self._model_state.state_also(self.facts)
        if strangers > self._strangers:
            logger.warning(
                "the optimizer holds %d parameters that are not the model's: they are not averaged, and differ between "
                "the workers. Make them part of the model that attach is given.",
                strangers,
            )
        self._strangers = strangers
