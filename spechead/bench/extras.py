"""What a results file holds besides timed records: peak memory, and an answer of each method to look at."""

from dataclasses import dataclass

from huggingface_hub.dataclasses import strict


@strict
@dataclass
class Peak:
    """Peak bytes of tensors while one batch was answered, every loaded model included."""

    load: int
    method: str
    bytes: int


@strict
@dataclass
class Sample:
    """One answer.

    Attributes:
        load, method: under which it was given.
        prompt: its id.
        pieces: the text that each token added; an unfinished character comes with the token that ends it.
        drafted: for each token, whether it had been drafted and was kept.
    """

    load: int
    method: str
    prompt: str
    pieces: list[str]
    drafted: list[bool]
