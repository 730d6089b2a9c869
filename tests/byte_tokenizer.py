"""A byte-level tokenizer without merges: any text survives, and chat markers are single tokens. Made in memory."""

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKERS = ("<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 256 bytes, `<pad>` and the markers of ChatML and Llama 3, with ChatML's template."""
    alphabet = sorted(ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={token: place for place, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKERS)})
    tokenizer.chat_template = CHATML
    return tokenizer
