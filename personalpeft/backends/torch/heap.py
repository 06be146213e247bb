"""Tell the C library when to return memory to the system."""

from __future__ import annotations

from personalpeft.host import loaded_function

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD
_LARGE = 1 << 20


def return_large_blocks() -> None:
    """Have every freed block of 1 MB or more returned to the system, where glibc is in use.

    By default glibc keeps blocks of up to 32 MB in its heap once such a block was freed. Activations
    then leave holes: a learn of the default base had 400 MB of them.
    """
    set_option = loaded_function("mallopt")
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, _LARGE)
