"""A word-level tokenizer over the tiny models' vocabulary, with a chat template that takes `start`, made in memory."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import VOCAB

TEMPLATE = (
    "{% for message in messages %}{{ '<user> ' if message['role'] == 'user' else '<answer> ' }}"
    "{{ message['content'] }} {% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
    "{% if start %} {{ start }}{% endif %}"
)


def tiny_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words are `<pad>`, `<user>`, `<answer>`, `<end>` and w4 .. w47."""
    words = ["<pad>", "<user>", "<answer>", "<end>", *(f"w{number}" for number in range(4, VOCAB))]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w4"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = template
    return tokenizer
