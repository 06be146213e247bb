"""Has vLLM find the stacks of personalpeft by their names, ``personalpeft:<digest>``.

``settings`` reads what is wanted from the environment; ``sources`` are where copies are found; ``cache`` pulls, checks and keeps
them; ``plugin`` is all that knows vLLM, ``ray_serve`` all that knows Ray. The rest is the standard library alone.
"""
