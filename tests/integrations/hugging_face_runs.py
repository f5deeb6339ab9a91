"""Trainers of transformers with LocoTrainerMixin, for tests; transformers is imported when used."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler

import lightning_loco as loco

STEPS, ACCUMULATE, BATCH, CLIP = 50, 2, 2, 0.5
METHODS = {
    "diloco": lambda: loco.DiLoCoStrategy(sync_every=7),
    "async_diloco": lambda: loco.AsyncDiLoCoStrategy(sync_every=8),
    "one_round_late": lambda: loco.AsyncDiLoCoStrategy(sync_every=5, fragments=None),
    "gasloc": lambda: loco.GASLoCStrategy(topology="complete", sync_every=6, momentum=0.3),
    "async_average": lambda: loco.AsyncModelAverageStrategy(interval_s=0.01),
    "pairwise_gossip": lambda: loco.PairwiseGossipStrategy(fetch_probability=0.5),
    "decoupled": lambda: loco.DecoupledDiLoCoStrategy(sync_every=6, fragments=3),
}


def join(rank: int, world: int) -> None:
    """Set what a launcher sets, for Accelerate; the process group exists already."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
    )


def gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=16,
        n_positions=8,
        n_embd=8,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return GPT2LMHeadModel(config).double()


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def tokenizer() -> Any:
    """Return a tokenizer of single characters, made without a download."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({chr(97 + i): i for i in range(16)}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="a", pad_token="a", eos_token="a", bos_token="a"
    )


def data(samples: int = 160) -> list[dict[str, Tensor]]:
    tokens = torch.randint(0, 16, (samples, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def arguments(folder: str | Path, **settings: Any) -> Any:
    from transformers import TrainingArguments

    defaults: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATE,
        "learning_rate": 0.01,
        "max_grad_norm": CLIP,
        "logging_steps": 5,
        "save_strategy": "no",
    }
    return TrainingArguments(str(folder), **{**defaults, **settings}, **quiet())


def quiet() -> dict[str, Any]:
    return {"use_cpu": True, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False}


def trainer_class() -> Any:
    from transformers import Trainer

    from lightning_loco.integrations.huggingface import LocoTrainerMixin

    class MyTrainer(LocoTrainerMixin, Trainer):
        is_sequential = False

        def _get_train_sampler(self, *args: Any) -> Any:
            if self.is_sequential:
                return SequentialSampler(self.train_dataset)
            return super()._get_train_sampler(*args)

    return MyTrainer


def make_trainer(method: Any, folder: str | Path, **settings: Any) -> Any:
    """Return a Trainer of a small GPT-2; ``settings`` of it, or of its TrainingArguments."""
    own = {
        name: settings.pop(name)
        for name in ("model", "eval_dataset", "callbacks", "train_dataset")
        if name in settings
    }
    defaults = {"model": gpt2(), "train_dataset": data(), "loco": method}
    args = arguments(folder, **settings)
    return trainer_class()(args=args, **{**defaults, **own})


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def batches_of(rank: int, world: int) -> list[dict[str, Tensor]]:
    """Return a worker's batches of an epoch in the order of the data, as Accelerate divides it."""
    rows = data()
    tokens = [
        torch.stack([row["input_ids"] for row in rows[i : i + BATCH]])
        for i in range(0, len(rows), BATCH)
    ]
    return [{"input_ids": one, "labels": one} for one in tokens[rank::world]]


def plain_loop(rank: int, world: int, method: Any, steps: int = STEPS) -> tuple[Tensor, Tensor]:
    """Return the local parameters of a plain loop after the last step, and the consensus."""
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0, fused=True)
    group = loco.distributed.WorkerGroup.create()
    engine = method.engine_of(model, group, None)
    batches = batches_of(rank, world)
    batches *= STEPS * ACCUMULATE // len(batches) + 1
    for step in range(steps):
        if step and engine.check_due():  # before a step and not after it, as in a Trainer
            engine.make_round()
        mine = batches[step * ACCUMULATE : (step + 1) * ACCUMULATE]
        count = sum(batch["labels"].numel() for batch in mine)
        for batch in mine:
            model(**batch, num_items_in_batch=torch.tensor(count)).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        engine.count_step()
    local = flat(model)
    engine.finish()
    engine.close()
    return local, flat(model)


class Watch:
    """Records of a Trainer's events: parameters by what happened then."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Tensor]] = {}

    def callback(self) -> Any:
        from transformers import TrainerCallback

        seen = self.seen

        class Recorder(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                seen.setdefault("step", []).append(flat(kwargs["model"]))

            def on_prediction_step(
                self, args: Any, state: Any, control: Any, **kwargs: Any
            ) -> None:
                seen.setdefault("evaluation", []).append(flat(kwargs["model"]))

            def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                seen.setdefault("end", []).append(flat(kwargs["model"]))

        return Recorder()


def loaded(folder: str | Path) -> Tensor:
    """Return the parameters of a model that was saved to a folder, in the order of ``flat``."""
    from safetensors.torch import load_file

    state, model = load_file(Path(folder, "model.safetensors")), copy.deepcopy(gpt2())
    model.load_state_dict(state, strict=False)
    model.tie_weights()  # type: ignore[operator]
    return flat(model)


def main() -> None:
    """A program for a launcher: trains, and is killed after some steps if it is told so."""
    folder, method, kill_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
    from transformers import TrainerCallback

    class Kill(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == kill_at:
                os.kill(os.getpid(), 9)

    callbacks = [Kill()] if kill_at else []
    settings = {"model": gpt2(0.1), "save_strategy": "steps", "save_steps": 6, "max_steps": 20}
    trainer = make_trainer(METHODS[method](), folder, callbacks=callbacks, **settings)
    resume = bool(list(Path(folder).glob("checkpoint-*")))
    trainer.train(resume_from_checkpoint=resume)
    if trainer.is_world_process_zero():
        torch.save(flat(trainer.model), Path(folder, "end.pt"))
        print(f"trained {trainer.state.global_step} steps, resumed {resume}")


if __name__ == "__main__":
    main()
