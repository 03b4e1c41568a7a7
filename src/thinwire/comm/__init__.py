"""Communicators: how bytes move between workers, and the ledger that counts them. `base` has the contract."""

from .base import Communicator
from .channel import Channel, Message
from .elastic import ElasticCommunicator
from .handle import CommunicationError, Handle
from .ledger import Ledger
from .lighthouse import Lighthouse
from .local_world import LocalWorld
from .members import Loss, Members, RoundCounts
from .process_group import Group, ProcessGroupCommunicator
from .process_world import ProcessWorld
from .virtual import VirtualClock

__all__ = [
    "Channel",
    "CommunicationError",
    "Communicator",
    "ElasticCommunicator",
    "Group",
    "Handle",
    "Ledger",
    "Lighthouse",
    "LocalWorld",
    "Loss",
    "Members",
    "Message",
    "ProcessGroupCommunicator",
    "ProcessWorld",
    "RoundCounts",
    "VirtualClock",
]
