"""What `/v1/models` says of a name."""

import hashlib
from typing import Any

from dcpjax.server.service import Served


def model_card(served: Served, name: str) -> dict[str, Any]:
    """The entry of `name` in the list of models: OpenAI's fields, and vLLM's `root`, `max_model_len`, `permission`."""
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "dcpjax",
        "root": served.model.name,
        "parent": None,
        "max_model_len": served.model.max_model_len,
        "permission": [
            {
                "id": f"modelperm-{hashlib.sha256(name.encode()).hexdigest()[:24]}",
                "object": "model_permission",
                "created": served.created,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }
