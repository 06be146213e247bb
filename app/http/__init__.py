"""The HTTP face: one Flask app over one open runtime; see ``server``."""
