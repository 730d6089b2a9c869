"""Train Medusa heads for a frozen target on its own answers.

    accelerate launch --config_file recipes/accelerate/one_gpu.yaml recipes/train_medusa.py \
        --config recipes/configs/smollm2-135m-medusa.yaml --learning_rate 5e-4

`--dry_run true` shows what would be trained and how long it takes. `spechead train medusa` is the same main.
"""

import sys

from spechead.cli.main import main

if __name__ == "__main__":
    main(["train", "medusa", *sys.argv[1:]])
