"""Train an EAGLE-1 or EAGLE-3 head for a frozen target on its own answers.

    accelerate launch --config_file recipes/accelerate/one_gpu.yaml recipes/train_eagle.py \
        --config recipes/configs/smollm2-135m-eagle3.yaml --learning_rate 5e-4

`--dry_run true` shows what would be trained and how long it takes. `spechead train eagle` is the same main.
"""

import sys

from spechead.cli.main import main

if __name__ == "__main__":
    main(["train", "eagle", *sys.argv[1:]])
