"""The list of contestants, with the settings of each in words."""

from __future__ import annotations

from functools import partial

import laconic
from contestants import others, ours, torch_own
from contestants.contract import Contestant


def _power_sgd(rank: int, start: int, fp16: bool, swept: bool) -> Contestant:
    name = f"torch PowerSGD, rank {rank}{', fp16' * fp16}{f', start {start}' * (start > 2)}"
    chosen = "the earliest start it allows" if start == 2 else "10% of the steps, as it suggests"
    wrapped = ", fp16_compress_wrapper" if fp16 else ""
    settings = f"powerSGD_hook: rank {rank}, start_powerSGD_iter={start} ({chosen}){wrapped}"
    return Contestant(
        name, "peer", settings, partial(torch_own.power_sgd, rank=rank, start=start, fp16=fp16), swept=swept
    )


def _post_local(period: int, swept: bool) -> Contestant:
    settings = f"post_localSGD_hook, PostLocalSGDOptimizer: period {period} from the first step"
    build = partial(torch_own.post_local_sgd, period=period, start=0)
    return Contestant(f"torch post-local SGD, {period}", "peer", settings, build, swept=swept)


def _accelerate(period: int, swept: bool) -> Contestant:
    build = partial(others.accelerate_local_sgd, period=period)
    settings = f"LocalSGD(local_sgd_steps={period})"
    return Contestant(f"accelerate LocalSGD, {period}", "peer", settings, build, "accelerate", swept=swept)


def _torchft_local(period: int, swept: bool) -> Contestant:
    build = partial(others.torchft_local_sgd, period=period)
    settings = f"LocalSGD(sync_every={period}), lighthouse and managers over the link, init_sync=False"
    return Contestant(f"torchft LocalSGD, {period}", "peer", settings, build, "torchft", swept=swept)


def _torchft_diloco(period: int, lr: float, momentum: float, swept: bool) -> Contestant:
    build = partial(others.torchft_diloco, period=period, lr=lr, momentum=momentum)
    source = "its example's" if (lr, momentum) == (0.7, 0.9) else "tuned"
    settings = f"DiLoCo(sync_every={period}), outer SGD lr {lr}, Nesterov {momentum} ({source})"
    return Contestant(f"torchft DiLoCo, {period}, {lr}, {momentum}", "peer", settings, build, "torchft", swept=swept)


def _hivemind(period: int, swept: bool) -> Contestant:
    build = partial(others.hivemind_local_updates, period=period, matchmaking_s=3.0)
    settings = f"Optimizer: local updates, Uniform8BitQuantization, {period} steps an epoch, matchmaking_time=3"
    return Contestant(f"hivemind 8-bit, {period}", "peer", settings, build, "hivemind", swept=swept)


def _deepspeed(freeze: int, swept: bool) -> Contestant:
    build = partial(others.deepspeed_one_bit_adam, freeze=freeze)
    settings = f"OneBitAdam(freeze_step={freeze}), back end 'compressed', numpy for its bit-packing extension"
    return Contestant(f"DeepSpeed 1-bit Adam, {freeze}", "peer", settings, build, "deepspeed", swept=swept)


def _ours(plan: str, settings: str, swept: bool = False) -> Contestant:
    return Contestant(plan, "ours", settings, partial(ours.attached, plan=plan), swept=swept)


CONTESTANTS = (
    Contestant("alone", "baseline", "no communication; each worker's own loss", torch_own.alone),
    Contestant("torch DDP", "peer", "as it is, one bucket", torch_own.ddp, seconds=420.0),
    Contestant("torch DDP, bf16", "peer", "bf16_compress_hook", torch_own.bf16, seconds=200.0),
    Contestant("torch DDP, fp16", "peer", "fp16_compress_hook", torch_own.fp16, seconds=200.0),
    _power_sgd(4, start=2, fp16=False, swept=True),
    _power_sgd(4, start=2, fp16=True, swept=False),
    _power_sgd(8, start=2, fp16=True, swept=False),
    _power_sgd(16, start=2, fp16=True, swept=True),
    _power_sgd(4, start=30, fp16=True, swept=True),
    _post_local(8, swept=True),
    _post_local(16, swept=False),
    _post_local(32, swept=True),
    _post_local(64, swept=False),
    _accelerate(8, swept=True),
    _accelerate(16, swept=True),
    _accelerate(64, swept=False),
    _torchft_local(16, swept=True),
    _torchft_local(64, swept=False),
    _torchft_diloco(100, 0.7, 0.9, swept=True),
    _torchft_diloco(16, 0.7, 0.9, swept=True),
    _torchft_diloco(16, 0.9, 0.5, swept=False),
    Contestant(
        "torchft Streaming DiLoCo, 20",
        "peer",
        "DiLoCo(sync_every=20): 5 fragments, fragment_sync_delay=3, fragment_update_alpha=0.5, lr 0.9, Nesterov 0.5",
        partial(others.torchft_diloco, period=20, lr=0.9, momentum=0.5, by_block=True, delay=3, alpha=0.5),
        "torchft",
    ),
    _hivemind(32, swept=False),
    _hivemind(100, swept=True),
    _deepspeed(10, swept=True),
    _deepspeed(45, swept=False),
    _ours("frugal(bytes='120x')", "2-bit weight deltas with error feedback, streamed in fragments, period 8"),
    _ours("frugal(bytes='120x', delay=1)", "the same, each fragment sent while the next step is computed"),
    _ours(
        "streaming_diloco(period=4, fragments=4, delay=0)",
        "2-bit weight deltas with error feedback, streamed in fragments, period 4",
    ),
    _ours("diloco()", "2-bit weight deltas with error feedback, every 16 steps"),
    _ours("power_sgd(rank=20)", "factors of rank 20 in 4 bits with error feedback"),
    _ours("quantized_ddp(bits=4)", "gradients in 4 bits with error feedback"),
    _ours("post_local_sgd(period=16)", "weights every 16 steps, fp32"),
    _ours("post_local_sgd(period=64)", "weights every 64 steps, fp32", swept=True),
)
BY_NAME = {each.name: each for each in CONTESTANTS}


def named(name: str) -> Contestant:
    """Return the contestant of a name, which may also be any plan of ours."""
    return BY_NAME[name] if name in BY_NAME else _ours(repr(laconic.plan(name)), "a plan of --contestants")
