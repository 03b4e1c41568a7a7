"""A communicator on TCP connections of our own: `communicator` has it, `connections` makes them, C++ moves the bytes."""

from .communicator import TcpCommunicator, is_available

__all__ = ["TcpCommunicator", "is_available"]
