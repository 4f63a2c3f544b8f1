"""Training runs that continue when workers die, stop or join.

    from laconic import elastic

    world = elastic.join("node-0:29400", id=3, least=2)
    session = laconic.attach(laconic.diloco(period=100), model, optimizer)     # a bare module, attached as if alone
    with elastic.Run(world, session, model, optimizer) as run:
        for step in run.steps(10_000):
            with step:
                loss(model, batch(step.number, step.worker, step.workers)).backward()
                optimizer.step()
                optimizer.zero_grad()

When a worker dies or stops, the others go back to the last committed step and continue without it. New and returning
workers join after a synchronisation. Only a torch store must outlive the workers.
"""

from laconic.elastic.history import Committed, Samples
from laconic.elastic.run import Run, Step
from laconic.elastic.world import ElasticWorld, join, serve
from laconic.errors import (
    DamagedStateError,
    ElasticError,
    EndedError,
    QuorumError,
    ReplacedError,
    StoreLostError,
)

__all__ = [
    "Committed",
    "DamagedStateError",
    "ElasticError",
    "ElasticWorld",
    "EndedError",
    "QuorumError",
    "ReplacedError",
    "Run",
    "Samples",
    "Step",
    "StoreLostError",
    "join",
    "serve",
]
