"""Speculative decoding with the head in this repo, for a model that knows nothing of spechead.

    model.generate(**inputs, custom_generate="spechead/smollm2-135m-instruct-eagle3", trust_remote_code=True)

All the work is in the installed spechead package; this file says which head. `speculative=` takes a method or a
config, `head=` another repo or a directory of one.
"""

from typing import Any

from spechead.hub.remote import generate_with_head

HEAD = "spechead/smollm2-135m-instruct-eagle3"


def generate(model: Any, head: str = HEAD, **arguments: Any) -> Any:
    """Generate with the head of the commit that this file is of; arguments as transformers'."""
    return generate_with_head(model, head, code_file=__file__ if head == HEAD else None, **arguments)
