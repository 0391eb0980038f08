"""The calls of the contract, read off the generated descriptors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from rankbook import v1
from rankbook.v1 import registry_pb2

__all__ = ["BY_FIELD", "SERVICE", "Method"]

SERVICE = registry_pb2.DESCRIPTOR.services_by_name["Registry"].full_name
"""Full name of the service."""


@dataclass(frozen=True, slots=True)
class Method:
    """One call: its names, its request, and where it stands in a session's messages."""

    name: str
    """As the service has it, for example "GetTopology"."""
    field: str
    """As a session has it, for example "get_topology"."""
    request: type[Any]
    """Class of the request."""
    reply_number: int
    """Field number of the reply in SessionResponse."""

    def parse(self, data: bytes) -> Message:
        """The request of a unary call.

        Raises:
            google.protobuf.message.DecodeError: The bytes are no such message.
        """
        message: Message = self.request.FromString(data)
        return message


def _methods() -> dict[str, Method]:
    replies = v1.SessionResponse.DESCRIPTOR.fields_by_name
    found = {}
    for field in v1.SessionRequest.DESCRIPTOR.oneofs_by_name["call"].fields:
        if field.name == "cancel":
            continue
        name = "".join(part.capitalize() for part in field.name.split("_"))
        assert field.message_type is not None
        request = GetMessageClass(field.message_type)
        found[field.name] = Method(name, field.name, request, replies[field.name].number)
    return found


BY_FIELD = _methods()
"""Every call but `cancel`, by its field in SessionRequest."""
