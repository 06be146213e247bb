"""The home folder: the ledger, the catalog of revisions and the adapter files.

No other package touches the folder. Its mode is 0700. Layout of a home:

- ``personalpeft.db``: SQLite.
- ``blobs/<2 hex>/<64 hex>``: packed adapters by SHA-256.
- ``sessions/<user>/<layer>.session``: training state, disposable.
- ``notes/``: notes of maintenance tasks.
- ``models/``: the user's own cards.
- ``encryption.json``: in an encrypted home, which key opens it. See ``encryption``.
- ``write.lock``, ``write.holder``, ``locks/``.

Invariants:

- The ledger is append-only. A later signal may supersede an earlier one and a retraction may
  disable one. Neither is overwritten. Only an erasure removes content, and it leaves a tombstone.
- A write that returned is durable: it survives a kill and a power cut.
- A blob is durable and verified before a row names it. A head names only complete revisions of its
  own user and layer.
- All writes happen under one write lock, in one transaction each. Readers see all of a write or
  nothing.
"""
