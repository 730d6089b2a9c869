"""Align a small draft model with its target on the draft's own samples (TRL's DistillationTrainer).

    accelerate launch --config_file recipes/accelerate/one_gpu.yaml recipes/distill_draft.py \
        --config recipes/configs/smollm2-135m-draft.yaml

`--keep_every 3` makes the draft out of every third layer of the target. `spechead train draft` is the same main.
"""

import sys

from spechead.cli.main import main

if __name__ == "__main__":
    main(["train", "draft", *sys.argv[1:]])
