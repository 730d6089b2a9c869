"""What the demo's configs read is written by a command in their comments or in a script's, or by another config."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "recipes" / "configs").glob("smollm2-*.yaml"))


def test_every_file_that_a_demo_config_names_is_made():
    texts = {path.name: path.read_text() for path in CONFIGS}
    configs = {name: yaml.safe_load(text) for name, text in texts.items()}
    commands = [*texts.values(), (ROOT / "scripts" / "tune_demo_target.py").read_text()]
    made = set(re.findall(r"--(?:output|output_dir|prompts|texts) (data/\S+)", "".join(commands)))
    for config in configs.values():
        where = Path(config["output_dir"])
        made |= {str(where), str(where.parent)}
    named = {(name, source) for name, config in configs.items() for source in config["data"]}
    named |= {(name, source) for name, config in configs.items() for source in config.get("answers", [])}
    assert ("smollm2-135m-data.yaml", "data/chats.jsonl") in named
    assert {(name, source) for name, source in named if source not in made} == set()
