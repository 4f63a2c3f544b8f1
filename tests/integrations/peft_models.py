"""A small Llama made from a config, with peft's adapters, on a base that is dense or quantised."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from tests.workers import PRELOADED

if importlib.util.find_spec("peft"):
    PRELOADED += ["peft", "transformers.models.llama.modeling_llama"]

TARGETS = ["q_proj", "v_proj", "down_proj"]
WORDS = 64
BASES = ("dense", "torchao int8", "bitsandbytes int8", "bitsandbytes nf4")


def llama(wide: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    width = 512 if wide else 64
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "vocab_size": WORDS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=False))


def adapted(base: str = "dense", dora: bool = False, seed: int = 0, wide: bool = False) -> Any:
    """Freeze a Llama, quantised as `base` says, and add adapters of rank 4. `seed` is that of the adapters."""
    from peft import LoraConfig, get_peft_model

    model = llama(wide)
    if base == "torchao int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model.model, Int8WeightOnlyConfig())
    elif base != "dense":
        _use_bitsandbytes(model, base)
    torch.manual_seed(seed)
    config = LoraConfig(r=32 if wide else 4, lora_alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM", use_dora=dora)
    with warnings.catch_warnings():  # what peft calls, and that a base made without a checkpoint cannot be merged
        warnings.simplefilter("ignore")
        return get_peft_model(model, config)


def _use_bitsandbytes(model: Any, base: str) -> None:
    """Replace the layers as transformers does when it loads a model with load_in_8bit or load_in_4bit."""
    import bitsandbytes as bnb

    for name, layer in list(model.model.named_modules()):
        if not isinstance(layer, nn.Linear):
            continue
        sizes, weight = (layer.in_features, layer.out_features), layer.weight.data
        if base == "bitsandbytes int8":
            made = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
            made.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
            model.is_loaded_in_8bit = True
        else:
            made = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.float32)
            made.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
            model.is_loaded_in_4bit = True
        parent, _, child = name.rpartition(".")
        setattr(model.model.get_submodule(parent), child, made.to("cpu"))  # the move quantises


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): p for name, p in model.named_parameters() if p.requires_grad}


def batch(step: int, worker: int) -> dict[str, Tensor]:
    """Return the tokens of a step and worker; every third step has the same."""
    made = torch.Generator().manual_seed(100 * (step % 3) + worker)
    ids = torch.randint(0, WORDS, (2, 12), generator=made)
    return {"input_ids": ids, "labels": ids}
