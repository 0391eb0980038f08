"""The calls of the contract, read off the generated descriptors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from rankbook import v1
from rankbook.errors import LimitExceeded
from rankbook.limits import MAX_CALL_BYTES, MAX_SMALL_CALL_BYTES
from rankbook.v1 import registry_pb2

__all__ = ["BY_FIELD", "BY_NUMBER", "SERVICE", "Method"]

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
    max_bytes: int
    """Largest request, in bytes."""

    def check_size(self, size: int) -> None:
        """Checks a request's size before it is read: reading is what costs.

        Raises:
            LimitExceeded: It is over the call's limit.
        """
        if size > self.max_bytes:
            raise LimitExceeded(
                f"the request of {size} bytes is over {self.name}'s limit of {self.max_bytes} "
                "bytes",
                metadata={
                    "limit": "message",
                    "call": self.name,
                    "value": size,
                    "bound": self.max_bytes,
                    "unit": "bytes",
                },
            )

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
        bound = MAX_CALL_BYTES.get(field.name, MAX_SMALL_CALL_BYTES)
        found[field.name] = Method(name, field.name, request, replies[field.name].number, bound)
    return found


BY_FIELD = _methods()
"""Every call but `cancel`, by its field in SessionRequest."""
BY_NUMBER = {
    field.number: BY_FIELD[field.name]
    for field in v1.SessionRequest.DESCRIPTOR.oneofs_by_name["call"].fields
    if field.name in BY_FIELD
}
"""The same by field number."""
