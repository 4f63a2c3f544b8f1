"""Step observers: code that watches a session and has no part in the training.

`laconic compare` reports progress through one, `laconic doctor` injects faults through another; metrics are a third.
The session knows none of them by name. A launcher names the factories of observers in the environment:

    LACONIC_OBSERVERS="laconic.tools.compare.reporter:from_env,mypackage.metrics:observer"
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

if TYPE_CHECKING:
    from laconic.session.session import Session

VARIABLE = "LACONIC_OBSERVERS"

Validation: TypeAlias = float | Tensor | Callable[[], float | Tensor]
"""A validation loss, or a function that computes that of the model as it is."""


class StepObserver:
    """Does nothing at each point of a session's life. Subclass it, and override what you need."""

    def attached(self, session: Session) -> None:
        """Run at the end of `attach`, or of `session.observe`."""

    def before_step(self, session: Session) -> None:
        """Run at the beginning of `optimizer.step()`; the step is `session.step + 1`."""

    def after_step(self, session: Session) -> None:
        """Run when a step is over, weights synchronised; the step is `session.step`."""

    def restarted(self, session: Session) -> None:
        """Run before the next step is prepared, when it does not go on from the last one.

        After `change`, `load_state_dict` and `regroup`.
        """

    def report(self, session: Session, loss: float | Tensor, tokens: int, validation: Validation | None) -> bool:
        """Take what `session.report` was called with; return whether training may stop."""
        return False

    def detached(self, session: Session) -> None:
        """Run at the end of `detach`."""


def check_observers(observers: object) -> list[StepObserver]:
    """Refuse what is no list of observers."""
    given = observers if isinstance(observers, list | tuple) else []
    found = [each for each in given if isinstance(each, StepObserver)]
    if given is not observers or len(found) < len(given):
        raise TypeError(
            f'attach(observers={observers!r}): give a list of laconic.StepObserver, such as [laconic.Guard("warn")].'
        )
    return found


def observers_from_env() -> list[StepObserver]:
    """Make the observers that LACONIC_OBSERVERS names, as "module:function" separated by commas."""
    made: list[StepObserver] = []
    for text in filter(None, map(str.strip, os.environ.get(VARIABLE, "").split(","))):
        module, _, function = text.partition(":")
        try:
            factory = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{VARIABLE}={text!r}: {error}. Write module:function, separated by commas; the function takes no "
                "argument and returns a laconic.StepObserver, or None."
            ) from error
        observer = factory()
        if isinstance(observer, StepObserver):
            made.append(observer)
        elif observer is not None:
            raise ValueError(
                f"{VARIABLE}={text!r}: it returned {observer!r}, which is no laconic.StepObserver, nor None."
            )
    return made
