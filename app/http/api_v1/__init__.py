"""Our own API under ``/api/v1``: one table of operations, from which the routes, the OpenAPI document, the page of the docs and
the contract of the client follow.

``shapes`` says how values become JSON and back; ``values`` and ``operations`` are the table; none of them imports Flask, so
that the client can read them. ``acts`` does what each operation says with the library, ``working`` what goes on after the
answer; ``jobs`` and ``desk`` hold what lives longer than a request, ``routes`` is the only module that knows HTTP.
"""
