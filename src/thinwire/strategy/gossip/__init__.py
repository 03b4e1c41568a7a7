"""Workers average parameters with neighbours: in rounds (`gossip`, `steps`, `rounds`) or without them (`asynchronous`)."""
