"""``python -m personalpeft_app`` is the command ``personalpeft``."""

from personalpeft_app.cli import main

main()
