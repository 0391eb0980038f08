"""The generated contract, `rankbook.v1` of proto/, with every message in one place.

Regenerate with `make proto`; do not edit the generated modules.
"""

from rankbook.v1.calls_pb2 import *  # noqa: F403
from rankbook.v1.record_pb2 import *  # noqa: F403
from rankbook.v1.session_pb2 import *  # noqa: F403
from rankbook.v1.storage_pb2 import *  # noqa: F403
from rankbook.v1.topology_pb2 import *  # noqa: F403
from rankbook.v1.transfer_pb2 import *  # noqa: F403
