"""Started by test_processes.py under a launcher: one training run; each process reports what it saw."""

import json
import os
import sys
from pathlib import Path

import torch

from spechead.training.batching import LengthBatches
from spechead.training.run import train_eagle, train_medusa
from spechead.training.trainer import HeadTrainer

torch.set_num_threads(1)
where, starve = Path(sys.argv[1]), sys.argv[2] == "starve"
seen = []
plain = HeadTrainer.compute_loss


def spy(self, model, inputs, **kwargs):
    seen.append(inputs["numbers"].tolist())
    return plain(self, model, inputs, **kwargs)


HeadTrainer.compute_loss = spy
if starve:  # the second process never gets a row
    order = LengthBatches.set_epoch

    def starving(self, epoch):
        order(self, epoch)
        if self.world_size == 2:
            self._batches = [batch if place % 2 == 0 else [] for place, batch in enumerate(self._batches)]

    LengthBatches.set_epoch = starving
outcome = (train_eagle if "--method" in sys.argv else train_medusa)(sys.argv[3:])
rank = int(os.environ.get("RANK", 0))
(where / f"seen-{rank}.json").write_text(json.dumps({"rows": seen, "head": str(outcome.head), "lines": outcome.lines}))
