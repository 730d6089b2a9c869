"""Tune the demo target with LoRA on given chats and merge: a target that has moved, to move a head after.

    python scripts/tune_demo_target.py --data data/passages.jsonl --output runs/tuned-target
    python recipes/generate_data.py --config recipes/configs/smollm2-135m-data.yaml --target runs/tuned-target \
        --data data/questions.jsonl --output_dir data/tuned-answers --limit 600
    python recipes/train_eagle.py --config recipes/configs/smollm2-135m-eagle3-moved.yaml

docs/recipes.md says how the two files of data are made; any JSONL with `messages` will do. The last command logs the
acceptance of the unmoved head before its first step, and of the moved one after.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from spechead.bench.hardware import native_bfloat16
from spechead.demo_target import fetch_demo_target


def main() -> None:
    """Tune, merge and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="JSONL with messages")
    parser.add_argument("--output", type=Path, required=True, help="directory of the tuned target")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    asked = parser.parse_args()
    source = fetch_demo_target()
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="float32")
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(asked.output / "checkpoints"),
            max_steps=asked.steps,
            learning_rate=asked.learning_rate,
            per_device_train_batch_size=8,
            max_length=384,
            use_cpu=True,
            bf16=native_bfloat16("cpu"),
            logging_steps=10,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=load_dataset("json", data_files=str(asked.data), split="train").select_columns(["messages"]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=asked.rank, lora_alpha=2 * asked.rank, target_modules="all-linear"),
    )
    trainer.train()
    trainer.model.merge_and_unload().bfloat16().save_pretrained(asked.output)
    tokenizer.save_pretrained(asked.output)
    print(f"Tuned target: {asked.output}")


if __name__ == "__main__":
    main()
