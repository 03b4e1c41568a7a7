"""Communicators: how bytes move between workers, and the ledger that counts them. `base` has the contract."""

from .background import Background
from .base import Communicator
from .channel import Channel, Message
from .elastic.communicator import ElasticCommunicator
from .elastic.lighthouse import Lighthouse
from .handle import CommunicationError, Handle
from .layout import Layout, laid_out
from .ledger import Ledger
from .local_world import LocalWorld
from .members import Diverged, LeftOut, Loss, LostRounds, Members, RoundCounts, Version
from .process_group import Group, ProcessGroupCommunicator
from .process_world import ProcessWorld
from .tls.credentials import Credentials

__all__ = [
    "Background",
    "Channel",
    "CommunicationError",
    "Communicator",
    "Credentials",
    "Diverged",
    "ElasticCommunicator",
    "Group",
    "Handle",
    "Layout",
    "Ledger",
    "LeftOut",
    "Lighthouse",
    "LocalWorld",
    "Loss",
    "LostRounds",
    "Members",
    "Message",
    "ProcessGroupCommunicator",
    "ProcessWorld",
    "RoundCounts",
    "Version",
    "laid_out",
]
