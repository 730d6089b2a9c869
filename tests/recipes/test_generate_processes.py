"""Two processes answer under the launcher: each its share, and the first tells what both left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_first_process_tells_what_all_have_skipped(tiny, flags, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers"
    # The second process has rows 1 and 3.
    asked = [["sun"], [" "], ["moon", "tree"], [""], ["bird"]]
    rows = [{"messages": [{"role": "user", "content": text} for text in texts]} for texts in asked]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out.mkdir()
    (out / "part-00001.jsonl").write_text('{"id": "4", "turn": 0, "respo')
    settings = {"target": str(tiny), "data": str(prompts), "output_dir": str(out), "dtype": "float32"}
    settings |= {"max_new_tokens": "4", "use_cpu": "true"}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", "--config_file"]
    command += [str(ROOT / "recipes" / "accelerate" / "cpu_2proc.yaml"), str(ROOT / "recipes" / "generate_data.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command + flags(settings), env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert "(processes: 2)" in done.stdout
    assert "skipped 2 rows: no user turn with text" in done.stdout
    lines = [line for part in sorted(out.glob("part-*.jsonl")) for line in part.read_text().splitlines()]
    made = sorted((record["id"], record["turn"]) for record in map(json.loads, lines))
    assert made == [("0", 0), ("2", 0), ("2", 1), ("4", 0)]
