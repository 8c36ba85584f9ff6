"""peft: adapters on a frozen model, merged and saved."""

from __future__ import annotations

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.clients.way import Program, Way

PACKAGE = "peft"


def base() -> GPT2LMHeadModel:
    """A GPT-2 of two layers with random weights."""
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=60, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def adapted() -> PeftModel:
    """The model with LoRA on its attention, of which only the adapters train."""
    torch.manual_seed(2)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], lora_dropout=0.0, task_type="CAUSAL_LM")
    return get_peft_model(base(), config)


def train(way: Way, net: torch.nn.Module, steps: int = 4) -> None:
    """A loop over random tokens."""
    optimizer = torch.optim.AdamW((p for p in net.parameters() if p.requires_grad), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for number in range(steps):
        tokens = torch.randint(0, 60, (4 if number < steps - 1 else 3, 10), generator=generator)
        loss = net(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        way.note("loss", loss)


def lora(way: Way) -> None:
    """Training, saved and loaded adapters, merged weights."""
    net = way.optimize(adapted())  # changed
    train(way, net)
    net.save_pretrained(f"{way.folder}/adapter")
    loaded = PeftModel.from_pretrained(base(), f"{way.folder}/adapter")
    way.parameters(loaded)
    way.parameters(net.merge_and_unload())


def inside(way: Way) -> None:
    """The base model is compiled, and gets its adapters afterwards."""
    torch.manual_seed(2)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], lora_dropout=0.0, task_type="CAUSAL_LM")
    net = get_peft_model(way.optimize(base()), config)  # changed
    train(way, net, 3)
    way.parameters(net)


PROGRAMS: dict[str, Program] = {"LoRA": lora, "LoRA in a compiled model": inside}
