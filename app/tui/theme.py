"""Colours for dark and light terminals. With NO_COLOR the terminal's own two are used."""

from __future__ import annotations

from textual.theme import Theme

# The style of secondary text.
DIM = "$secondary"

_BLOCKS = {"block-cursor-text-style": "none", "block-cursor-blurred-text-style": "none"}

DARK = Theme(
    "calm-dark",
    primary="#8fb4dc",
    secondary="#8a94a6",
    accent="#e3b27c",
    success="#93c69a",
    warning="#e0c074",
    error="#e58b8b",
    foreground="#d9dde5",
    background="#15171c",
    surface="#1b1e25",
    panel="#2b303a",
    dark=True,
    variables={
        **_BLOCKS,
        "block-cursor-background": "#2f3948",
        "block-cursor-foreground": "#f0f2f6",
    },
)
LIGHT = Theme(
    "calm-light",
    primary="#2c5f94",
    secondary="#667085",
    accent="#96580f",
    success="#24734a",
    warning="#806200",
    error="#b03434",
    foreground="#262a31",
    background="#fcfbf8",
    surface="#f4f2ed",
    panel="#d9d5cb",
    dark=False,
    variables={
        **_BLOCKS,
        "block-cursor-background": "#d5e0ec",
        "block-cursor-foreground": "#14181f",
    },
)
