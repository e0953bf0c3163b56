"""A chat and a tool that tests ask servers about, in the form of OpenAI's interface."""

from __future__ import annotations

from typing import Any

MESSAGES: Any = [{"role": "user", "content": "the hen is in the pen and the art is there"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds two numbers",
            "parameters": {
                "type": "object",
                "properties": {"a": {"enum": [1, 2, 3]}, "b": {"enum": [4, 5]}},
                "required": ["a", "b"],
            },
        },
    }
]
