"""DiLoCo in the Trainer of transformers: two workers fine-tune adapters of PEFT.

What it shows: a class of two names and one argument are all that differs from an ordinary Trainer.
Only the adapters travel, the evaluation and the checkpoints are the mean of both workers, and a
second `train` continues from a checkpoint. The model has random weights, so that nothing is loaded.

Run it: python examples/12_hugging_face_lora.py, which starts itself as
torchrun --nproc-per-node=2 examples/12_hugging_face_lora.py
"""

import argparse
import inspect
import os
import subprocess
import sys
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

from lightning_loco import DiLoCoStrategy
from lightning_loco.integrations.huggingface import LocoTrainerMixin

CONTEXT = 64


class MyTrainer(LocoTrainerMixin, Trainer):
    """A Trainer whose processes exchange rarely."""


def make_model(vocab_size: int) -> torch.nn.Module:
    """Return a small Llama with adapters."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
    )
    lora = LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "v_proj", "lm_head"])
    return get_peft_model(LlamaForCausalLM(config), lora)


def datasets(tokenizer: ByT5Tokenizer) -> tuple[list[dict], list[dict]]:
    """Return windows of a text that is on every machine, to train and to evaluate on."""
    tokens = torch.tensor(tokenizer(inspect.getsource(argparse))["input_ids"])
    rows = [{"input_ids": row, "labels": row} for row in tokens.unfold(0, CONTEXT, CONTEXT)]
    return rows[64:], rows[:64]


def main(folder: str) -> None:
    """Train 60 steps, and 60 more from a checkpoint."""
    tokenizer = ByT5Tokenizer()  # bytes
    train_data, eval_data = datasets(tokenizer)
    for max_steps in (60, 120):
        model = make_model(len(tokenizer))
        arguments = TrainingArguments(
            folder,
            max_steps=max_steps,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            eval_strategy="steps",
            eval_steps=60,
            save_steps=60,
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
            report_to=[],
        )
        method = DiLoCoStrategy(sync_every=10)
        trainer = MyTrainer(
            model, arguments, train_dataset=train_data, eval_dataset=eval_data, loco=method
        )
        trainer.train(resume_from_checkpoint=max_steps > 60)
        if trainer.is_world_process_zero():
            loss = trainer.state.log_history[-2]["eval_loss"]
            adapters, whole = model.get_nb_trainable_parameters()
            sent = trainer.loco.statistics.bytes_sent / trainer.loco.statistics.rounds
            print(f"{max_steps} steps: evaluation loss {loss:.2f}; {adapters} of {whole} ", end="")
            print(f"parameters are adapters, {sent / 1e3:.0f} kB sent per round", flush=True)


if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        with tempfile.TemporaryDirectory() as temporary:
            command = [*torchrun, "--nproc-per-node=2", __file__, temporary]
            sys.exit(subprocess.call(command))
    main(sys.argv[1] if len(sys.argv) > 1 else "hugging_face_lora")
