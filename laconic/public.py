"""The public names of laconic. `laconic` itself imports them at the first use of one."""

from laconic import data, optim
from laconic.codecs import ByName, ByShape, Cast, Codec, ErrorFeedback, Exact, LowRank, Quantized, TopDCT, TopK
from laconic.cost import sent_bytes
from laconic.errors import (
    DesyncError,
    DisagreementError,
    DivergedError,
    LostWorkerError,
    NonFiniteError,
    PlanError,
)
from laconic.guard import Guard
from laconic.ledger import Ledger
from laconic.plans.methods import (
    alone,
    ddp,
    demo,
    diloco,
    frugal,
    hierarchical_sgd,
    post_local_sgd,
    power_sgd,
    qsr,
    quantized_ddp,
    sparse_loco,
    streaming_diloco,
)
from laconic.plans.outer import Nesterov, Optim
from laconic.plans.plan import Plan
from laconic.plans.schedules import Every, Nested, Never, Quadratic, Streaming, Timed
from laconic.plans.text import plan, plan_from_env
from laconic.plans.topology import Groups, World
from laconic.session.attach import attach
from laconic.session.metrics import Health
from laconic.session.observers import StepObserver
from laconic.session.session import Session
from laconic.tools.planner.auto import auto

__all__ = [
    "ByName",
    "ByShape",
    "Cast",
    "Codec",
    "DesyncError",
    "DisagreementError",
    "DivergedError",
    "ErrorFeedback",
    "Every",
    "Exact",
    "Groups",
    "Guard",
    "Health",
    "Ledger",
    "LostWorkerError",
    "LowRank",
    "Nested",
    "Nesterov",
    "Never",
    "NonFiniteError",
    "Optim",
    "Plan",
    "PlanError",
    "Quadratic",
    "Quantized",
    "Session",
    "StepObserver",
    "Streaming",
    "Timed",
    "TopDCT",
    "TopK",
    "World",
    "alone",
    "attach",
    "auto",
    "data",
    "ddp",
    "demo",
    "diloco",
    "frugal",
    "hierarchical_sgd",
    "optim",
    "plan",
    "plan_from_env",
    "post_local_sgd",
    "power_sgd",
    "qsr",
    "quantized_ddp",
    "sent_bytes",
    "sparse_loco",
    "streaming_diloco",
]
