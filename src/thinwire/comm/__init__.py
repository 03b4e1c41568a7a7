"""Communicators: how bytes move between workers, and the ledger that counts them. `base` has the contract."""

from .base import Communicator
from .channel import Channel, Message
from .handle import CommunicationError, Handle
from .ledger import Ledger
from .local_world import LocalWorld
from .process_group import Group, ProcessGroupCommunicator
from .process_world import ProcessWorld
from .virtual import VirtualClock

__all__ = [
    "Channel",
    "CommunicationError",
    "Communicator",
    "Group",
    "Handle",
    "Ledger",
    "LocalWorld",
    "Message",
    "ProcessGroupCommunicator",
    "ProcessWorld",
    "VirtualClock",
]
