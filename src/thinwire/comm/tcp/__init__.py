"""TCP connections of our own: `communicator` has collectives on them, `channel` messages in no common order;
`connections` makes them, C++ moves the bytes.
"""

from .communicator import TcpCommunicator
from .endpoint import is_available

__all__ = ["TcpCommunicator", "is_available"]
