"""A client of the HTTP API, with the methods, values and errors of the library.

    from personalpeft_app.client import connect

    ada = connect("http://127.0.0.1:8080", api_key).user("ada")
    reply = ada.chat("How do I boil an egg?")
    ada.feedback(reply, edit="Eight minutes in boiling water, then cold water.")
    print(ada.learn())

The library's method of the same name documents each method. A server cannot pause a learn, take a
verifier that is an object, or write into a folder here. Besides the library's errors a call raises
``NotAllowed`` and ``Unreachable``. Requests go through httpx2, which comes with the library.
"""

from personalpeft.chat.compare import Comparison
from personalpeft_app.client.remote import Client, RemoteUser, connect
from personalpeft_app.client.streaming import RemoteStream
from personalpeft_app.client.transport import NotAllowed, Unreachable

__all__ = [
    "Client",
    "Comparison",
    "NotAllowed",
    "RemoteStream",
    "RemoteUser",
    "Unreachable",
    "connect",
]
