"""What a streamer must be able to do; checked before the first token."""

from typing import Any


def check_streamer(streamer: Any) -> None:
    """Refuse what cannot be streamed to.

    Raises:
        ValueError: if it lacks one of the two methods of transformers' BaseStreamer.
    """
    missing = [name for name in ("put", "end") if not callable(getattr(streamer, name, None))]
    if streamer is not None and missing:
        raise ValueError(
            f"streamer={type(streamer).__name__} has no {' and no '.join(f'{name}()' for name in missing)}; give a "
            "transformers streamer (TextStreamer, TextIteratorStreamer) or any object with put(tokens) and end()."
        )
