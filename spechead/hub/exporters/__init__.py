"""One strict exporter a format: what its engine runs (`RUNS`), where that was read (`origin`), the files (`plan`)."""

from types import ModuleType

from . import eagle, llamacpp, medusa, sglang, speculators, tgi, vllm

FORMATS: dict[str, ModuleType] = {
    "vllm": vllm,
    "sglang": sglang,
    "tgi": tgi,
    "speculators": speculators,
    "llamacpp": llamacpp,
    "eagle": eagle,
    "medusa": medusa,
}

__all__ = ["FORMATS"]
