"""Hugging Face's Trainer: callbacks, evaluation, accumulation, clipping, resuming, generation."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks.clients.way import Program, Way

PACKAGE = "transformers"
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_right", "epoch", "step")


def bert() -> BertForSequenceClassification:
    """A BERT of two layers with random weights."""
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return BertForSequenceClassification(config)


def sentences(number: int, length: int = 12, vocabulary: int = 100) -> list[dict[str, torch.Tensor]]:
    """Random tokens with a class each."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, vocabulary, (number, length), generator=generator)
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0] % 2} for row in tokens]


def arguments(way: Way, **more: Any) -> TrainingArguments:
    """What all of these programs have in common."""
    common = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "seed": 3}
    common |= {"adam_epsilon": 1e-4}  # a gradient that is zero but for rounding (of a bias of keys) decides nothing
    common |= {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "dataloader_pin_memory": False}
    return TrainingArguments(way.folder, **{**common, "save_strategy": "no", **more})


def note(way: Way, trainer: Trainer) -> None:
    """Keep what the Trainer logged, and the trained parameters."""
    for entry in trainer.state.log_history:
        for name in LOGGED:
            if name in entry:
                way.note(name, float(entry[name]))
    way.parameters(trainer.model)


def right(predicted: Any) -> dict[str, float]:
    """A metric."""
    return {"right": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def training(way: Way) -> None:
    """Accumulation, clipping, a schedule, evaluation with a metric, and a last batch that is smaller."""
    model = way.optimize(bert())  # changed
    given = arguments(way, num_train_epochs=2, gradient_accumulation_steps=2, max_grad_norm=0.5, eval_strategy="epoch")
    data = sentences(22)
    trainer = Trainer(model, given, train_dataset=data, eval_dataset=data[:6], compute_metrics=right)
    trainer.train()
    note(way, trainer)


def callbacks(way: Way) -> None:
    """Callbacks that count and that stop early; the best model is loaded at the end."""
    seen: list[str] = []

    class Counting(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append(f"step {state.global_step}")

        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append(f"evaluated at {state.global_step}")

    model = way.optimize(bert())  # changed
    plan = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    given = arguments(way, max_steps=12, load_best_model_at_end=True, metric_for_best_model="eval_loss", **plan)
    stopping = EarlyStoppingCallback(early_stopping_patience=2)
    data = sentences(16)
    trainer = Trainer(model, given, train_dataset=data, eval_dataset=data[:8], callbacks=[Counting(), stopping])
    trainer.train()
    way.note("calls", seen)
    note(way, trainer)


def resuming(way: Way) -> None:
    """A second Trainer with a fresh model goes on from the first one's checkpoint."""
    data = sentences(16)
    for steps in (3, 6):
        model = way.optimize(bert())  # changed
        given = arguments(way, max_steps=steps, save_strategy="steps", save_steps=3, lr_scheduler_type="constant")
        trainer = Trainer(model, given, train_dataset=data)
        trainer.train(resume_from_checkpoint=steps == 6)
        note(way, trainer)
    again = BertForSequenceClassification.from_pretrained(f"{way.folder}/checkpoint-6")
    way.note("class", type(again).__name__)
    way.parameters(again)


def bfloat16(way: Way) -> None:
    """`bf16=True`, autocast around the model."""
    way.loose = True
    model = way.optimize(bert())  # changed
    trainer = Trainer(model, arguments(way, max_steps=3, bf16=True), train_dataset=sentences(12))
    trainer.train()
    note(way, trainer)


def generation(way: Way) -> None:
    """A language model trains, and then generates, greedily."""
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=60, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=None
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = way.optimize(GPT2LMHeadModel(config))  # changed
    data = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in sentences(12, 8, 60)]
    trainer = Trainer(model, arguments(way, max_steps=3), train_dataset=data)
    trainer.train()
    note(way, trainer)
    prompt = torch.tensor([[1, 5, 9], [1, 7, 3]])
    mask = torch.ones_like(prompt)
    message = trainer.model.eval().generate(
        prompt, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    way.note("generated", message)


PROGRAMS: dict[str, Program] = {
    "accumulation, clipping, evaluation": training,
    "callbacks, best model": callbacks,
    "resume from a checkpoint": resuming,
    "bf16": bfloat16,
    "generation": generation,
}
