"""The API under ``/api/v1``: one table of operations, from which the rest follows.

``operations`` is the table, ``schemas`` holds its types, and ``serialization`` reads and describes
them through pydantic. None of these imports Flask, so the client can use them. ``handlers`` calls
the library; ``jobs`` and ``ephemeral_state`` hold state between requests. ``blueprint`` is the only
module that knows HTTP.
"""
