"""The JSON endpoint in OpenAPI 3.1, for people and for programs that make clients of it."""

from dataclasses import asdict
from typing import Any

import aidgn
from aidgn.data.images import FORMAT_NAMES
from aidgn.serve.engine import OTHERS, Limits


def schema(limits: Limits) -> dict[str, Any]:
    """What GET /api/schema answers."""
    number, text = {"type": "number"}, {"type": "string"}
    share = {"type": "number", "minimum": 0, "maximum": 1}
    error = {
        "type": "object",
        "required": ["status", "message"],
        "properties": {"status": {"type": "integer"}, "message": text},
    }
    picture = {
        "type": "object",
        "required": ["name", "label", "probability", "probabilities", "warning", "position", "nearest"],
        "description": "What the model says of a picture.",
        "properties": {
            "name": {**text, "description": "The file's name, as it was sent."},
            "label": {**text, "description": "The most probable class."},
            "probability": {**share, "description": "Its probability."},
            "probabilities": {"type": "object", "additionalProperties": share, "description": "Of every class."},
            "warning": {
                "type": ["string", "null"],
                "description": "Why the picture is unlike the training images; null: it is not, or the model "
                "cannot tell.",
            },
            "position": {
                "type": ["array", "null"],
                "items": number,
                "minItems": 2,
                "maxItems": 2,
                "description": "Its place on the map of training images, x and y from 0 to 1.",
            },
            "nearest": {
                "type": "array",
                "description": "The nearest training images, nearest first.",
                "items": {
                    "type": "object",
                    "required": ["index", "class", "domain", "distance", "thumbnail"],
                    "properties": {
                        "index": {"type": "integer"},
                        "class": text,
                        "domain": text,
                        "distance": {**number, "minimum": 0, "description": "1 - cosine of the angle of the features."},
                        "thumbnail": {"type": ["string", "null"], "description": "Path of a small PNG on this server."},
                    },
                },
            },
        },
    }
    failure = {
        "type": "object",
        "required": ["name", "error"],
        "description": "A file that is no usable picture.",
        "properties": {"name": text, "error": error},
    }
    answer = {
        "type": "object",
        "required": ["images", "seconds"],
        "properties": {
            "images": {
                "type": "array",
                "items": {"oneOf": [picture, failure]},
                "description": "One entry per file, in the order sent.",
            },
            "seconds": {**number, "description": "How long it took."},
        },
    }
    refusal = {"type": "object", "required": ["error"], "properties": {"error": error}}

    def json(description: str, content: dict[str, Any]) -> dict[str, Any]:
        return {"description": description, "content": {"application/json": {"schema": content}}}

    files_alone = "; if this is so of every file of a request, its answer has this status and a list `images`"
    either = {"oneOf": [refusal, answer]}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "aidgn serve",
            "version": aidgn.__version__,
            "description": "Pictures in, labels out. Example: curl -F images=@photo.jpg http://HOST/api/predict",
        },
        "paths": {
            "/api/predict": {
                "post": {
                    "summary": "Classify pictures",
                    "requestBody": {
                        "required": True,
                        "content": {
                            "multipart/form-data": {
                                "schema": {
                                    "type": "object",
                                    "required": ["images"],
                                    "properties": {
                                        "images": {
                                            "type": "array",
                                            "minItems": 1,
                                            "maxItems": limits.images,
                                            "items": {"type": "string", "format": "binary"},
                                            "description": f"{FORMAT_NAMES} files, each as a part `images`.",
                                        }
                                    },
                                }
                            }
                        },
                    },
                    "responses": {
                        "200": json("At least one picture was classified.", answer),
                        "403": json(
                            "Asked for by a page of another site, or by a name this server is not known by.", refusal
                        ),
                        "408": json("The request was not complete in time.", refusal),
                        "413": json(
                            f"More than {limits.megabytes} MB or {limits.images} files, or a picture of more than "
                            f"{limits.megapixels} million pixels ({limits.megapixels * OTHERS:g} million with "
                            "transparency or 16-bit grey)" + files_alone + ".",
                            either,
                        ),
                        "415": json(
                            "The request is not multipart/form-data, or a file is not a picture" + files_alone + ".",
                            either,
                        ),
                        "422": json("No file, a malformed request, or a damaged picture" + files_alone + ".", either),
                        "429": json(
                            "Too many requests are waiting; header Retry-After says when to come again.", refusal
                        ),
                        "503": json(f"No answer within {limits.seconds} seconds, or the server is stopping.", refusal),
                    },
                }
            },
            "/api/model": {
                "get": {
                    "summary": "Classes, domains, limits and the map of training images",
                    "responses": {"200": json("The model.", {"type": "object"})},
                }
            },
            "/api/training/{index}": {
                "get": {
                    "summary": "A small picture of a training image",
                    "parameters": [{"name": "index", "in": "path", "required": True, "schema": {"type": "integer"}}],
                    "responses": {
                        "200": {"description": "PNG.", "content": {"image/png": {}}},
                        "404": json("There is none.", refusal),
                    },
                }
            },
            "/api/health": {
                "get": {
                    "summary": "Whether the server is there, and how busy",
                    "responses": {
                        "200": json(
                            "It is.",
                            {
                                "type": "object",
                                "required": ["status", "working", "waiting"],
                                "properties": {
                                    "status": {"const": "ok"},
                                    "working": {"type": "integer"},
                                    "waiting": {"type": "integer"},
                                },
                            },
                        )
                    },
                }
            },
        },
        "x-limits": asdict(limits),
    }
