"""The description of the JSON endpoint in OpenAPI 3.1, for people and for generators of clients."""

from dataclasses import asdict
from typing import Any

import aidgn
from aidgn.data.images import FORMAT_NAMES
from aidgn.serve.decoding import OTHER_MODES_SHARE
from aidgn.serve.engine import Limits

TEXT = {"type": "string"}
NUMBER = {"type": "number"}
INTEGER = {"type": "integer"}
PROBABILITY = {"type": "number", "minimum": 0, "maximum": 1}


def schema(limits: Limits) -> dict[str, Any]:
    """Return the answer to GET /api/schema."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "aidgn serve",
            "version": aidgn.__version__,
            "description": "Pictures in, labels out. Example: curl -F images=@photo.jpg http://HOST/api/predict",
        },
        "paths": {
            "/api/predict": {"post": describe_predict(limits)},
            "/api/model": describe_get(
                "Classes, domains, limits and the map of training images",
                json_content("The model.", {"type": "object"}),
            ),
            "/api/site": describe_get(
                "How the latest pictures compare with the sites of the training",
                json_content(
                    "The comparison; null without pictures, or if the model cannot tell.",
                    json_object({"site": {"type": ["object", "null"]}}),
                ),
            ),
            "/api/training/{index}": describe_get(
                "A small picture of a training image; status 404 if there is none",
                {"description": "PNG.", "content": {"image/png": {}}},
                parameters=[{"name": "index", "in": "path", "required": True, "schema": INTEGER}],
            ),
            "/api/health": describe_get(
                "Whether the server runs, and its number of requests",
                json_content(
                    "The server runs.",
                    json_object({"status": {"const": "ok"}, "working": INTEGER, "waiting": INTEGER}),
                ),
            ),
            "/metrics": describe_get(
                "Numbers for Prometheus", {"description": "Prometheus text.", "content": {"text/plain": {}}}
            ),
        },
        "x-limits": asdict(limits),
    }


def describe_get(summary: str, answer: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Describe a GET request and its answer of status 200."""
    return {"get": {"summary": summary, **more, "responses": {"200": answer}}}


def describe_predict(limits: Limits) -> dict[str, Any]:
    """Describe the request for predictions and its answers."""
    images = {
        "type": "array",
        "minItems": 1,
        "maxItems": limits.images,
        "items": {"type": "string", "format": "binary"},
        "description": f"{FORMAT_NAMES} files, each as a part `images`.",
    }
    form = {"multipart/form-data": {"schema": json_object({"images": images})}}
    # With several files, the status is an error only if all files failed.
    per_file = "; if this holds for every file of a request, the answer has this status and a list `images`."
    error_or_images = {"oneOf": [ERROR, IMAGES]}
    too_large = (
        f"More than {limits.megabytes} MB or {limits.images} files, or a picture of more than {limits.megapixels} "
        f"million pixels ({limits.megapixels * OTHER_MODES_SHARE:g} million with transparency or 16-bit grey){per_file}"
    )
    no_picture = f"The request is not multipart/form-data, or a file is not a picture{per_file}"
    damaged = f"No file, a malformed request, or a damaged picture{per_file}"
    return {
        "summary": "Classify pictures",
        "parameters": [
            {
                "name": "explain",
                "in": "query",
                "required": False,
                "schema": {"type": "string", "enum": ["0", "1"]},
                "description": "1: answer with heatmaps, and count the pictures neither for /api/site nor /metrics.",
            }
        ],
        "requestBody": {"required": True, "content": form},
        "responses": {
            "200": json_content("At least one picture was classified.", IMAGES),
            "401": json_content("The token is missing or wrong.", ERROR),
            "403": json_content("A page of another site sent the request, or the server's name was wrong.", ERROR),
            "408": json_content("The request was not complete in time.", ERROR),
            "413": json_content(too_large, error_or_images),
            "415": json_content(no_picture, error_or_images),
            "422": json_content(damaged, error_or_images),
            "429": json_content("Too many requests are waiting. The header Retry-After gives the seconds.", ERROR),
            "503": json_content(f"No answer within {limits.seconds} seconds, or the server is stopping.", ERROR),
        },
    }


def json_content(description: str, content: dict[str, Any]) -> dict[str, Any]:
    """Describe a response in JSON."""
    return {"description": description, "content": {"application/json": {"schema": content}}}


def json_object(properties: dict[str, Any], description: str | None = None) -> dict[str, Any]:
    """Describe an object with required properties."""
    described = {} if description is None else {"description": description}
    return {"type": "object", "required": list(properties), **described, "properties": properties}


STATUS_AND_MESSAGE = json_object({"status": INTEGER, "message": TEXT})
ERROR = json_object({"error": STATUS_AND_MESSAGE})
NEIGHBOR = json_object(
    {
        "index": INTEGER,
        "class": TEXT,
        "domain": TEXT,
        "distance": {**NUMBER, "minimum": 0, "description": "1 - cosine of the angle between the features."},
        "thumbnail": {"type": ["string", "null"], "description": "Path of a small PNG on this server."},
    }
)
PICTURE = json_object(
    {
        "name": {**TEXT, "description": "Name of the file, as sent."},
        "label": {**TEXT, "description": "The most probable class."},
        "probability": {**PROBABILITY, "description": "Probability of this class."},
        "probabilities": {
            "type": "object",
            "additionalProperties": PROBABILITY,
            "description": "Probability of every class.",
        },
        "chance": {
            "type": ["number", "null"],
            "minimum": 0,
            "maximum": 1,
            "description": "Chance that the label is right at an unseen site; null if the model cannot tell.",
        },
        "warning": {
            "type": ["string", "null"],
            "description": "How the picture differs from the training images; null if it does not, or if the model "
            "cannot tell.",
        },
        "position": {
            "type": ["array", "null"],
            "items": NUMBER,
            "minItems": 2,
            "maxItems": 2,
            "description": "Position on the map of training images, x and y from 0 to 1.",
        },
        "heatmap": {
            "type": ["string", "null"],
            "description": "The picture in grey, the places that speak for its label in colour: a data: URI of PNG; "
            "null without ?explain=1, or if the network has no places.",
        },
        "nearest": {"type": "array", "description": "The nearest training images, nearest first.", "items": NEIGHBOR},
    },
    "The prediction for a picture.",
)
FAILURE = json_object({"name": TEXT, "error": STATUS_AND_MESSAGE}, "The error in a file that cannot be classified.")
IMAGES = json_object(
    {
        "images": {
            "type": "array",
            "items": {"oneOf": [PICTURE, FAILURE]},
            "description": "One entry per file, in the order sent.",
        },
        "seconds": {**NUMBER, "description": "Time from the start of the request to its answer."},
    }
)
