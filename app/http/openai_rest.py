"""``/v1/models``, as OpenAI's and Anthropic's clients speak it, and ``/v1/embeddings``, as OpenAI's do."""

from __future__ import annotations

import base64
from datetime import UTC, datetime

from flask import Blueprint, Response, jsonify

from personalpeft import Runtime
from personalpeft_app.http import asking, bodies
from personalpeft_app.http.failures import UnknownModel, Unsupported
from personalpeft_app.http.models import Models

_MOST_TEXTS = 256


def blueprint(runtime: Runtime, models: Models) -> Blueprint:
    """The routes."""
    made = Blueprint("openai_rest", __name__)

    @made.get("/v1/models")
    def listed() -> Response:
        found = [_model(*each) for each in models.names()]
        page = {"first_id": found[0]["id"], "last_id": found[-1]["id"], "has_more": False}
        return jsonify({"object": "list", "data": found, **page})

    @made.get("/v1/models/<path:name>")
    def one(name: str) -> Response:
        model = models.named(name)
        since = next((since for known, since in models.names() if known == name), 0)
        return jsonify(_model(model.name, since))

    @made.post("/v1/embeddings")
    def embeddings() -> Response:
        body = bodies.read_object()
        bodies.only(body, known=("model", "input", "encoding_format"), ignored=("user",))
        form = bodies.text(body, "encoding_format") or "float"
        if form not in ("float", "base64"):
            raise Unsupported("encoding_format must be float or base64.", "encoding_format")
        if asking.model_name(body) != runtime.embedder:
            raise UnknownModel(f"Texts become vectors by the model {runtime.embedder} here, and by no other.")
        texts = bodies.texts(body, "input", most=_MOST_TEXTS, longest=100_000)
        if not texts:
            raise Unsupported("input is missing.", "input")
        found = runtime.embed(texts)
        data = [
            {
                "object": "embedding",
                "index": n,
                "embedding": vector.tolist()
                if form == "float"
                else base64.b64encode(vector.astype("<f4").tobytes()).decode(),
            }
            for n, vector in enumerate(found.vectors)
        ]
        usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
        return jsonify({"object": "list", "data": data, "model": found.model, "usage": usage})

    return made


def _model(name: str, since: int) -> dict[str, object]:
    """A model in the words of both."""
    openai = {"object": "model", "created": since, "owned_by": "personalpeft"}
    anthropic = {"type": "model", "display_name": name, "created_at": datetime.fromtimestamp(since, UTC).isoformat()}
    return {"id": name, **openai, **anthropic}
