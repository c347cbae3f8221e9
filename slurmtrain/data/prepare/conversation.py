"""Conversations: a record of chat data -> the messages of its turns, whatever its fields are called.

These forms are known, in this order:

    {"messages": [{"role": "user", "content": "..."}, ...]}          of OpenAI and Hugging Face; also {"tools": [...]}
    {"conversations": [{"from": "human", "value": "..."}, ...]}      of ShareGPT
    {"prompt": ..., "completion": ...}                               of TRL: each a text, or a list of messages
    {"instruction": "...", "input": "...", "output": "..."}          of Alpaca; the input may be missing or empty
    {"prompt" or "question": "...", "response" or "answer": "..."}

A field "system" beside them is the first message, unless that is a system message itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ASSISTANT = "assistant"
PAIRS = (  # names of the fields of a question and its answer
    ("prompt", "completion"),
    ("prompt", "response"),
    ("prompt", "answer"),
    ("question", "answer"),
    ("question", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
)
ROLES = {  # of ShareGPT -> of chat templates
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "model": ASSISTANT,
    "observation": "tool",
    "function_response": "tool",
}


@dataclass(frozen=True)
class BadRecord:
    """A record that is left out, with the reason."""

    reason: str


@dataclass(frozen=True)
class Conversation:
    """The messages of a record.

    Attributes:
        messages: in the form that chat templates expect, each with `role` and `content`.
        tools: descriptions of functions that the assistant may call; None: there are none.
    """

    messages: tuple[dict[str, Any], ...]
    tools: list[Any] | None = None

    def answers(self) -> list[int]:
        """Return the indices of the assistant's messages that count: all but those with `weight` 0."""
        return [
            index
            for index, message in enumerate(self.messages)
            if message["role"] == ASSISTANT and message.get("weight", 1) != 0
        ]


def conversation_of(record: Mapping[str, Any]) -> Conversation | BadRecord:
    """Return the conversation of a record, or why it is bad."""
    tools = record.get("tools") or None
    if tools is not None and not isinstance(tools, list):
        return BadRecord(f"'tools' is no list, but {kind_of(tools)}")
    if record.get("messages") is not None:
        messages = _messages("messages", record["messages"])
    elif record.get("conversations") is not None:
        messages = _messages("conversations", record["conversations"])
    else:
        messages = _pair(record)
    if isinstance(messages, BadRecord):
        return messages
    system = record.get("system")
    if isinstance(system, str) and system and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    conversation = Conversation(tuple(messages), tools)
    return conversation if conversation.answers() else BadRecord("the assistant says nothing in it")


def _messages(name: str, value: Any) -> list[dict[str, Any]] | BadRecord:
    if not isinstance(value, list):
        return BadRecord(f"{name!r} is no list, but {kind_of(value)}")
    messages = []
    for number, item in enumerate(value):
        if not isinstance(item, dict):
            return BadRecord(f"{name}[{number}] is no object, but {kind_of(item)}")
        # A table has all fields in every row: those that are null are not there.
        message = {key: field for key, field in item.items() if field is not None}
        if "role" not in message and "from" in message:
            said = message.pop("from")
            message |= {"role": said, "content": message.pop("value", None)}
        if not isinstance(message.get("role"), str):
            return BadRecord(f"{name}[{number}] has no 'role'")
        message["role"] = ROLES.get(message["role"], message["role"])
        content = message.setdefault("content", "" if message.get("tool_calls") else None)
        if not isinstance(content, str | list):
            return BadRecord(f"{name}[{number}] has no 'content' that is a text, but {kind_of(content)}")
        messages.append(message)
    return messages


def _pair(record: Mapping[str, Any]) -> list[dict[str, Any]] | BadRecord:
    names = next((pair for pair in PAIRS if all(record.get(name) is not None for name in pair)), None)
    if names is None:
        return BadRecord(
            "it has neither 'messages' nor a question and its answer, but "
            + (", ".join(map(repr, record)) or "nothing")
        )
    turns = []
    for name, role in zip(names, ("user", ASSISTANT), strict=True):
        value = record[name]
        if isinstance(value, list):
            messages = _messages(name, value)
            if isinstance(messages, BadRecord):
                return messages
            turns += messages
        elif isinstance(value, str):
            turns.append({"role": role, "content": value})
        else:
            return BadRecord(f"{name!r} is no string, but {kind_of(value)}")
    given = record.get("input") if names[0] == "instruction" and isinstance(record["instruction"], str) else None
    if isinstance(given, str) and given:
        turns[0] = {**turns[0], "content": f"{turns[0]['content']}\n\n{given}"}
    return turns


def kind_of(value: object) -> str:
    """Return what a value of JSON is, for a person."""
    return "null" if value is None else type(value).__name__
