"""Let vLLM find the stacks of personalpeft by their names, ``personalpeft:<digest>``.

``settings`` reads the environment, ``sources`` and ``bucket`` read copies, ``cache`` downloads and
checks them. Only ``plugin`` knows vLLM, and only ``ray_serve`` knows Ray; the rest is standard
library.
"""
