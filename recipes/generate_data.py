"""Let a target answer prompts: the data that its heads are trained on.

    accelerate launch --config_file recipes/accelerate/one_gpu.yaml recipes/generate_data.py \
        --config recipes/configs/smollm2-135m-data.yaml

Started again after a kill it goes on where it was. `--endpoint http://host:8000/v1` asks a vLLM or SGLang server
instead. `spechead train data` is the same main.
"""

import sys

from spechead.cli.main import main

if __name__ == "__main__":
    main(["train", "data", *sys.argv[1:]])
