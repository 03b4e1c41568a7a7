"""A small GPT with the Trainer of Transformers, on the text of thinwire's licence: workers that send low-rank gradients.

torchrun --nproc-per-node 2 examples/trainers/transformers_gpt.py
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import thinwire.comm.backend  # noqa: F401 - makes the backend "thinwire" known
from thinwire.integrations.transformers import AttachStrategy

TEXT = Path(__file__).parents[2] / "LICENSE"


def collate(batch: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    tokens = torch.stack([tokens for (tokens,) in batch])
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--strategy", default="Gradients(PowerSGD(rank=4))")
    parser.add_argument("--backend", default="gloo", help="thinwire: our own connections, for long lines")
    parser.add_argument("--output", default="runs/transformers")
    parser.add_argument("--resume", help="folder of the checkpoint to continue")
    options = parser.parse_args()

    torch.distributed.init_process_group(options.backend)  # the trainer takes the group that is there
    tokens = torch.tensor(list(TEXT.read_bytes()))
    data = TensorDataset(tokens[: len(tokens) // 64 * 64].view(-1, 64))
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    arguments = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        logging_steps=10,
        save_steps=20,
        report_to=[],
        use_cpu=True,
        seed=0,
        average_tokens_across_devices=False,  # all batches have equally many; else workers would ask in each step
    )
    trainer = Trainer(GPT2LMHeadModel(config), arguments, data_collator=collate, train_dataset=data)
    AttachStrategy(trainer, options.strategy, resume_from=options.resume)
    result = trainer.train(resume_from_checkpoint=options.resume)
    if trainer.is_world_process_zero():
        fewer = trainer.state.log_history[-2]["thinwire/fewer_than_fp32"]
        print(f"loss {result.training_loss:.4f}, {fewer:.1f} times less than fp32")


if __name__ == "__main__":
    main()
