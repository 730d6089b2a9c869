"""The target's own tensors, for export formats that hold a copy of what a head shares with its target.

Where the target is looked for: the one that the caller names; the one in the head's config, as a directory or in the
Hub's local cache; the demo target's cache, if the head names that target; the Hub. It is loaded only when a tensor of
it is asked for, and refused when it is not the one that the head was trained for.
"""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..demo_target import NAME as DEMO_NAME
from ..demo_target import demo_target_directory, is_complete
from ..heads.base import check_pair
from ..heads.base_config import HeadConfig
from ..heads.fingerprint import describe_mismatch, last_part


class TargetUnavailable(ValueError):
    """The target could not be had; the message says where it was looked for."""


class TargetParts:
    """One head's target: found when asked for, loaded at most once.

    Args:
        config: The head's config.
        given: The target that the caller names; None = the head's own word for it.
        token: Hub token.
    """

    def __init__(self, config: HeadConfig, given: str | None = None, token: str | bool | None = None):
        self.head_config, self.given, self.token = config, given, token
        self._model: PreTrainedModel | None = None

    @property
    def name(self) -> str | None:
        """The target's name for people: what the caller gave, else what the head's config says."""
        return self.given or self.head_config.target_name

    def locate(self) -> str:
        """Return a directory or a Hub name to load the target from.

        Raises:
            TargetUnavailable: If neither the caller nor the head names a target.
        """
        if self.given is not None:
            return self.given
        name = self.head_config.target_name
        if name is None:
            raise TargetUnavailable("The head's config names no target; give it with --target <name or directory>.")
        demo = demo_target_directory()
        here = is_here(name, self.head_config.target_revision)
        if not here and last_part(name) == DEMO_NAME.lower() and is_complete(demo):
            return str(demo)
        return name

    def config(self) -> PreTrainedConfig:
        """Return the target's config.

        Raises:
            TargetUnavailable: If it cannot be had.
        """
        where = self.locate()
        try:
            return AutoConfig.from_pretrained(where, **self._hub_arguments(where))
        except (OSError, ValueError) as error:
            raise self.unavailable(error) from error

    def model(self) -> PreTrainedModel:
        """Return the target, loaded in the dtype it was saved in and checked against the head.

        Raises:
            TargetUnavailable: If it cannot be had.
            ValueError: If it does not fit the head, or is not the target that the head was trained for.
        """
        if self._model is None:
            where = self.locate()
            try:
                model = AutoModelForCausalLM.from_pretrained(where, dtype="auto", **self._hub_arguments(where))
            except (OSError, ValueError) as error:
                raise self.unavailable(error) from error
            check_pair(self.head_config, model.config)
            mismatch = describe_mismatch(self.head_config, model)
            # Without a fingerprint only names are compared, and the caller may well name a copy.
            if mismatch and (self.given is None or self.head_config.target_fingerprint):
                raise ValueError(f"The target {where} is not the one that the head was trained for: {mismatch}.")
            self._model = model.eval()
        return self._model

    def embeddings(self, needed_by: str) -> Tensor:
        """Return the target's input embeddings [V, H].

        Args:
            needed_by: What holds a copy of them, for the error.

        Raises:
            TargetUnavailable: If the target cannot be had.
        """
        return self._table("input embeddings (embed_tokens)", needed_by, "get_input_embeddings")

    def lm_head(self, needed_by: str) -> Tensor:
        """Return the target's LM head [V, H].

        Args:
            needed_by: What holds a copy of it, for the error.

        Raises:
            TargetUnavailable: If the target cannot be had.
            ValueError: If its LM head has a bias, which no format holds.
        """
        table = self._table("LM head (lm_head)", needed_by, "get_output_embeddings")
        if getattr(self.model().get_output_embeddings(), "bias", None) is not None:
            raise ValueError(f"The target's LM head has a bias, which {needed_by} cannot hold; train an own LM head.")
        return table

    def unavailable(self, error: BaseException) -> TargetUnavailable:
        """Return the error that says where the target was looked for."""
        return TargetUnavailable(
            f"The target {self.name} cannot be had ({type(error).__name__}): no directory of that name, not in the "
            "Hub's local cache nor the demo target's, and the Hub did not give it. Give it with --target <name or "
            "directory>."
        )

    def _table(self, part: str, needed_by: str, getter: str) -> Tensor:
        try:
            weight = getattr(self.model(), getter)().weight
        except TargetUnavailable as error:
            raise TargetUnavailable(
                f"{needed_by} holds a copy of the target's {part}, which the head shares. {error}"
            ) from error
        if weight.device.type == "meta" or not weight.is_floating_point():
            kind = f"{weight.dtype} on {weight.device}"
            raise ValueError(f"The target's {part} is no plain table ({kind}); give the unquantised target.")
        return torch.as_tensor(weight.detach().cpu().contiguous())

    def _hub_arguments(self, where: str) -> dict[str, Any]:
        if Path(where).is_dir():
            return {}
        revision = self.head_config.target_revision if self.given is None else None
        return {"token": self.token} | ({"revision": revision} if revision else {})


def is_here(name: str, revision: str | None = None) -> bool:
    """Whether a target's config and weights are on this machine, as a directory or in the Hub's local cache."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        try:
            found = try_to_load_from_cache(name, "config.json", revision=revision)
        except HFValidationError:
            return False
        if not isinstance(found, str):
            return False
        folder = Path(found).parent
    return any(folder.glob("*.safetensors")) and (folder / "config.json").is_file()
